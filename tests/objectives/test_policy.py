"""Policy gradients on stored rollouts, compared with plain transformers, one answer at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.rows import write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.config.compose import load
from fxtune.errors import ConfigError, DataError
from fxtune.objectives.policy import Advantage, Policy, Reduction
from fxtune.training.builder import RunBuilder
from fxtune.training.rollouts.folder import Answer, Asked, Rollouts
from fxtune.training.rollouts.plan import RolloutPlan

TINY = Path(__file__).parents[2] / "fxtune" / "assets" / "tiny"
WORDS = [
    "model=tiny",
    "objective.rewards=[{name: exact}]",
    "data.sources=[{path: rows.jsonl}]",
    "data.sequence_length=96",
    "data.cache_dir=cache",
    "sampler.max_tokens=24",
    "sampler.answers=3",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.max_steps=2",
    "run.device=cpu",
    "techniques.lora.enabled=false",
]
PROMPTS = ["Say yes.", "A red lamp for Anna", "Who is it?", "Count to three, please."]
TEXTS = ["yes", "no, never", "Anna has a lamp", "one two three", "I do not know what you want", "3"]
PRESETS = ("policy", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")


def write_rollouts(
    folder: Path, objective: Policy, most: int, longest: int | None = None
) -> tuple[Rollouts, list[tuple[list[int], Answer]]]:
    """Three answers to each prompt with made-up log-probabilities and rewards. Returns the rollouts of step 0, and
    the prompt's tokens with each answer."""
    tokenizer, random = AutoTokenizer.from_pretrained(TINY), np.random.default_rng(0)
    asked = [Asked(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    answers = list[Answer]()
    for group in range(len(PROMPTS)):
        rewards = random.normal(size=3)
        for number, advantage in enumerate(objective.advantage.of(rewards)):
            ids = [*tokenizer(TEXTS[(2 * group + number) % 6], add_special_tokens=False)["input_ids"], 2]
            log_probs = random.normal(-4, 2, len(ids)).clip(max=-0.01).tolist()
            answers.append(Answer("", group, ids, log_probs, True, number, advantage=float(advantage)))
    rollouts = Rollouts(folder)
    weights = objective.reduction.weights(np.array([len(answer.ids) for answer in answers], float), most)
    rollouts.stage(0, asked, answers, longest)
    rollouts.finish(0, answers, weights, {"weights": "", "sampler": "", "figures": {}})
    return rollouts, [(asked[answer.group].prompt, answer) for answer in answers]


def with_near_log_probs(model, rollouts: Path, pairs, noise: float) -> None:
    """Replace the stored log-probabilities by those of `model` and some noise, so that ratios lie around the
    bounds."""
    random = np.random.default_rng(1)
    file = rollouts / "step-00000001" / "numbers.npy"
    numbers, at = np.load(file), 0
    for prompt, answer in pairs:
        with torch.no_grad():
            own = token_log_probs(model, prompt, answer.ids, 1.0)
        answer.log_probs = (own.numpy() + random.normal(0, noise, len(own))).astype(np.float32).tolist()
        at += len(prompt)
        numbers["sampled"][at : at + len(own)] = answer.log_probs
        at += len(own)
    np.save(file, numbers)


def token_log_probs(model, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *answer]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def plain_loss(preset: str, log_probs: torch.Tensor, answer: Answer, most: int, answers: int, tokens: int):
    """The formula of each paper for one answer, with its share of the step's mean."""
    sampled, a, count = torch.tensor(answer.log_probs), answer.advantage, len(answer.ids)
    ratio = (log_probs - sampled).exp()
    if preset in ("grpo", "dr_grpo"):
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    elif preset in ("policy", "dapo"):
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)
    elif preset == "gspo":
        sequence = ratio.log().mean().exp()
        loss = -torch.minimum(sequence * a, sequence.clamp(1 - 3e-4, 1 + 4e-4) * a).expand(count)
    elif preset == "cispo":
        loss = -ratio.clamp(max=5.0).detach() * a * log_probs
    else:
        loss = -a * log_probs
    if preset in ("grpo", "gspo"):
        return loss.mean() / answers
    return loss.sum() / (answers * most if preset in ("dr_grpo", "rloo") else tokens)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("rows", "temperature"), [("shared", 1.0), ("packed", 1.0), ("padded", 0.7)])
def test_loss_and_gradients_are_those_of_plain_transformers(cwd, preset, rows, temperature):
    write_jsonl(Path("rows.jsonl"), [{"prompt": prompt, "answer": "yes"} for prompt in PROMPTS])
    words = [f"objective={preset}", f"data.packing={rows != 'padded'}", f"sampler.temperature={temperature}"]
    words += ["data.share_prompts=false"] if rows != "shared" else []
    fused = ["techniques.liger.enabled=true", "techniques.liger.kernels=[fused_linear_cross_entropy]"]
    words += fused if rows == "packed" else []
    words += ["train.micro_batch_size=1", "data.sequence_length=64"]
    builder = RunBuilder(load([*WORDS, *words]))
    _, data = builder.read()
    model, _ = builder.proven_model()
    objective = builder.config.objective
    assert builder.config.data.shares_prompts == (rows == "shared")
    rollouts, pairs = write_rollouts(Path("rollouts"), objective, 24, 64 if rows == "shared" else None)
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with_near_log_probs(plain, Path("rollouts"), pairs, 0.3)
    plan = RolloutPlan.of(data.training, rollouts, builder.config.data).of_step(0)
    batches = [plan.batch(0, index) for index in range(plan.micro_batches(0))]
    assert len(batches) > 1
    assert sum(batch.tokens for batch in batches) == sum(
        len(answer.ids) + (len(prompt) if rows != "shared" or number % 3 == 0 else 1)
        for number, (prompt, answer) in enumerate(pairs)
    )
    found = builder.train_step(model, objective).backward(batches, objective.normalizer(plan, 0))

    tokens = sum(len(answer.ids) for _, answer in pairs)
    assert plan.supervised(0) == tokens
    loss, entropy, gap = torch.zeros(()), 0.0, 0.0
    for prompt, answer in pairs:
        log_probs = token_log_probs(plain, prompt, answer.ids, temperature)
        loss = loss + plain_loss(preset, log_probs, answer, 24, len(pairs), tokens)
        entropy -= log_probs.sum().item() / tokens
        gap += (log_probs - torch.tensor(answer.log_probs)).abs().sum().item() / tokens
    loss.backward()
    assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert found["entropy"].item() == pytest.approx(entropy, rel=1e-5)
    assert found["gap"].item() == pytest.approx(gap, rel=1e-4)
    gradients = dict(model.model.named_parameters())
    for name, parameter in plain.named_parameters():
        difference = (gradients[name].grad - parameter.grad).norm()
        assert difference <= 2e-5 * parameter.grad.norm() + 1e-8, name


