"""Guarded steps: a step that is undone on the device equals one that was never taken."""

from __future__ import annotations

import pytest
import torch
from support.optimizers import CASES, YES, backward, make, stored
from torch import nn

from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.skip_nonfinite import NonfiniteGuard

GUARDED = [name for name in CASES if name != "adamw_schedulefree"]
"""Schedule-free AdamW counts steps on the host, in its groups, so it is never guarded."""


@pytest.mark.parametrize("name", GUARDED)
def test_undone_step_equals_skipped_step(name, tmp_path):
    """As on a GPU, where the step is taken before `finite` is known."""
    (model, asking), (other, guarded) = make(name, weight_decay=0.1), make(name, weight_decay=0.1)
    guarded.guards = {part: NonfiniteGuard(part) for part in guarded.parts if not part.defaults.get("fused")}
    taken = 0
    for seed in range(9):
        for trained, its in ((model, asking), (other, guarded)):
            backward(trained, seed)
            if seed in (0, 3, 4, 6):
                trained.up.weight.grad[0, 0] = float("nan" if seed == 3 else "inf")
            norm = its.clip(1.0)
            its.step(1e-2, torch.isfinite(norm))
        taken += sum(guard.last_finite is not None for guard in guarded.guards.values())
        if seed == 6:
            again, resumed = make(name, weight_decay=0.1)
            again.load_state_dict(other.state_dict())
            resumed.load(*stored(guarded, tmp_path))
    assert taken > 0 or not guarded.guards
    for seed in (7, 8):
        backward(again, seed)
        resumed.clip(1.0)
        resumed.step(1e-2, YES)
    for optimizer in (other, again):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), optimizer.parameters(), strict=True))
    (tensors, scalars), (others, theirs) = asking.state(), guarded.state()
    assert scalars == theirs
    assert all(torch.equal(value, others[key]) for key, value in tensors.items())


@pytest.mark.parametrize("name", GUARDED)
def test_non_finite_step_leaves_step_counts_of_weights_without_gradient(name):
    """Such as an expert that gets no token."""
    (model, asking), (other, guarded) = make(name), make(name)
    guarded.guards = {part: NonfiniteGuard(part) for part in guarded.parts if not part.defaults.get("fused")}
    for seed in range(5):
        for trained, its in ((model, asking), (other, guarded)):
            backward(trained, seed)
            if seed in (2, 3):
                trained.wide.weight.grad = None
                trained.up.weight.grad[0, 0] = float("nan")
            its.step(1e-2, torch.isfinite(its.clip(1.0)))
        if seed == 3:
            assert counts(asking) == counts(guarded)
    assert counts(asking) == counts(guarded)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def counts(optimizer):
    """The step counts that the libraries keep for each weight."""
    tensors, scalars = optimizer.state()
    return {key: float(value) for key, value in {**tensors, **scalars}.items() if key.endswith("/step")}


def test_guarded_step_is_exact_for_infinite_moments():
    """The square of a gradient of 1e25 overflows float32, so the moment becomes infinite and stays so."""
    kept = []
    for guards in (False, True):
        linear = nn.Linear(2, 1, bias=False)
        linear.weight.data = torch.tensor([[1.0, -0.0]])
        optimizer = Optimizer(linear, OptimizerConfig(name=OptimizerName.apex_adamw))
        optimizer.guards = {part: NonfiniteGuard(part) for part in optimizer.parts if guards}
        for gradient, good in ((1e25, True), (1.0, True), (float("nan"), False), (2.0, True), (float("inf"), False)):
            linear.weight.grad = torch.tensor([[gradient, 0.0]])
            optimizer.step(1e-2, torch.tensor(good))
        moments, _ = optimizer.state()
        assert moments["weight/exp_avg_sq"].isinf().tolist() == [[True, False]]
        kept.append(
            [
                tensor.detach().view(torch.int32).tolist()
                for tensor in (linear.weight, moments["weight/exp_avg"], moments["weight/exp_avg_sq"])
            ]
        )
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["lion", "apex_adamw", "muon"])
def test_guarded_step_ignores_weights_without_gradient_and_restores_gradients_on_error(name, monkeypatch):
    model, optimizer = make(name, weight_decay=0.1)
    guards = [NonfiniteGuard(part) for part in optimizer.parts if not part.defaults.get("fused")]
    unused = model.wide.weight.clone()
    for first in (True, False):
        backward(model, 1)
        model.wide.weight.grad = None
        assert [guard.step(YES) for guard in guards] == [not first] * len(guards)
        if first:
            for part in optimizer.parts:
                part.step()
    assert torch.equal(model.wide.weight, unused)
    before = {parameter: parameter.grad for parameter in optimizer.names}

    def fail(*_):
        raise RuntimeError("no more memory")

    for guard in guards:
        monkeypatch.setattr(guard.optimizer, "step", fail)
        with pytest.raises(RuntimeError, match="no more memory"):
            guard.step(torch.tensor(False))
    assert all(parameter.grad is gradient for parameter, gradient in before.items())
