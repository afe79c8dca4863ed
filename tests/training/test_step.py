"""The training step, and a second objective trained by it: a preference between the two documents of a pair."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.runs import history
from torch.nn import functional as F

from fxtune.data.config import SourceConfig
from fxtune.facts.options import Switch
from fxtune.objectives.base import Objective
from fxtune.objectives.causal_lm import CausalLM
from fxtune.training import trainer as train
from fxtune.training.builder import RunBuilder


@dataclass
class PairPreference(Objective):
    """-log sigmoid of the difference of two documents' log-probabilities. The preferred document has the larger sum of token ids."""

    def loss(self, model, batch):
        even = len(batch.input_ids) // 2 * 2
        log_probs = model.segment_log_probs(batch)[:even].view(-1, 2)
        rank = batch.targets.clamp(min=0).sum(1)[:even].view(-1, 2)
        sign = torch.sign(rank[:, 0] - rank[:, 1])
        margin = sign * (log_probs[:, 0] - log_probs[:, 1])
        return -(F.logsigmoid(margin) * sign.abs()).sum(), {"accuracy": ((margin > 0) | (sign == 0)).float().sum()}

    def normalizer(self, plan, step):
        rows = (len(plan.contents(step, micro)) for micro in range(plan.micro_batches(step)))
        return float(sum(count // 2 for count in rows))

    def derived(self, means):
        return {"error": 1 - means["accuracy"]}


@pytest.fixture
def pairs(narrow, cwd):
    """Eight rows a step, one document each, with one of two answers."""
    with Path("pairs.jsonl").open("w") as out:
        for number in range(64):
            answer = "It is 7." if number % 2 else "It is 3."
            turns = [{"role": "user", "content": f"Which number? {number}"}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")
    narrow.data.sources, narrow.data.packing = [SourceConfig(path="pairs.jsonl")], False
    narrow.train.max_steps, narrow.train.epochs = 12, None
    narrow.train.micro_batch_size, narrow.train.global_batch_size = 4, 8
    narrow.optimizer.lr, narrow.objective = 1e-2, PairPreference()
    return narrow


@pytest.mark.parametrize("fused", [Switch.off, Switch.on])
@pytest.mark.parametrize("lora", [True, False])
def test_pair_objective_learns_in_the_unchanged_trainer(pairs, lora, fused):
    pairs.techniques.lora.enabled = lora
    pairs.techniques.liger.enabled = fused is Switch.on
    pairs.techniques.liger.fused_linear_cross_entropy = fused
    pairs.data.eval_fraction, pairs.run.dir = 0.25, "run"
    figures = train.run(pairs)
    lines = [line for line in history(Path("run")) if "train/loss" in line]
    losses, accuracies = ([line[f"train/{name}"] for line in lines] for name in ("loss", "accuracy"))
    assert sum(losses[:3]) > 5 * sum(losses[-3:])
    assert accuracies[0] < 1
    assert sum(accuracies[-3:]) / 3 > 0.9
    assert figures["eval/accuracy"] > 0.8
    assert figures["eval/error"] == pytest.approx(1 - figures["eval/accuracy"])
    assert "eval/perplexity" not in figures


@pytest.mark.slow
def test_pair_objective_trains_alike_with_fused_and_plain_head(pairs):
    pairs.train.max_steps, losses = 6, {}
    for fused in (Switch.off, Switch.on):
        pairs.techniques.liger.enabled = fused is Switch.on
        pairs.techniques.liger.fused_linear_cross_entropy, pairs.run.dir = fused, fused.value
        train.run(pairs)
        losses[fused] = [line["train/loss"] for line in history(Path(fused.value)) if "train/loss" in line]
    assert losses[Switch.on] == pytest.approx(losses[Switch.off], rel=1e-4)


def test_run_with_objective_metrics_resumes_bit_for_bit(pairs, monkeypatch):
    """Also where the checkpoint falls between two log lines."""
    pairs.train.max_steps, pairs.train.log_every, pairs.checkpoint.every = 6, 4, 2
    pairs.run.dir = "undisturbed"
    train.run(pairs)
    pairs.run.dir = "interrupted"
    step = train.Trainer.step

    def interrupt(self, given, lr):
        if given.index == 3:
            raise KeyboardInterrupt
        return step(self, given, lr)

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train.run(pairs)
    train.run(pairs)
    one, other = (
        [(line["train/loss"], line["train/accuracy"]) for line in history(Path(run)) if "train/loss" in line]
        for run in ("undisturbed", "interrupted")
    )
    assert one == other
    weights = [load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("undisturbed", "interrupted")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def built(config):
    builder = RunBuilder(config)
    plan = builder.read()[1].training
    model = builder.language_model(builder.build())
    model.model.train()
    return builder.train_step(model, CausalLM()), plan


def test_micro_batch_size_does_not_change_loss_and_gradients(narrow, cwd):
    step, plan = built(narrow)
    narrow.data.packing, found = False, []
    for rows in (8, 2, 1):
        cut = plan.with_micro_batch_size(rows)
        batches = [cut.batch(0, micro) for micro in range(cut.micro_batches(0))]
        metrics = step.backward(batches, step.objective.normalizer(cut, 0))
        assert list(metrics) == ["loss"]
        gradients = [parameter.grad.flatten() for parameter in step.optimizer.names]
        found.append((metrics["loss"], torch.cat(gradients)))
        step.optimizer.drop()
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-6, atol=0)
        assert (gradient - found[0][1]).norm() < 1e-5 * gradient.norm()


def test_non_finite_step_leaves_weights_unchanged(narrow, cwd, monkeypatch):
    step, plan = built(narrow)
    real, factor = CausalLM.loss, [1.0]
    monkeypatch.setattr(CausalLM, "loss", lambda *given: (real(*given)[0] * factor[0], {}))
    for value, moves in ((float("nan"), False), (1.0, True)):
        factor[0] = value
        before = [parameter.clone() for parameter in step.optimizer.names]
        metrics = step.backward([plan.batch(0, 0)], 1.0)
        step.clip(metrics)
        step.update(metrics, 1e-2)
        assert bool(metrics["finite"]) == moves
        assert set(metrics) == {"loss", "grad_norm", "finite", "loss_scale", "spike_limit"}
        assert moves == any(not torch.equal(*pair) for pair in zip(before, step.optimizer.names, strict=True))


def test_dropout_depends_on_seed_and_step_only(narrow, cwd):
    narrow.techniques.lora.dropout = 0.5
    step, plan = built(narrow)
    with torch.no_grad():  # new adapters add nothing, so their dropout would not show
        for parameter in step.optimizer.names:
            parameter.add_(0.1)
    batch = plan.batch(0, 0)
    losses = []
    for seed, index in ((0, 0), (0, 1), (1, 0), (0, 0)):
        step.seed = seed
        torch.rand(3)
        losses.append(step.backward([replace(batch)], 1.0, index)["loss"].item())
    assert losses[0] == losses[3]
    assert len(set(losses)) == 3
