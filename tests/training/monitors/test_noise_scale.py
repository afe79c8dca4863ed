"""The gradient noise scale: its formula against gradients of single rows, and its value in a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bad_steps import interrupt_at
from support.runs import history, same_export
from support.tuning import TINY

from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.distributed.parallel import Degrees
from fxtune.facts.run import Facts
from fxtune.objectives.causal_lm import CausalLM
from fxtune.settle.refusals import refusals
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder
from fxtune.training.monitors.noise_scale import LEAST_STEPS, NAMES, NoiseScale


@pytest.fixture
def measured(narrow, cwd) -> Config:
    """Eight rows a step in micro-batches of two."""
    narrow.train.noise_scale, narrow.train.micro_batch_size, narrow.run.dir = True, 2, "run"
    return narrow


def built(config):
    builder = RunBuilder(config)
    plan = builder.read()[1].training
    model = builder.language_model(builder.build())
    model.model.train()
    return builder.train_step(model, CausalLM()), plan


def of_rows(step, plan) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the summed loss of each row of step 0, [rows, weights], and each row's supervised tokens."""
    alone, gradients, tokens = plan.with_micro_batch_size(1), [], []
    for micro in range(alone.micro_batches(0)):
        batch = alone.batch(0, micro)
        loss = step.model.summed_loss(batch)
        found = torch.autograd.grad(loss, list(step.optimizer.names), allow_unused=True)
        gradients.append(
            torch.cat(
                [
                    torch.zeros_like(one).flatten() if gradient is None else gradient.flatten()
                    for one, gradient in zip(step.optimizer.names, found, strict=True)
                ]
            )
        )
        tokens.append(batch.supervised)
    return torch.stack(gradients).double(), torch.tensor(tokens, dtype=torch.float64)


def take(step, plan, size) -> dict[str, float]:
    """The metrics of step 0 in micro-batches of `size` rows."""
    cut = plan.with_micro_batch_size(size)
    batches = [cut.batch(0, micro) for micro in range(cut.micro_batches(0))]
    metrics = step.backward(batches, step.objective.normalizer(cut, 0))
    step.clip(metrics)
    step.drop()
    return {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_measures_the_gradients_of_its_micro_batches(measured, size):
    step, plan = built(measured)
    gradients, tokens = of_rows(step, plan)
    metrics = take(step, plan, size)
    parts = gradients.view(-1, size, gradients.shape[1]).sum(1) / tokens.sum()
    shares = tokens.view(-1, size).sum(1) / tokens.sum()
    found = [metrics[name] for name in NAMES]
    assert found == pytest.approx([parts.square().sum().item(), shares.square().sum().item(), 8.0], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(parts.sum(0).norm().item(), rel=1e-4)
    assert len(set(tokens.tolist())) > 1, "rows have different weights"


def test_rows_of_equal_weight_have_their_sample_covariance(measured):
    """With as many supervised tokens in each row, micro-batches of one row give the textbook's unbiased estimates."""
    gradients = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    mean = gradients.mean(0)
    covariance = (gradients - mean).square().sum() / 7
    signal = mean.square().sum() - covariance / 8
    scale = NoiseScale()
    for _ in range(LEAST_STEPS):
        scale.add(mean.norm().item(), (gradients / 8).square().sum().item(), 1 / 8, 8.0)
    assert scale.rows == pytest.approx((covariance / signal).item())


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [1, 3], [5, 1, 2]])
def test_means_over_steps_approach_the_true_noise_scale(weights):
    """Gradients of known mean and variance, in micro-batches of unequal weight."""
    draw = torch.Generator().manual_seed(1)
    true, variance, dim = 1.0, 4.0, 20  # mean and variance of each of `dim` weights' gradients, for one row
    scale, total, known = NoiseScale(), sum(weights), []
    for _ in range(3000):
        parts = torch.stack(
            [
                w / total * (true + torch.randn(dim, generator=draw) * (variance * total / (8 * w)) ** 0.5)
                for w in weights
            ]
        )
        shares = sum((w / total) ** 2 for w in weights)
        scale.add(parts.sum(0).norm().item(), parts.square().sum().item(), shares, 8.0)
        known.append((scale.signal, scale.noise))
    signal, noise = torch.tensor(known[500:]).mean(0).tolist()
    assert noise / signal == pytest.approx(variance / true**2, rel=0.1)


