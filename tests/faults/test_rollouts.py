"""Steps of rollouts that go wrong, without a whole run.

What went wrong in other trainers and engines, and the test that would fail. Files without a folder are in
tests/training/rollouts; tests without a file are here.

Loss
    TRL#5619, #6024  divisor of micro-batches           micro_batches_and_their_order; test_policy.py
    TRL#5890         divisor of Liger                   test_policy.py: plain_transformers[packed]
    TRL#3532, #3675, #4531  prompts repeated            test_collector.py: written_and_learned
    TRL#2708         attention after the end            test_sampler.py: answers_end; ids_are_learned_as_they_are
    TRL#4970         the padding's id hides the end     ids_are_learned_as_they_are
    TRL#7024         padding in the reverse KL          test_teacher.py: teachers_log_probs[False]
    TRL#3500         dropout in the KL                  test_teacher.py: begins_with_no_distance
    TRL#3194         the reference is the base          test_teacher.py: adapter_that_the_run_goes_on_with
    verl#2506, #1083 advantages as mask, mode ignored   test_policy.py: plain_transformers
    verl#7893        deviation ignored                  compared_with_the_other_judged_answers
    verl#6452, OpenRLHF#1239, AReaL#1351  baseline      compared_with_the_other_judged_answers; that_is_left_out
    OpenRLHF#1240    NaN times 0                        token_that_the_sampler_called_impossible
    NeMo-RL#4158     advantage of equal rewards         advantages_stay_small; compared_with_the_other_judged_answers
    PipelineRL#54    mean of the first answer           compared_with_the_other_judged_answers
    JustRL#5         entropy by the order of batches    micro_batches_and_their_order
    ms-swift#8436    a teacher without the shift        test_teacher.py: teachers_log_probs
    open-instruct#537  the schedule ends early          test_collector.py: nothing_is_learned_count
    Axolotl#2659     Liger with divided rows            cannot exist: parallel.context is refused (test_needs.py)
Sampler and trainer
    TRL#4159, ms-swift#8427, unsloth-zoo#832  temperature  test_vllm.py: hot; test_sampler.py: log_probs; test_policy.py
    TRL#5144, #5242  tokens written again from text     ids_are_learned_as_they_are
    TRL#6166, #6868  log-probabilities NaN or null      stays_wrong[nans]; test_vllm.py: nulls
    TRL#5312, vLLM#29341  weights lost in sleep         the gap is measured after each waking: another; test_vllm.py: base
    ms-swift#9855    the adapter is ignored             test_vllm.py: base; test_collector.py: shorter
    vLLM#42125       cache of the old adapter           test_vllm.py: sampled_by_its_own_adapter
    NeMo-RL#2180     an update in a forward pass        test_vllm.py: sampled_by_its_own_adapter, in order
    prime-rl#491     stale answers                      stored_step_is_not_sampled_again_and_other_weights_are_named
    halo#8           answers that /pause cut off        stays_wrong[aborts]
    OpenRLHF#1108    another version of vLLM            test_vllm.py: sampled_by_its_own_adapter (step.json names it)
Hangs and memory
    a server that hangs, dies, is busy or starts again  fails_once; stays_wrong
    out of memory in sampling, in training              test_sampler.py, test_collector.py: not_fit_in_memory
    TRL#2923, #6798, AReaL#1439, prime-rl#381, ms-swift#3934  ranks wait
                                                        tests/distributed/test_world.py; test_collector.py: two_ranks
    verl#4896        minutes of sync                    cannot exist: an adapter is a file, without a collective call
    unsloth#3302, #3542, vLLM#36651, OpenRLHF#1349  shared memory  cannot exist: vLLM has its own process
Resume, images, data
    TRL#3247, surogate#70  resuming fails or is ignored test_kills.py: samples_scores_stores_trains_and_saves
    TRL#5863         skipped steps are sampled again    stored_step_is_not_sampled_again_and_other_weights_are_named
    unsloth#5183, #3605, #3357  several images          test_collector.py: several_images
    TRL#4976         answers that were cut off          cut_off_count_in_the_mean_alone
    Axolotl#2986     rows read as pairs                 compared_with_the_other_judged_answers, by the columns
    ms-swift#9261    number of steps                    test_collector.py: nothing_is_learned_count
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.rows import write_jsonl
from support.vllm_server import vllm_server

from fxtune.config.compose import load
from fxtune.errors import ConfigError, HardwareError, NumbersError
from fxtune.objectives.policy import Advantage, OnBadReward, Policy, Surrogate
from fxtune.training.builder import RunBuilder
from fxtune.training.rollouts import client, vllm
from fxtune.training.rollouts.collector import Collector
from fxtune.training.rollouts.episodes import Episodes, Sampled
from fxtune.training.rollouts.folder import Answer, Rollouts
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.rollouts.scoring import Group, Scores
from fxtune.training.rollouts.vllm import VllmSampler

TINY = Path(__file__).parents[2] / "fxtune" / "assets" / "tiny"
END, PAD, LONGEST = 2, 0, 8
DIFFERENT = [0.0, 1.0, 2.0]


class Given:
    """A sampler that gives these answers."""

    name, repeats, sync_seconds = "given answers", True, 0.0

    def __init__(self, answers: Sequence[Sampled]) -> None:
        self.answers, self.calls = list(answers), 0

    def sample(self, episodes: Episodes, weights_version: str) -> Callable[[], list[Answer]]:
        assert len(episodes.begin()) == len(self.answers)
        assert not episodes.go_on(self.answers)
        self.calls += 1
        return lambda: episodes.answers

    def close(self) -> None:
        pass


class Judge:
    """Rewards by group; None: the reward of this group fails."""

    def __init__(self, rewards: Sequence[Sequence[float | None] | None]) -> None:
        self.rewards, self.groups = rewards, list[Group]()

    def score(self, groups: Sequence[Group]) -> list[Scores]:
        self.groups = list(groups)
        return [Scores(problem="it broke") if own is None else Scores({"exact": list(own)}) for own in self.rewards]

    def close(self) -> None:
        pass


class Step:
    """A step with two prompts and three answers to each."""

    def __init__(self, folder: Path) -> None:
        rows = [{"prompt": f"Tell me about {thing}.", "answer": "a", "level": 3} for thing in ("tents", "Rome")]
        write_jsonl(folder / "rows.jsonl", rows)
        words = ["model=tiny", "objective=policy", "objective.rewards=[{name: exact}]", "run.device=cpu"]
        words += [f"data.sources=[{{path: {folder / 'rows.jsonl'}}}]", f"data.cache_dir={folder / 'cache'}"]
        words += ["data.sequence_length=40", f"sampler.max_tokens={LONGEST}", "sampler.answers=3"]
        words += ["train.micro_batch_size=1", "train.global_batch_size=2", "train.max_steps=1"]
        words += ["techniques.lora.enabled=true", "objective.max_gap=0.05", "tracking.display=none"]
        self.builder = RunBuilder(load(words))
        self.tokenizer, self.data = self.builder.read()
        self.model, _ = self.builder.proven_model()
        with torch.no_grad():  # adapters that change the answers
            for name, parameter in self.model.model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        self.folders = 0

    def collect(self, folder: Path, sampler: Any, rewards: Sequence[Any] = (DIFFERENT, DIFFERENT), **options: Any):
        """(the plan of the step, its answers as they are on the disk, the notes)"""
        config, notes = self.builder.config, list[str]()
        config = replace(config, objective=replace(config.objective, **options))
        rollouts = Rollouts(folder / "rollouts")
        self.plan = RolloutPlan.of(self.data.training, rollouts, config.data)
        about = config, self.model, sampler, rollouts, self.builder.techniques.precision, self.builder.world
        self.collector = Collector(*about, self.tokenizer, notes.append)
        self.collector.workers = self.judge = Judge(rewards)
        self.collector.collect(self.plan, 0)
        return self.plan.of_step(0), list(rollouts.answers(0)), notes

    def given(self, folder: Path, rewards: Sequence[Any], answers: Sequence[Sampled] | None = None, **options: Any):
        """collect() with drawn answers. Their log-probabilities are made up."""
        return self.collect(folder, Given(answers or drawn()), rewards, **{"max_gap": 1e9, **options})

    def sampler(self, url: str, folder: Path, **options: Any) -> VllmSampler:
        config = self.builder.config
        config = replace(config, sampler=replace(config.sampler, url=url, **options))
        prepared, rank = self.model.prepared, config.techniques.lora.r
        return VllmSampler(prepared, config, self.builder.world, {END}, folder / "rollouts", rank)

    def backward(self, batches: Sequence[Any], objective: Policy, tokens: float) -> tuple[dict, torch.Tensor]:
        """(the metrics, all gradients)"""
        step = self.builder.train_step(self.model, objective)
        found = step.backward(batches, tokens)
        trained = [parameter for parameter in self.model.model.parameters() if parameter.requires_grad]
        gradients = torch.cat([parameter.grad.flatten().clone() for parameter in trained])
        step.drop()
        return {name: value.item() for name, value in found.items()}, gradients


def drawn(seed: int = 0) -> list[Sampled]:
    random = np.random.default_rng(seed)
    answers = []
    for _ in range(6):
        ids = [*random.integers(3, 1000, int(random.integers(1, LONGEST - 1))).tolist(), END]
        answers.append(Sampled(ids, random.normal(-6, 2, len(ids)).clip(max=-0.01).tolist(), True))
    return answers


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> Step:
    return Step(tmp_path_factory.mktemp("step"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.01)


# --- advantages


def standard(rewards: list[float]) -> list[float]:
    own = np.array(rewards)
    return ((own - own.mean()) / (own.std(ddof=1) + 1e-4)).tolist()


@pytest.mark.parametrize(
    ("advantage", "rewards", "expected"),
    [
        (Advantage.centre, [1.0, 0.0, 0.5], [0.5, -0.5, 0.0]),
        (Advantage.std, [1.0, 0.0, 0.2], standard([1.0, 0.0, 0.2])),
        (Advantage.centre, [1.0, None, 0.0], [0.5, None, -0.5]),
        (Advantage.leave_one_out, [1.0, None, 0.0], [1.0, None, -1.0]),
        (Advantage.std, [None, 1.0, 0.0], [None, *standard([1.0, 0.0])]),
        (Advantage.centre, [None, 1.0, None], [None, None, None]),
        (Advantage.std, [None, None, None], [None, None, None]),
        (Advantage.std, [0.3, 0.1 + 0.2, 0.3], [None, None, None]),
        (Advantage.std, [float(np.float32(0.7)), 0.7, 0.7], [None, None, None]),
    ],
)
def test_an_answer_is_compared_with_the_other_judged_answers_to_its_prompt(
    step, tmp_path, advantage, rewards, expected
):
    _, answers, _ = step.given(tmp_path, [rewards, DIFFERENT], advantage=advantage)
    assert [answer["advantage"] for answer in answers[:3]] == pytest.approx(expected)
    assert [answer["advantage"] for answer in answers[3:]] == pytest.approx(advantage.of(np.array(DIFFERENT)).tolist())
    known = [reward for reward in rewards if reward is not None] + DIFFERENT
    assert step.collector.figures["rollout/reward"] == pytest.approx(np.mean(known))
    assert {name for group in step.judge.groups for name in group.columns} == {"answer", "level"}


def test_advantages_stay_small_however_near_rewards_are():
    random = np.random.default_rng(0)
    for spread in 10.0 ** np.arange(-16, 3):
        for mean in (0.0, 0.1, 1e3, -1e6):
            found = Advantage.std.of(mean + spread * random.normal(size=8))
            assert np.abs(found).max() < math.sqrt(8)


def test_a_group_that_is_left_out_changes_no_other_group(step, tmp_path):
    options = {"on_bad_reward": OnBadReward.drop}
    plan, answers, notes = step.given(tmp_path, [None, DIFFERENT], **options)
    assert [answer["advantage"] for answer in answers] == [None, None, None, -1.0, 0.0, 1.0]
    assert plan.supervised(0) == sum(len(answer["ids"]) for answer in answers[3:])
    assert "rows.jsonl" in notes[0]


def test_a_step_without_rewards_is_refused(step, tmp_path):
    with pytest.raises(ConfigError, match=r"rows.jsonl:\d"):
        step.given(tmp_path, [[None] * 3, [None] * 3])


def test_answers_that_were_cut_off_count_in_the_mean_alone(step, tmp_path):
    answers = drawn()
    answers[1] = replace(answers[1], finished=False)
    plan, found, _ = step.given(tmp_path, [DIFFERENT, DIFFERENT], answers, keep_truncated=False)
    assert [answer["advantage"] for answer in found[:3]] == [-1.0, None, 1.0]
    assert plan.supervised(0) == sum(len(answer.ids) for answer in answers) - len(answers[1].ids)


# --- tokens


def test_the_sampled_ids_are_learned_as_they_are(step, tmp_path):
    """Letters that a tokenizer would write as one token, the padding's id inside, and an answer of the end alone."""
    red = step.tokenizer(" red", add_special_tokens=False)["input_ids"]
    letters = [step.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in (" ", "r", "e", "d")]
    assert step.tokenizer(step.tokenizer.decode(letters), add_special_tokens=False)["input_ids"] != letters
    own = [[*letters, END], [PAD, PAD, END], [END], [*red, PAD], [letters[1]] * LONGEST, [END, END]]
    answers = [Sampled(ids, [-1.0 - at for at in range(len(ids))], True) for ids in own]
    plan, _, _ = step.given(tmp_path, [DIFFERENT, [1.0, 0.0, 3.0]], answers)
    learned = []
    for batch in [plan.batch(0, index) for index in range(plan.micro_batches(0))]:
        for document in batch.document_of_target().unique():
            at = batch.document_of_target() == document
            learned.append((batch.labels[at].tolist(), batch.sampled[at].tolist()))
    assert sorted(learned) == sorted((answer.ids, answer.log_probs) for answer in answers)