@pytest.mark.parametrize("correction", ["truncate", "mask", "none"])
def test_corrections_weigh_the_policy_gradient_by_the_ratio_to_the_sampler(cwd, correction):
    write_jsonl(Path("rows.jsonl"), [{"prompt": prompt, "answer": "yes"} for prompt in PROMPTS])
    words = ["objective=policy", f"objective.correction={correction}"]
    words += [] if correction == "none" else ["objective.correction_limit=1.5"]
    builder = RunBuilder(load([*WORDS, *words]))
    _, data = builder.read()
    model, _ = builder.proven_model()
    objective = builder.config.objective
    rollouts, pairs = write_rollouts(Path("rollouts"), objective, 24)
    plain = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with_near_log_probs(plain, Path("rollouts"), pairs, 0.5)
    plan = RolloutPlan.of(data.training, rollouts, builder.config.data).of_step(0)
    batches = [plan.batch(0, index) for index in range(plan.micro_batches(0))]
    builder.train_step(model, objective).backward(batches, objective.normalizer(plan, 0))
    loss = torch.zeros(())
    for prompt, answer in pairs:
        log_probs = token_log_probs(plain, prompt, answer.ids, 1.0)
        weight = (log_probs.detach() - torch.tensor(answer.log_probs)).exp()
        if correction == "mask":
            weight = weight * ((weight <= 1.5) & (weight >= 1 / 1.5))
        weight = torch.ones(()) if correction == "none" else weight.clamp(max=1.5)
        loss = loss - (weight * answer.advantage * log_probs).sum() / plan.supervised(0)
    loss.backward()
    gradients = dict(model.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert (gradients[name].grad - parameter.grad).norm() <= 2e-5 * parameter.grad.norm() + 1e-8, name


def test_advantages_are_those_of_the_papers():
    rewards = np.array([0.0, 1.0, 1.0, 4.0])
    deviation = torch.tensor(rewards).std().item()
    expected = {
        Advantage.centre: rewards - 1.5,
        Advantage.std: (rewards - 1.5) / (deviation + 1e-4),
        Advantage.leave_one_out: [reward - (rewards.sum() - reward) / 3 for reward in rewards],
        Advantage.max: (rewards - 1.5) / 1.5,
    }
    for advantage in Advantage:
        assert advantage.of(rewards) == pytest.approx(np.array(expected[advantage]))


def test_a_reduction_weighs_tokens_so_that_the_sum_over_all_tokens_is_its_mean():
    lengths = np.array([2.0, 3.0, 7.0])
    values = [np.full(int(length), value) for length, value in zip(lengths, (1.0, -2.0, 0.5), strict=True)]
    means = {
        Reduction.tokens: np.concatenate(values).mean(),
        Reduction.answers: np.mean([each.mean() for each in values]),
        Reduction.max_length: np.concatenate(values).sum() / (3 * 10),
    }
    for reduction in Reduction:
        weights = reduction.weights(lengths, 10)
        total = sum(weight * each.sum() for weight, each in zip(weights, values, strict=True))
        assert total / lengths.sum() == pytest.approx(means[reduction])


def test_long_answers_are_punished_softly():
    objective = Policy(overlong=20)
    found = [objective.answer_reward(1.0, length, 100) for length in (50, 80, 90, 100)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert Policy().answer_reward(1.0, 100, 100) == 1.0


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["objective.rewards=[]"], "objective.rewards"),
        (["sampler.answers=1"], "sampler.answers"),
        (["loader.num_workers=2"], "loader.num_workers"),
        (["sampler.max_tokens=96"], "sampler.max_tokens"),
        (["train.batch_ramp=[[0.5, 8]]"], "train.batch_ramp"),
        (["parallel.average_every=2"], "parallel.average_every"),
    ],
)
def test_what_cannot_act_is_refused(cwd, words, key):
    write_jsonl(Path("rows.jsonl"), [{"prompt": prompt, "answer": "yes"} for prompt in PROMPTS])
    with pytest.raises(ConfigError, match=key):
        RunBuilder(load([*WORDS, "objective=policy", *words]))


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(cwd):
    write_jsonl(Path("rows.jsonl"), [{"prompt": "a lamp " * 60}])
    with pytest.raises(DataError, match=r"rows.jsonl.*sampler.max_tokens"):
        RunBuilder(load([*WORDS, "objective=policy"])).read()
