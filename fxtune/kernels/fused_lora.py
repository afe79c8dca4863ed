"""LoRA over frozen linears as two operators with backward passes: a group of linears, and a whole gated MLP.

`fxtune::lora_linear` is y = x W^T + scaling (x A^T) B^T for a group of linears that read the same x.
`fxtune::lora_mlp` is down(act(gate(x)) * up(x)) with an adapter on each of the three. peft runs linear by linear.
There an adapter costs several passes over activations: casts, a product, its scaled copy, its addition to the output,
and the same again backward. Here a group reads x one extra time for x A^T, and dy one extra time for dy B. An MLP over
a dense base computes even these as extra columns of the frozen products. frozen_base.py has the frozen half for each
`kind` of weights, and explains how A and B become part of its products.

Kept for the backward pass: x (the caller's own tensor), x A^T, and for an MLP gate_up (gate and up side by side), the
widest tensor of a layer. The backward kernel computes p = act(gate) * up again, and in the same pass reduces p and the
gradient of gate_up over the rows (kernels/swiglu.py: FusedSums). With `keep=False` gate_up is computed again from x,
too. With `tiles` > 1 an MLP handles its rows tile by tile, forward and backward.

Forward and backward passes are operators, not autograd functions. So torch.compile takes them as they are,
checkpointing policies can name them, and a recomputation skips an operator whose results nobody uses. Gradients of A
and B are accumulated in float32 and returned in the dtypes of A and B. y and dx are in the compute dtype, autocast's
or x's. Any number of rows works, zero included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxtune.kernels.autocast import compute_dtype
from fxtune.kernels.frozen_base import DENSE, Base, Dense, Dequantized, Fp8, add_adapter, is_dense, spaced
from fxtune.kernels.lora_adapters import AdapterGradients, Adapters, padded_rank
from fxtune.kernels.swiglu import ACTS, FusedSums, can_fuse_sums, gated, gated_backward

_PARTS = "Tensor[] a, Tensor[] b, Tensor[] bias, Tensor[] base, float[] scaling, str kind"
_MLP_PARTS = (
    "Tensor[] a, Tensor[] b, Tensor[] up, Tensor[] down, float[] scaling, str up_kind, str down_kind, str act, "
    "bool keep, SymInt tiles"
)


def lora_linear(
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    base: Sequence[Tensor],
    scaling: Sequence[float],
    kind: str = DENSE,
    bias: Sequence[Tensor] = (),
    padded: bool = False,
) -> Tensor:
    """The outputs of a group of linears with adapters, side by side: [..., sum of out_i] for x [..., in].

    Args:
        a, b: lora_A [rank_i, in] and lora_B [out_i, rank_i] of each linear, trained or not.
        base: the frozen weights in the layout of `kind` (frozen_base.py); for `dense` [augment(weights, ranks)].
        scaling: one factor for each linear, alpha / rank in peft.
        bias: empty, or the frozen bias [out_i] of each linear; then augment() is called with bias=True.
        padded: promises that only rotary.qkv(), with the group's padding_of(), reads the result. The gradient of the
            result then has padding behind each row. The backward pass writes dy B there, so that dy is not copied.
    """
    lists = map(list, (a, b, bias, base, scaling))
    y = torch.ops.fxtune.lora_linear(_flat(x), *lists, kind, padded, None)[0]
    return y.view(*x.shape[:-1], y.shape[-1])


def padding_of(ranks: Sequence[int], kind: str, bias: bool) -> int:
    """How many numbers of padding lora_linear() can use behind each row of its output's gradient."""
    return padded_rank(ranks, bias) if is_dense(kind) else 0


def lora_mlp(
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    up: Sequence[Tensor],
    down: Sequence[Tensor],
    scaling: Sequence[float],
    up_kind: str = DENSE,
    down_kind: str = DENSE,
    act: str = "silu",
    keep: bool = True,
    tiles: int = 1,
) -> Tensor:
    """down(act(gate(x)) * up(x)) with adapters, [..., hidden] for x [..., hidden].

    Args:
        a, b, scaling: as for lora_linear(), in the order gate_proj, up_proj, down_proj.
        up: the frozen weights of gate and up as a group of `up_kind`.
        down: the frozen weights of down_proj, stored as `down_kind`.
        act: one of ACTS, applied to gate.
        keep: keep gate_up [rows, 2 intermediate] for the backward pass rather than computing it again.
        tiles: the number of parts of the rows, handled one after the other; more than one implies keep=False.
    """
    keep = keep and tiles == 1 and torch.is_grad_enabled()
    lists = map(list, (a, b, up, down, scaling))
    y = torch.ops.fxtune.lora_mlp(_flat(x), *lists, up_kind, down_kind, act, keep, tiles, None)[0]
    return y.view(x.shape)


