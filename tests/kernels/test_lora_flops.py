"""Floating-point operations of the fused operators, as torch's FlopCounterMode counts them."""

from __future__ import annotations

from support.lora_linears import group, inputs, mlp
from torch.utils.flop_counter import FlopCounterMode


def test_flops_are_counted():
    rows, hidden, width, ranks = 7, 6, 8, [2, 3, 1]
    frozen = 2 * rows * hidden * width
    adapters = [2 * rows * rank * (hidden + width) for rank in ranks]
    for (_, fused, _), products, added in (
        (group(hidden, [width] * 2, ranks[:2]), 2, sum(adapters[:2])),
        (mlp(hidden, width, ranks), 3, sum(adapters)),
    ):
        x = inputs(rows, hidden)
        with FlopCounterMode(display=False) as forward:
            y = fused(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        assert forward.get_total_flops() == products * frozen + added
        assert backward.get_total_flops() == products * frozen + 2 * added
    with FlopCounterMode(display=False) as counted:
        mlp(hidden, width, ranks)[1](x, keep=False).sum().backward()
    again = 2 * frozen + sum(adapters[:2]) + 2 * rows * width * ranks[2]
    assert counted.get_total_flops() == 6 * frozen + 3 * sum(adapters) + again
