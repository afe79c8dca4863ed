"""The training step: sums over micro-batches, steps that are not finite, dropout."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxtune.objectives.causal_lm import CausalLM
from fxtune.training.builder import RunBuilder


def built(config):
    builder = RunBuilder(config)
    plan = builder.read()[1].training
    model = builder.language_model(builder.build())
    model.model.train()
    return builder.train_step(model, CausalLM()), plan


def test_micro_batch_size_does_not_change_loss_and_gradients(narrow, cwd):
    """Micro-batches with different numbers of supervised tokens: a mean of means would differ in the second digit."""
    step, plan = built(narrow)
    narrow.data.packing, found = False, []
    for rows in (8, 2, 1):
        cut = plan.with_micro_batch_size(rows)
        batches = [cut.batch(0, micro) for micro in range(cut.micro_batches(0))]
        assert rows == 8 or len({batch.supervised for batch in batches}) > 1
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