def test_loss_and_figures_do_not_depend_on_micro_batches_and_their_order(step, tmp_path):
    plan, _, _ = step.given(tmp_path, [DIFFERENT, [0.3, -0.9, 0.0]])
    objective, tokens = step.builder.config.objective, plan.supervised(0)
    batches = [plan.batch(0, index) for index in range(plan.micro_batches(0))]
    assert len(batches) > 1
    whole = plan.with_micro_batch_size(len(batches))
    figures, gradients = step.backward(batches, objective, tokens)
    assert figures["entropy"] > 0
    for others in (batches[::-1], [batch.with_rounded_targets() for batch in batches], [whole.batch(0, 0)]):
        again, same = step.backward(others, objective, tokens)
        assert again == pytest.approx(figures, rel=1e-5, abs=1e-6)
        assert (same - gradients).norm() <= 1e-5 * gradients.norm()


@pytest.mark.parametrize("surrogate", Surrogate)
@pytest.mark.parametrize("reward", [2.0, 0.5, -1.0])
def test_a_token_that_the_sampler_called_impossible_gives_finite_gradients(step, tmp_path, surrogate, reward):
    """Its ratio is infinite in float32. The advantages are positive, 0 and negative."""
    answers = drawn()
    answers[0] = replace(answers[0], log_probs=[-9999.0, *answers[0].log_probs[1:]])
    plan, _, _ = step.given(tmp_path, [[reward, 0.0, 1.0], DIFFERENT], answers, surrogate=surrogate)
    batches = [plan.batch(0, index) for index in range(plan.micro_batches(0))]
    objective = step.collector.objective
    found, gradients = step.backward(batches, objective, plan.supervised(0))
    assert math.isfinite(found["loss"])
    assert gradients.isfinite().all()


