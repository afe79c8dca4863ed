"""AdamW with stochastic rounding: unbiased, and one compiled graph for all sizes."""

from __future__ import annotations

import pytest
import torch
from support.optimizers import CASES, YES
from torch import nn

from fxtune.optim.config import Moments, OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.stochastic_adamw import COMPILING, random_bits, stochastic_round, update


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


def test_random_bits_are_even_and_independent_across_places_tensors_and_keys():
    """The mean of n even draws of 16 bits deviates by 0.29 / sqrt(n), a correlation of n pairs by 1 / sqrt(n), and the
    count of a bin by the root of the count. The limits are five times that."""
    like, n = torch.empty(512, 2048), 1 << 20
    draws = [
        bits.flatten()
        for key in (0, 1, -7, 1 << 30)
        for bits in random_bits(like, torch.tensor(key, dtype=torch.int32))
    ]
    for bits in draws:
        assert abs(bits.double().mean() / 65536 - 0.5 + 1 / 131072) < 5 * 0.29 / n**0.5
        for low in (bits >> 8, bits & 255):
            assert (torch.bincount(low, minlength=256) - n / 256).abs().max() < 5 * (n / 256) ** 0.5
    columns = torch.stack([*draws, *(draws[0].roll(shift) for shift in (1, 2, 64, 2048))]).double()
    apart = torch.corrcoef(columns).fill_diagonal_(0)
    assert apart.abs().max() < 5 / n**0.5


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
        numbers = [torch.empty(size, device="meta") for size in (size, size, (), (), (), ())]
        with torch.no_grad(), torch._dynamo.config.patch(COMPILING):
            flags = [torch.empty((), dtype=dtype, device="meta") for dtype in (torch.bool, torch.int32)]
            act(weight, gradient, *numbers, *flags, 0.9, 0.999, 1e-8)
    (given,) = graphs
    assert {tensor.device.type for tensor in given if isinstance(tensor, torch.Tensor)} == {"meta"}


def test_a_step_scales_the_gradient_down_once():
    """The first moment is a tenth of the gradient that the update has taken."""
    linear = nn.Linear(8, 8, bias=False).bfloat16()
    optimizer = Optimizer(linear, OptimizerConfig(stochastic_rounding=True))
    moment = torch.zeros(8, 8)
    for max_norm, taken in ((0.5, 0.5), (0, 8), (100, 8)):
        linear.weight.grad = torch.ones_like(linear.weight)
        assert optimizer.clip(max_norm).item() == 8
        optimizer.step(1e-3, YES)
        moment = 0.9 * moment + 0.1 * taken / 8
        torch.testing.assert_close(optimizer.parts[0].state[linear.weight]["exp_avg"], moment)


def test_the_random_bits_of_a_weight_depend_on_its_name_and_the_step_alone():
    def moved(names: str, seed: int, one_by_one: bool = False) -> dict[str, torch.Tensor]:
        model = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in names}).bfloat16()
        optimizer = Optimizer(model, OptimizerConfig(stochastic_rounding=True), one_by_one=one_by_one)
        for module in model.values():
            nn.init.ones_(module.weight)
            module.weight.grad = torch.ones_like(module.weight)
        optimizer.step(1e-3, YES, seed=seed)
        return {name: model[name].weight.detach() for name in names}

    both, alone = moved("ab", 1), moved("b", 1)
    assert torch.equal(both["b"], alone["b"])
    assert torch.equal(both["a"], moved("ab", 1, one_by_one=True)["a"])
    assert not torch.equal(both["a"], both["b"])
    assert not torch.equal(both["b"], moved("b", 2)["b"])
