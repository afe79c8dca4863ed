"""Floating-point operations of the operators of fused_lora.py, for torch's FlopCounterMode.

A formula gets an operator's arguments, with a shape in place of each tensor. It counts products only: no padding of
ranks, no activation functions and no packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def products(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, int]:
    """Multiplications for each row of a group: by its frozen weights, and by its adapters."""
    pairs = list(zip(a, b, strict=True))
    frozen = sum(lora_b[0] * lora_a[1] for lora_a, lora_b in pairs)
    return frozen, sum(lora_a[0] * (lora_a[1] + lora_b[0]) for lora_a, lora_b in pairs)


def linear(x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * sum(products(a, b))


def linear_backward(dy: Any, x: Any, xa: Any, a: Any, b: Any, *rest: Any, **_: Any) -> int:
    """Counts the gradients of A and B even if they are not wanted."""
    wanted = rest[4]
    frozen, adapters = products(a, b)
    return 2 * x[0] * (frozen * wanted[0] + 2 * adapters)


def mlp(x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * (sum(products(a[:2], b[:2])) + sum(products(a[2:], b[2:])))


def mlp_backward(dy: Any, x: Any, gate_up: Any, xa: Any, pa: Any, a: Any, b: Any, *rest: Any, **_: Any) -> int:
    """Without `keep`, gate, up and p A^T are computed again."""
    keep, wanted = rest[6], rest[8]
    first, first_adapters = products(a[:2], b[:2])
    second, second_adapters = products(a[2:], b[2:])
    recomputed = 0 if keep else first + first_adapters + a[2][0] * a[2][1]
    return 2 * x[0] * (first * wanted[0] + second + 2 * (first_adapters + second_adapters) + recomputed)


FORMULAS: dict[str, Callable[..., int]] = {
    "lora_linear": linear,
    "lora_linear_backward": linear_backward,
    "lora_mlp": mlp,
    "lora_mlp_backward": mlp_backward,
}
"""The formula of each operator, by the operator's name in torch.ops.fxtune."""