# --- stored steps


def test_a_stored_step_is_not_sampled_again_and_other_weights_are_named(step, tmp_path):
    _, before, notes = step.given(tmp_path, [DIFFERENT, DIFFERENT])
    assert notes == []
    again = Given([])
    _, after, notes = step.collect(tmp_path, again, max_gap=1e9)
    assert (again.calls, notes) == (0, [])
    assert after == before
    file = tmp_path / "rollouts" / "step-00000001" / "step.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "weights": "others"}))
    _, _, (note,) = step.collect(tmp_path, again, max_gap=1e9)
    assert "given answers wrote these answers with other weights" in note


# --- servers


@pytest.fixture(scope="module")
def undisturbed(step, tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with vllm_server(TINY) as server:
        return step.collect(folder, step.sampler(server.url, folder))[1]


@pytest.mark.parametrize("fault", ["forgets", "drops", "hangs", "busy"])
def test_a_server_that_fails_once_writes_the_same_answers(step, undisturbed, tmp_path, fault, monkeypatch):
    monkeypatch.setattr(vllm, "TRIES", 9)  # a busy machine may take longer for an answer than the hanging one may
    with vllm_server(TINY, faults=(fault,)) as server:
        sampler = step.sampler(server.url, tmp_path, request_seconds=3.0 if fault == "hangs" else 60.0)
        assert step.collect(tmp_path, sampler)[1] == undisturbed
        assert not server.faults
        sampler.close()
        assert server.loaded == []


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("another", NumbersError, "objective.max_gap"),
        ("another_midway", NumbersError, "objective.max_gap"),
        ("dies", HardwareError, "The same command goes on from"),
        ("silent", HardwareError, "timed out"),
        ("aborts", HardwareError, "'abort'"),
        ("nans", HardwareError, "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_that_stays_wrong_ends_the_run_and_leaves_no_step(step, tmp_path, fault, error, said, monkeypatch):
    if fault == "dies":
        monkeypatch.setattr(client, "START_SECONDS", 0.3)
    with vllm_server(TINY, faults=(fault,)) as server:
        sampler = step.sampler(server.url, tmp_path, request_seconds=0.3 if fault == "silent" else 60.0)
        with pytest.raises(error) as found:
            step.collect(tmp_path, sampler)
    assert said in str(found.value)
    assert len(str(found.value).splitlines()) == 1
    assert not step.plan.rollouts.has(0)