def base_of(kind: str, tensors: Sequence[Tensor], adapters: Adapters) -> Base:
    """The Base of a group of linears, whose frozen weights `tensors` are stored as `kind`."""
    if is_dense(kind):
        return Dense(tensors, adapters, kind)
    return Fp8(tensors, adapters) if kind == "fp8" else Dequantized(kind, tensors, adapters)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(compute_dtype(x))


class _Group(NamedTuple):
    """The arguments _PARTS of an operator."""

    a: list[Tensor]
    b: list[Tensor]
    bias: list[Tensor]
    base: list[Tensor]
    scaling: list[float]
    kind: str

    def build(self, dtype: torch.dtype) -> Base:
        return base_of(self.kind, self.base, Adapters(self.a, self.b, self.bias, self.scaling, dtype))


class _Mlp(NamedTuple):
    """The arguments _MLP_PARTS of an operator."""

    a: list[Tensor]
    b: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]
    scaling: list[float]
    up_kind: str
    down_kind: str
    act: str
    keep: bool
    tiles: int

    def halves(self, dtype: torch.dtype) -> tuple[Base, Base]:
        """The group of gate and up, and the group of down."""
        first = _Group(self.a[:2], self.b[:2], [], self.up, self.scaling[:2], self.up_kind)
        second = _Group(self.a[2:], self.b[2:], [], self.down, self.scaling[2:], self.down_kind)
        return first.build(dtype), second.build(dtype)


