"""Products of sorted rows with a matrix for each group: values, gradients, empty groups, and no weight gradient unasked."""

from __future__ import annotations

import pytest
import torch

from fxtune.kernels.grouped_matmul import Routing, grouped_mm, grouped_outer

ENDS = torch.tensor([3, 3, 8, 10], dtype=torch.int32)
GROUP = [0] * 3 + [2] * 5 + [3] * 2


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("transposed", [False, True])
def test_values_and_gradients(transposed):
    x, weight = draw(10, 6).requires_grad_(), draw(4, *((6, 5) if transposed else (5, 6)), seed=1).requires_grad_()
    y = grouped_mm(x, weight, ENDS, transposed)
    matrices = weight if transposed else weight.transpose(1, 2)
    torch.testing.assert_close(y, torch.stack([row @ matrices[group] for row, group in zip(x, GROUP, strict=True)]))
    assert torch.autograd.gradcheck(lambda *given: grouped_mm(*given, ENDS, transposed), (x, weight))
    y.sum().backward()
    assert not weight.grad[1].any()
    torch.library.opcheck(grouped_mm, (x, weight, ENDS, transposed))
    torch.library.opcheck(grouped_outer, (x.detach(), y.detach(), ENDS))


def test_frozen_matrices_have_no_gradient_computed(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    x, weight = draw(10, 6).requires_grad_(), draw(4, 5, 6)
    with Seen() as seen:
        grouped_mm(x, weight, ENDS, False).sum().backward()
    assert seen.names.count("fxtune.grouped_mm.default") == 2
    assert "fxtune.grouped_outer.default" not in seen.names


def test_routing_sorts_by_expert_and_puts_back():
    expert = torch.tensor([[2, 0], [0, 3], [3, 2]])
    routing = Routing(expert, 5)
    assert routing.ends.tolist() == [2, 2, 4, 6, 6]
    assert routing.expert.tolist() == [0, 0, 2, 2, 3, 3]
    states, weights = draw(3, 4).requires_grad_(), draw(3, 2, seed=1).requires_grad_()
    rows = routing.gather(states)
    torch.testing.assert_close(rows, states[[0, 1, 0, 2, 1, 2]])
    scale = torch.arange(1.0, 6.0, dtype=torch.float64)
    scaled = rows * scale[routing.expert, None]
    wanted = states * (weights * scale[expert]).sum(1, keepdim=True)
    torch.testing.assert_close(routing.combine(scaled, weights), wanted)

    def both(states, weights):
        return routing.combine(routing.gather(states) * scale[routing.expert, None], weights)

    assert torch.autograd.gradcheck(both, (states, weights))
