"""How many floating-point operations the operators of fused_lora.py take, for torch's FlopCounterMode.

A formula gets an operator's arguments with each tensor as its shape. What a padded rank adds, and what adds nothing but bytes
(activations, packing), does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def products(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, int]:
    """Multiplications a row of a group: of its frozen weights, and of its adapters, padding left out."""
    return sum(two[0] * a[0][1] for two in b), sum(one[0] * (one[1] + two[0]) for one, two in zip(a, b, strict=True))


def linear(x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """fxtune::lora_linear."""
    return 2 * x[0] * sum(products(a, b))


def linear_backward(
    dy: Any,
    x: Any,
    xa: Any,
    a: Any,
    b: Any,
    bias: Any,
    base: Any,
    scaling: Any,
    kind: Any,
    wanted: Any,
    *_: Any,
    **__: Any,
) -> int:
    """fxtune::lora_linear_backward. Gradients of A and B are counted, also where they are not wanted."""
    frozen, adapters = products(a, b)
    return 2 * x[0] * (frozen * wanted[0] + 2 * adapters)


def mlp(x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    """fxtune::lora_mlp."""
    return 2 * x[0] * (sum(products(a[:2], b[:2])) + sum(products(a[2:], b[2:])))


def mlp_backward(
    dy: Any,
    x: Any,
    gate_up: Any,
    xa: Any,
    pa: Any,
    a: Any,
    b: Any,
    up: Any,
    down: Any,
    scaling: Any,
    up_kind: Any,
    down_kind: Any,
    act: Any,
    keep: Any,
    tiles: Any,
    wanted: Any,
    **_: Any,
) -> int:
    """fxtune::lora_mlp_backward: without `keep` gate and up are computed again, and p A^T."""
    first, first_adapters = products(a[:2], b[:2])
    second, second_adapters = products(a[2:], b[2:])
    again = 0 if keep else first + first_adapters + a[2][0] * a[2][1]
    return 2 * x[0] * (first * wanted[0] + second + 2 * (first_adapters + second_adapters) + again)


FORMULAS: dict[str, Callable[..., int]] = {
    "lora_linear": linear,
    "lora_linear_backward": linear_backward,
    "lora_mlp": mlp,
    "lora_mlp_backward": mlp_backward,
}
"""By the operator's name in torch.ops.fxtune."""