@torch.library.custom_op(
    "fxtune::lora_linear",
    mutates_args=(),
    schema=f"(Tensor x, {_PARTS}, bool padded, Tensor? residual) -> (Tensor, Tensor)",
)
def _linear(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> y [rows, out] and xa = x A^T [rows, padded rank], which the backward pass needs.

    `residual` [rows, out] is added to y. It has no gradient here: techniques/compile/residual_pass.py adds it to
    graphs after autograd has run.
    """
    *parts, _, residual = arguments
    with torch.autocast(x.device.type, enabled=False):
        return _Group(*parts).build(x.dtype).full(_rows(x), None if residual is None else _rows(residual))


@_linear.register_fake
def _(x: Tensor, a: list[Tensor], b: list[Tensor], bias: list[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    out, width = sum(lora_b.shape[0] for lora_b in b), padded_rank([lora_a.shape[0] for lora_a in a], bool(bias))
    return x.new_empty(x.shape[0], out), x.new_empty(x.shape[0], width)


@torch.library.custom_op(
    "fxtune::lora_linear_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor xa, {_PARTS}, bool[] wanted, bool padded) -> (Tensor, Tensor[], Tensor[])",
)
def _linear_backward(dy: Tensor, x: Tensor, xa: Tensor, *arguments: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(dx, da, db). `wanted`: which of the three are needed; the others are returned empty. `padded`: the rows of dy
    may have padding behind them. The padding may be overwritten.
    """
    *parts, wanted, padded = arguments
    with torch.autocast(x.device.type, enabled=False):
        group = _Group(*parts).build(x.dtype)
        sums = AdapterGradients(group.adapters, wanted[1:])
        dx, dyb, dy = x.new_empty(0), xa, _rows(dy)
        if wanted[0]:
            dx, dyb = group.full_backward(dy, padded)
        elif wanted[1]:
            dyb = group.project(dy, group.b)
        sums.add(dyb, _rows(x), xa, dy)
        return dx, *sums.gradients()


@_linear_backward.register_fake
def _(
    dy: Tensor, x: Tensor, xa: Tensor, a: list[Tensor], b: list[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return _gradients(x, a, b, rest[-2])


@torch.library.custom_op(
    "fxtune::lora_mlp",
    mutates_args=(),
    schema=f"(Tensor x, {_MLP_PARTS}, Tensor? residual) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _mlp(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [rows, hidden] -> y, and for the backward pass gate_up, x A^T and p A^T. The three are empty without `keep`.

    `residual` [rows, hidden]: see _linear().
    """
    *parts, residual = arguments
    mlp = _Mlp(*parts)
    assert mlp.act in ACTS, mlp.act
    with torch.autocast(x.device.type, enabled=False):
        first, second = mlp.halves(x.dtype)
        y = x.new_empty(x.shape)
        saved = x.new_empty(0), x.new_empty(0), x.new_empty(0)
        for rows in _tiles(len(x), mlp.tiles):
            gate_up, xa = first.split(_rows(x[rows]))
            p = gated(mlp.act, gate_up, (xa, first.b), second.padded_buffer(len(xa)))
            if not mlp.keep:
                del gate_up
            _, pa = second.full(p, None if residual is None else _rows(residual[rows]), y[rows], padded=True)
            if mlp.keep:
                saved = gate_up, xa, pa
            del p  # before the p of the next tile is allocated
        return y, *saved


@_mlp.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mlp = _Mlp(*arguments[:-1])
    if not mlp.keep:
        return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0), x.new_empty(0)
    rows, ranks, width = x.shape[0], [lora_a.shape[0] for lora_a in mlp.a], 2 * mlp.b[0].shape[0]
    narrow = padded_rank(ranks[:2])
    between = narrow if is_dense(mlp.up_kind) else 0  # the place of x A^T, see Dense.split()
    return (
        x.new_empty(x.shape),
        x.new_empty_strided((rows, width), (width + between, 1)),
        x.new_empty(rows, narrow),
        x.new_empty(rows, padded_rank(ranks[2:])),
    )


@torch.library.custom_op(
    "fxtune::lora_mlp_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor gate_up, Tensor xa, Tensor pa, {_MLP_PARTS}, bool[] wanted) "
    "-> (Tensor, Tensor[], Tensor[])",
)
def _mlp_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, xa: Tensor, pa: Tensor, *arguments: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(dx, da, db). `wanted`: which of the three are needed; the others are returned empty."""
    *parts, wanted = arguments
    mlp = _Mlp(*parts)
    with torch.autocast(x.device.type, enabled=False):
        first, second = mlp.halves(x.dtype)
        sums = [AdapterGradients(half.adapters, wanted[1:]) for half in (first, second)]
        dx = x.new_empty(x.shape if wanted[0] else 0)
        for rows in _tiles(len(x), mlp.tiles):
            x_tile, dy_tile = _rows(x[rows]), _rows(dy[rows])
            if not mlp.keep:
                gate_up, xa = first.split(x_tile)
            p, dyb = second.split_backward(dy_tile)  # dp, which gated_backward() overwrites with p
            fused = _fused_sums(first, second, sums, xa, dyb, not mlp.keep)
            g = spaced(x, len(p), 2 * p.shape[1])
            gated_backward(mlp.act, gate_up, p, (xa, first.b), (dyb, second.a), g, fused)
            if fused:
                sums[0].totals[1], sums[1].totals[0] = fused.totals
            if not mlp.keep:
                del gate_up
                pa = second.project(p, second.a.t())
            sums[1].add(dyb, None if fused else p, pa, dy_tile)
            del p
            if wanted[0]:
                product, gb = first.split_backward(g, dx[rows])
                add_adapter(product, gb, first.a, dx[rows])
                del product
            else:
                gb = first.project(g, first.b)
            sums[0].add(gb, x_tile, xa, None if fused else g)
            del g
        (da, db), (da_down, db_down) = (half.gradients() for half in sums)
        return dx, da + da_down, db + db_down


@_mlp_backward.register_fake
def _(
    dy: Tensor, x: Tensor, gate_up: Tensor, xa: Tensor, pa: Tensor, a: list[Tensor], b: list[Tensor], *rest: Any
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return _gradients(x, a, b, rest[-1])


def _fused_sums(
    first: Base, second: Base, sums: Sequence[AdapterGradients], xa: Tensor, dyb: Tensor, keep_p: bool
) -> FusedSums | None:
    """The sums over the rows of [dgate | dup] and p for gated_backward() to compute. None if gated_backward() cannot
    compute them. Each sum then takes a pass over memory.
    """
    gate, up, down = *first.adapters.ranks, *second.adapters.ranks
    if all(sums[0].wanted) and can_fuse_sums(xa, (gate, up, down)):
        return FusedSums(xa, dyb, (gate, up, down), keep_p, (sums[0].totals[1], sums[1].totals[0]))
    return None


def _tiles(rows: int, tiles: int) -> Iterator[slice]:
    """Yield slices that cut the rows into `tiles` equal parts, the last maybe smaller. No rows: one empty slice."""
    size = max(-(-rows // tiles), 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def _rows(x: Tensor) -> Tensor:
    """`x`, copied if its rows are not contiguous. There may be gaps between rows."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _gradients(
    x: Tensor, a: list[Tensor], b: list[Tensor], wanted: list[bool]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    da, db = (
        [factor.new_empty(factor.shape) for factor in half if want]
        for half, want in zip((a, b), wanted[1:], strict=True)
    )
    return x.new_empty(x.shape if wanted[0] else (0,)), da, db


def _wanted(ctx: Any) -> list[bool]:
    x, a, b = ctx.needs_input_grad[:3]
    return [bool(x), any(a), any(b)]


def _save(ctx: Any, lists: list[list[Tensor]], *tensors: Tensor) -> None:
    ctx.lengths = list(map(len, lists))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *itertools.chain(*lists))


def _saved(ctx: Any) -> list[Any]:
    """The tensors that _save() kept, followed by its lists."""
    rest: list[Any] = list(ctx.saved_tensors)
    lists: list[list[Tensor]] = []
    for length in reversed(ctx.lengths):
        at = len(rest) - length
        lists.insert(0, rest[at:])
        del rest[at:]
    return [*rest, *lists]


def _returned(ctx: Any, gradients: Sequence[Any], options: int) -> tuple[Any, ...]:
    """The tuple for autograd: dx, da and db if they are wanted, and None for every other argument."""
    wanted = _wanted(ctx) if gradients else [False] * 3
    dx, da, db = gradients or [None] * 3
    a, b, *others = ([None] * length for length in ctx.lengths)
    return (dx if wanted[0] else None, da if wanted[1] else a, db if wanted[2] else b, *others, *[None] * options)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, a, b, bias, base, *ctx.options, residual = inputs
    assert residual is None
    ctx.mark_non_differentiable(output[1])
    _save(ctx, [a, b, bias, base], x, output[1])


def _linear_gradients(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return _returned(ctx, (), 4)
    *options, padded = ctx.options
    gradients = torch.ops.fxtune.lora_linear_backward(dy, *_saved(ctx), *options, _wanted(ctx), padded)
    return _returned(ctx, gradients, 4)


def _mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, a, b, up, down, *ctx.options, residual = inputs
    assert residual is None
    ctx.mark_non_differentiable(*output[1:])
    # Without `keep` only x is saved. A recomputation then needs no result of this operator and skips it.
    _save(ctx, [a, b, up, down], x, *(output[1:] if ctx.options[4] else ()))


def _mlp_gradients(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return _returned(ctx, (), 7)
    x, *rest = _saved(ctx)
    if not ctx.options[4]:
        rest = [x.new_empty(0), x.new_empty(0), x.new_empty(0), *rest]
    gradients = torch.ops.fxtune.lora_mlp_backward(dy, x, *rest, *ctx.options, _wanted(ctx))
    return _returned(ctx, gradients, 7)


_linear.register_autograd(_linear_gradients, setup_context=_linear_setup)
_mlp.register_autograd(_mlp_gradients, setup_context=_mlp_setup)


# FLOPs of the operators for torch's FlopCounterMode. A formula gets an operator's arguments, with a shape in place of
# each tensor. It counts products only: no padding of ranks, no activation functions and no packing.


def _products(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, int]:
    """Multiplications for each row of a group: by its frozen weights, and by its adapters."""
    pairs = list(zip(a, b, strict=True))
    frozen = sum(lora_b[0] * lora_a[1] for lora_a, lora_b in pairs)
    return frozen, sum(lora_a[0] * (lora_a[1] + lora_b[0]) for lora_a, lora_b in pairs)


@register_flop_formula(torch.ops.fxtune.lora_linear)
def _linear_flops(x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * sum(_products(a, b))


@register_flop_formula(torch.ops.fxtune.lora_linear_backward)
def _linear_backward_flops(dy: Any, x: Any, xa: Any, a: Any, b: Any, *rest: Any, **_: Any) -> int:
    """Counts the gradients of A and B even if they are not wanted."""
    wanted = rest[4]
    frozen, adapters = _products(a, b)
    return 2 * x[0] * (frozen * wanted[0] + 2 * adapters)


@register_flop_formula(torch.ops.fxtune.lora_mlp)
def _mlp_flops(x: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return 2 * x[0] * (sum(_products(a[:2], b[:2])) + sum(_products(a[2:], b[2:])))


@register_flop_formula(torch.ops.fxtune.lora_mlp_backward)
def _mlp_backward_flops(dy: Any, x: Any, gate_up: Any, xa: Any, pa: Any, a: Any, b: Any, *rest: Any, **_: Any) -> int:
    """Without `keep`, gate, up and p A^T are computed again."""
    keep, wanted = rest[6], rest[8]
    first, first_adapters = _products(a[:2], b[:2])
    second, second_adapters = _products(a[2:], b[2:])
    recomputed = 0 if keep else first + first_adapters + a[2][0] * a[2][1]
    return 2 * x[0] * (first * wanted[0] + second + 2 * (first_adapters + second_adapters) + recomputed)
