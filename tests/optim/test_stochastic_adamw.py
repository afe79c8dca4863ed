"""AdamW with stochastic rounding: unbiased, and one compiled graph for all sizes."""

from __future__ import annotations

import pytest
import torch
from support.optimizers import CASES, YES
from torch import nn

from fxtune.optim.config import Moments, OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.stochastic_adamw import COMPILING, stochastic_round, update


@pytest.mark.slow
@pytest.mark.parametrize("case", ["adamw/stochastic", "adamw_8bit/stochastic"])
def test_stochastic_rounding_adds_up_updates_below_bfloat16_resolution(case):
    def moved(steps, **options):
        linear = nn.Linear(64, 64, bias=False).bfloat16()
        nn.init.ones_(linear.weight)
        optimizer = Optimizer(linear, OptimizerConfig(name=OptimizerName(CASES[case].get("name")), **options))
        for step in range(steps):
            linear.weight.grad = torch.ones_like(linear.weight)
            optimizer.step(1e-4, YES, seed=step)  # a constant gradient: AdamW moves each weight by lr
        return 1 - linear.weight.double().mean().item()

    assert moved(100) == 0
    assert moved(1000, stochastic_rounding=True) == pytest.approx(0.1, rel=0.03)


def test_stochastic_rounding_is_unbiased_and_keeps_exact_values():
    torch.manual_seed(0)
    values = torch.randn(200) * torch.logspace(-20, 20, 200)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return stochastic_round(values, torch.randint(0, 1 << 16, values.shape, dtype=torch.int32))

    draws = torch.stack([rounded(values) for _ in range(2000)]).double()
    assert torch.allclose(draws.mean(0), values.double(), rtol=3e-4)
    assert all(len(draws[:, i].unique()) <= 2 for i in range(200)), "always one of the two neighbours"
    fits = values.bfloat16()
    assert torch.equal(rounded(fits.float()), fits)


def test_bfloat16_moments_follow_the_gradient_on_average():
    """Rounded to nearest, the second moment would stop at half of this value, where 1/1000 of it is below a rounding."""
    linear = nn.Linear(64, 64, bias=False).bfloat16()
    config = OptimizerConfig(stochastic_rounding=True, moments=Moments.bfloat16)
    optimizer, steps = Optimizer(linear, config), 1000
    for step in range(steps):
        linear.weight.grad = torch.ones_like(linear.weight)
        optimizer.step(0.0, YES, seed=step)
    state = optimizer.parts[0].state[linear.weight]
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
    assert state["exp_avg"].double().mean().item() == pytest.approx(1, rel=0.005)
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(1 - 0.999**steps, rel=0.005)


def test_compiled_update_copies_nothing_from_the_host_and_shares_one_graph():
    """A number on the host would be copied to the device in each call, with a sync."""
    graphs = []

    def kept(graph, inputs):
        graphs.append([node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward

    torch._dynamo.reset()
    act = torch.compile(update, dynamic=True, fullgraph=True, backend=kept)
    # The meta device stands for a GPU, so that a copy from the host shows as one from another device.
    for size in ((17, 5), (8, 9), (64, 3)):
        weight, gradient = (torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in range(2))
        numbers = [torch.empty(size, device="meta") for size in (size, size, (), (), ())]
        with torch.no_grad(), torch._dynamo.config.patch(COMPILING):
            act(weight, gradient, *numbers, torch.empty((), dtype=torch.bool, device="meta"), 0.9, 0.999, 1e-8)
    (given,) = graphs
    assert {tensor.device.type for tensor in given if isinstance(tensor, torch.Tensor)} == {"meta"}
