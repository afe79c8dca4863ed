"""Moments in host memory (optimizer.offload): the same bits as without, in any order of updates."""

from __future__ import annotations

import pytest
import torch
from support.optimizers import YES
from torch import nn

from fxtune.optim.config import Moments, OptimizerConfig
from fxtune.optim.optimizer import Optimizer

WIDTH = 512
"""A float32 moment of a matrix has 1 MiB, so it leaves the device. Moments of norms stay."""
CASES = {"float32": {}, "bfloat16": dict(stochastic_rounding=True, moments=Moments.bfloat16)}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.LayerNorm(2 * WIDTH),
        nn.Linear(2 * WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH),
    ]
    return nn.Sequential(*layers).to(dtype)


def steps(optimizer: Optimizer, trained: nn.Module, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(number)
        for index, parameter in enumerate(trained.parameters()):
            # Sometimes a weight has no gradient, so the order of updates changes.
            parameter.grad = torch.randn_like(parameter) if (index + number) % 5 else None
        optimizer.clip(1.0)
        optimizer.step(1e-2, YES if number != 3 else ~YES, seed=number)


def bits(trained: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {**{name: weight.detach() for name, weight in trained.named_parameters()}, **optimizer.state()[0]}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_offloaded_moments_change_no_bit_also_after_a_resume(case, one_by_one):
    dtype = torch.bfloat16 if case == "bfloat16" else torch.float32
    found = []
    for offload in (False, True):
        trained = model(dtype)
        config = OptimizerConfig(offload=offload, weight_decay=0.1, **CASES[case])
        optimizer = Optimizer(trained, config, one_by_one=one_by_one)
        steps(optimizer, trained, range(7))
        saved = {name: tensor.clone() for name, tensor in optimizer.state()[0].items()}
        resumed = Optimizer(trained, config, one_by_one=one_by_one)
        resumed.load(saved, optimizer.state()[1])
        steps(resumed, trained, range(7, 10))
        found.append(bits(trained, resumed))
    plain, away = found
    assert plain.keys() == away.keys()
    assert all(torch.equal(plain[name], away[name]) for name in plain)


def test_an_update_that_fails_leaves_the_moments_of_the_last_step():
    trained = model(torch.float32)
    optimizer = Optimizer(trained, OptimizerConfig(offload=True))
    steps(optimizer, trained, range(2))
    before = {name: tensor.clone() for name, tensor in optimizer.state()[0].items()}
    part = optimizer.parts[0]

    def fail() -> None:
        with optimizer.host_moments.on_device(part):
            next(iter(part.state.values()))["exp_avg"].zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(tensor, before[name]) for name, tensor in optimizer.state()[0].items())