def test_a_step_of_one_micro_batch_says_nothing():
    scale = NoiseScale()
    for given in ((1.0, 1.0, 1.0, 8.0), (float("nan"), 1.0, 0.5, 8.0)):
        scale.add(*given)
    assert (scale.steps, scale.rows) == (0, None)
    assert scale.advice(8) == "The gradient noise scale is not known: 0 steps are too few."


def known(rows: float) -> NoiseScale:
    scale = NoiseScale()
    scale.load([1.0, rows, LEAST_STEPS])
    return scale


@pytest.mark.parametrize(
    ("rows", "batch", "advice"),
    [
        (40.0, 8, "a global batch of 32 in place of 8 would take 62% fewer steps and 50% more rows"),
        (10.0, 8, "train.global_batch_size=8 is near it"),
        (3.0, 32, "a global batch of 4 in place of 32 would take 60% more steps and 80% fewer rows"),
        (0.5, 1, "train.global_batch_size=1 is above it"),
    ],
)
def test_advice_is_the_trade_of_steps_for_rows(rows, batch, advice):
    assert advice in known(rows).advice(batch)


def test_noise_alone_is_no_noise_scale():
    scale = NoiseScale()
    scale.load([-1.0, 3.0, 100])
    assert scale.advice(8) == "The gradient noise scale is not known: gradients are almost noise alone."


@pytest.mark.slow
def test_a_run_logs_it_and_learns_the_same_as_without(measured, said):
    measured.train.max_steps = LEAST_STEPS + 2
    figures = trainer.run(measured)
    lines = [line.get("train/noise_scale") for line in history(Path("run")) if "train/loss" in line]
    assert not any(line for line in lines[: LEAST_STEPS - 1])
    assert figures["train/noise_scale"] == lines[-1] > 0
    assert not any(name in line for line in history(Path("run")) for name in NAMES)
    assert len([note for note in said if f"noise scale is {lines[-1]:.3g} rows" in note]) == 1
    measured.train.noise_scale, measured.run.dir = False, "plain"
    assert "train/noise_scale" not in trainer.run(measured)
    assert same_export("run", "plain")


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_noise_scale(measured, monkeypatch):
    measured.train.max_steps, measured.checkpoint.every, measured.train.log_every = LEAST_STEPS + 4, 5, 7
    whole = trainer.run(measured)
    measured.run.dir = "broken"
    interrupt_at(measured, 12, monkeypatch)
    assert trainer.run(measured)["train/noise_scale"] == whole["train/noise_scale"]


@pytest.mark.slow
def test_two_ranks_measure_what_one_process_does(ranks, cwd, chats):
    words = [
        *TINY,
        *(f"data.sources=[{{path: {chats}}}]", "data.questions.path=null", "data.packing=false", "train.epochs=100"),
        *(f"train.max_steps={LEAST_STEPS + 1}", "train.micro_batch_size=2", "train.global_batch_size=8"),
        *("train.noise_scale=true", "run.device=cpu", "tracking.display=none"),
    ]
    alone = trainer.run(load([*words, "run.dir=alone"]))["train/noise_scale"]
    assert ranks.run([*words, "run.dir=both"], cwd) == [0, 0]
    found = json.loads(Path("both/result.json").read_text())["train/noise_scale"]
    assert found == pytest.approx(alone, rel=1e-3)


def test_what_cannot_be_measured_is_refused(measured):
    def refused(config: Config, **degrees: int) -> str:
        return " ".join(refusals(config, Facts(degrees=Degrees(**degrees))))

    assert not refused(measured, replicate=2)
    assert "parallel.shard=1" in refused(measured, shard=2)
    averaging = replace(measured, parallel=replace(measured.parallel, average_every=4))
    assert "no rank sees the sum" in refused(averaging, replicate=2)
    measured.train.micro_batch_size = 8
    (conflict,) = [text for text in measured.refusals() if "noise_scale" in text]
    assert "set it to 4" in conflict
