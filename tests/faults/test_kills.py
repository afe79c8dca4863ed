"""A run that was killed with SIGKILL and started again ends bit for bit like an undisturbed run.

scripts/faults/kill.py does this hundreds of times at random instants; these tests cover each kind once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
import subprocess
import sys

import pytest
from support.endings import Ending
from support.harness import command, kill, start, user_environment, wait_for
from support.killing import Aim, Reference, disturb, prepare, tail

from fxtune.system.machine.host import cores

PHASES = ("tokenising", "building", "proving", "asking", "training", "evaluating", "saving", "exporting")
TWICE = {"full": (8, 2), "packed": (6, 2), "bucketed": (10, 2)}
"""The steps at which two attempts die, both in the first epoch.

The first dies after it began two checkpoints, so one is complete.
"""


@pytest.fixture(scope="module")
def undisturbed(forks, tmp_path_factory):
    """A function that returns the undisturbed run of a mode. Each mode runs once."""
    made: dict[str, Reference] = {}

    def of(mode: str) -> Reference:
        if mode not in made:
            folder = tmp_path_factory.mktemp("whole") / mode
            made[mode] = Reference.of(forks, prepare(folder, mode), folder)
        return made[mode]

    return of


@pytest.fixture
def killed(forks, tmp_path):
    """A function that kills a run by `aims`, compares its end with the undisturbed run and returns its kills.
    `may_end`: the run may end before the last of them."""

    def twin(mode: str, reference: Reference, *aims: Aim, may_end: bool = False):
        prepare(tmp_path / mode, mode)
        outcome = disturb(forks, reference, tmp_path / mode, list(aims))
        assert outcome.code == 0, outcome.differences
        assert outcome.differences == []
        assert not outcome.left, "a process of a killed run still exists"
        assert may_end or len(outcome.kills) == len(aims)
        return outcome.kills

    return twin


@pytest.mark.slow
def test_a_run_on_images_resumes_in_training_in_questions_and_after_a_checkpoint_was_begun(undisturbed, killed):
    """A tiny Qwen2.5-VL, packed rows and questions with and without images, decoded by two workers of the loader."""
    reference = undisturbed("images")
    assert reference.trace.spans("training")
    killed("images", reference, Aim("asking"), Aim("saving", 2), Aim("training"))


QUICKSTART = [
    *("+recipe=quickstart", "run.dir=run", "train.max_steps=8", "checkpoint.every=2"),
    *("data.questions.path=null", "data.cache_dir=cache"),
]


@pytest.mark.vital
def test_quickstart_that_is_killed_as_a_user_starts_it_ends_with_the_same_adapter(tmp_path):
    """Whole processes, and as many threads as torch chooses. The other tests of this file fork their runs."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    undisturbed = start(QUICKSTART, whole)
    process = start(QUICKSTART, broken)
    wait_for((broken / "run" / "checkpoints" / "step-00000002").exists, process)
    assert kill(process) == -9
    assert undisturbed.wait(600) == 0, tail(whole)
    assert start(QUICKSTART, broken).wait(600) == 0, tail(broken)
    assert "Resuming run after step" in (broken / "log.txt").read_text()
    threads = json.loads((broken / "run" / "setting.json").read_text())["machine"]["threads"]
    assert int(threads) == min(cores(), torch_threads()), "the test must not decide the number of threads"
    assert Ending.of(whole / "run", []).differences(Ending.of(broken / "run", [])) == []


def torch_threads() -> int:
    """How many threads torch chooses in a process of a user."""
    words = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    return int(subprocess.run(words, env=user_environment(), capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_paused_extended_and_killed_run_equals_a_longer_one(forks, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    words = command(whole, "schedule.name=constant", "train.epochs=20", "data.eval_fraction=0.1", "run.export=last")
    command(broken)
    assert forks.start([*words, "train.max_steps=12"], whole).wait() == 0, tail(whole)
    assert forks.start([*words, "train.max_steps=8", "train.pause_after=3"], broken).wait() == 0, tail(broken)
    assert forks.start([*words, "train.max_steps=8"], broken).wait() == 0, tail(broken)
    extended = forks.start([*words, "train.max_steps=12"], broken, stops=("training", 2))
    assert extended.stopped(), tail(broken)
    extended.kill()
    assert extended.wait() == -9
    assert forks.start([*words, "train.max_steps=12"], broken).wait() == 0, tail(broken)
    assert Ending.of(whole / "run", []).sums == Ending.of(broken / "run", []).sums


@pytest.mark.slow
def test_undisturbed_run_uses_every_document_once_per_epoch(undisturbed):
    ending = undisturbed("bucketed").ending
    names = [name for _, micro_batches, _ in ending.steps for documents in micro_batches for name in documents]
    assert len(names) == 2 * 48
    assert len(set(names[:48])) == len(set(names[48:])) == 48
    assert names[:48] != names[48:], "each epoch has its own order"
    assert ending.leftovers == []


@pytest.mark.slow
def test_comparison_detects_another_seed(forks, undisturbed, tmp_path):
    """With another seed everything that is compared differs, except the leftover files."""
    words = prepare(tmp_path / "other", "lora")
    other = Reference.of(forks, [*words, "run.seed=1"], tmp_path / "other").ending
    differing = {line.partition(":")[0] for line in undisturbed("lora").ending.differences(other)}
    assert differing == {"sums", "state", "lines", "result", "steps"}


@pytest.mark.parametrize(
    "phases",
    [("training", "exporting"), pytest.param(PHASES, marks=pytest.mark.slow)],
    ids=["two", "eight"],
)
def test_run_killed_in_several_phases_equals_undisturbed_run(killed, undisturbed, phases):
    kills = killed("lora", undisturbed("lora"), *map(Aim, phases))
    assert [phase for kill, phase in zip(kills, phases, strict=True) if phase not in kill.phases] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", TWICE)
def test_run_killed_twice_in_one_epoch_equals_undisturbed_run(killed, undisturbed, mode):
    reference = undisturbed(mode)
    assert len(set(reference.ending.uses().values())) == 1
    first, second = killed(mode, reference, *(Aim("training", step) for step in TWICE[mode]))
    assert first.resumed > 0
    assert max(first.steps, second.steps) < len(reference.ending.steps) / max(reference.ending.uses().values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["growing", "growing-padded"])
def test_run_killed_in_each_stage_of_its_rows_equals_undisturbed_run(killed, undisturbed, mode):
    """Each attempt saves every step and dies in its third, one to three steps after the one before, until the run has
    ended. So each stage and each border is met."""
    reference = undisturbed(mode)
    steps = len(reference.ending.steps)
    kills = killed(mode, reference, *(Aim("training", 3) for _ in range(steps)), may_end=True)
    borders = [math.ceil(0.3 * steps), math.ceil(0.6 * steps)]
    stages = {sum(kill.resumed >= border for border in borders) for kill in kills}
    assert stages == {0, 1, 2}, kills


def test_killed_run_of_a_hybrid_on_packed_rows_equals_an_undisturbed_one(killed, undisturbed, tmp_path):
    reference = undisturbed("hybrid")
    # By its sixth step the run has begun two checkpoints, so one is complete.
    (kill,) = killed("hybrid", reference, Aim("training", 6))
    assert 0 < kill.resumed < len(reference.ending.steps)
    evidence = (tmp_path / "hybrid" / "run" / "evidence.json").read_text()
    assert "calls of linear_attention in 1 layers" in evidence


def test_run_killed_while_it_samples_scores_stores_trains_and_saves_equals_an_undisturbed_run(killed, undisturbed):
    reference = undisturbed("rollouts")
    # No attempt but the fourth gets as far as its first checkpoint, after the second step.
    phases = {"sampling": 2, "scoring": 1, "storing": 1, "saving": 1, "training": 1}
    killed("rollouts", reference, *(Aim(phase, occurrence) for phase, occurrence in phases.items()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["classifier", "embedding", "distilled"])
def test_killed_run_of_a_companion_equals_an_undisturbed_one(killed, undisturbed, mode):
    reference = undisturbed(mode)
    kills = killed(mode, reference, Aim("training", 4), Aim("training", 2))
    assert kills[0].resumed > 0


@pytest.mark.slow
def test_orphaned_workers_end_and_change_no_bit(killed, undisturbed):
    """The reference runs without workers. The killed process leaves its workers behind while the next attempt starts
    its own.

    The workers of the evaluation live until the end of the run.
    """
    without = undisturbed("lora")
    reference = dataclasses.replace(without, words=[*without.words, "loader.num_workers=4"])
    killed("lora", reference, Aim("training", 9, alone=True))


@pytest.mark.slow
def test_run_killed_around_its_early_stop_goes_back_and_decays_all_the_same(killed, undisturbed):
    """The third evaluation stops the run, which goes back to the checkpoint of the second one."""
    reference = undisturbed("early")
    assert reference.ending.result["train/ended_early"] == "early"
    assert reference.ending.result["train/dropped_steps"] == 3
    aims = Aim("after evaluating", 3), Aim("saving"), Aim("training", 2), Aim("after evaluating")
    killed("early", reference, *aims)


@pytest.mark.slow
def test_killed_refresh_goes_on_and_serves_the_same_adapter(forks, tmp_path):
    """Killed while it reads the rows for the test of drift, twice while it trains, and when the trained run is done."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    first = forks.start(command(whole, "data.eval_fraction=0.3", "optimizer.lr=1e-2"), whole)
    assert first.wait() == 0, tail(whole)
    draw = random.Random(6)
    with (whole / "new.jsonl").open("w", encoding="utf-8") as rows:
        for _ in range(60):
            texts = [" ".join(draw.choices(["σώμα", "πῦρ", "γῆ", "φῶς"], k=draw.randint(4, 9))) for _ in range(2)]
            roles = zip(("user", "assistant"), texts, strict=True)
            rows.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")
    shutil.copytree(whole, broken)
    words = ["refresh", "run", "data.sources=[{path: new.jsonl}]", "data.cache_dir=cache", "refresh.held_out=0.4"]
    words += ["refresh.bound=2", "checkpoint.every=1"]
    undisturbed = forks.start(words, whole)
    assert undisturbed.wait() == 0, tail(whole)
    for phase, occurrence in (("tokenising", 1), ("training", 4), ("training", 3), ("finishing", 1)):
        attempt = forks.start(words, broken, stops=(phase, occurrence))
        assert attempt.stopped(), tail(broken)
        attempt.kill()
        assert attempt.wait() == -9
        assert (broken / "run.refresh" / "current").resolve() == broken / "run"
    last = forks.start(words, broken)
    assert last.wait() == 0, tail(broken)

    def served(folder):
        (entry,) = json.loads((folder / "run.refresh" / "lineage.json").read_text())["refreshes"]
        adapter = (folder / "run.refresh" / "current" / "adapter" / "adapter_model.safetensors").read_bytes()
        return {name: value for name, value in entry.items() if name != "started"}, adapter

    assert served(broken) == served(whole)
