"""LoRA over frozen linears as two operators: a group of linears, and a whole gated MLP. Forward, backward, and nothing else.

`fxtune::lora_linear` is y = x W^T + scaling (x A^T) B^T for a group of linears that read the same x, and `fxtune::lora_mlp` is
down(act(gate(x)) * up(x)) with an adapter on each of the three. Run linear by linear (peft), an adapter costs several passes
over activations: dropout's and dtype's copies, a product that is added to the output, a scaled copy of it, and the same again
backward. Here it costs what it must. Of a group x is read once more for x A^T and dy once more for dy B. Of an MLP over a dense
base x and dy are not: there both ride in the frozen products as columns, and only what down_proj reads is read once more. What
adapters add is added by the activation's kernels, by down's product, or in one pass over something hidden_size wide. Gradients
of A and B read x and dy once more. The frozen half, and how A and B ride along in its matmul, is lora_base.py; a `kind` chooses
it.

What is kept for the backward pass: x, which is the caller's own tensor, and x A^T, rank wide. Of an MLP also gate_up, gate and
up side by side, the widest tensor of a layer. p = act(gate) * up is not kept: the backward kernel makes it in passing, and what
is summed over p and over the gradient of gate_up it sums while it makes them (kernels/gated.py: Passing). With
`keep=False` gate_up is not kept either but computed again, from x alone (never down's product). With `tiles` > 1 an MLP's rows
are taken a tile at a time, forward and backward, so that nothing of 2 * intermediate_size exists for more rows than a tile's.

Operators, and not functions of autograd: torch.compile puts them into its graph as they are, so what they hold and how long
they take is the same compiled and not; checkpointing policies can name them; and an operator whose results nobody uses is
left out of a recomputation. Backward passes are operators, too (`..._backward`).

Gradients of A and B are added up and returned in float32 (in their own dtype, if that is another); y, dx in the compute dtype,
which is autocast's, else x's. What is frozen costs nothing. Any number of rows will do, none included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from fxtune.kernels.frozen_base import DENSE, Base, Dense, Dequantized, added, is_dense, spaced
from fxtune.kernels.lora_adapters import Adapters, Sums, padded_rank
from fxtune.kernels.lora_flops import FORMULAS
from fxtune.kernels.swiglu import ACTS, Passing, gated, gated_backward, sums_in_passing

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
    room: bool = False,
) -> Tensor:
    """The outputs of a group of linears with adapters, side by side: [..., sum of out_i] for x [..., in].

    Args:
        x: activations. Under autocast they are cast to its dtype, else computed in their own.
        a, b: of each linear lora_A [rank_i, in] and lora_B [out_i, rank_i], trained or not.
        base: the frozen weights as their `kind` has them (kernels/lora_base.py): for `dense` [augment(weights, ranks)].
        scaling: of each linear, alpha / rank as peft has it.
        bias: none, or of each linear [out_i], frozen. `augment` must know of it.
        room: a promise that nothing but rotary.qkv() with room of room_of() reads the result. Its gradient then has room behind
            each row, where the backward pass puts dy B, and dy is not copied.

    Split the result by the linears' sizes: `y.split(outs, -1)`.
    """
    y = torch.ops.fxtune.lora_linear(
        _flat(x), list(a), list(b), list(bias), list(base), list(scaling), kind, room, None
    )[0]
    return y.view(*x.shape[:-1], y.shape[-1])


def room_of(ranks: Sequence[int], kind: str, bias: bool) -> int:
    """Numbers behind each row of its output's gradient that lora_linear() of such a group has a use for."""
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
        x: activations, as for lora_linear().
        a, b, scaling: of gate_proj, up_proj and down_proj, in this order, as for lora_linear().
        up: the frozen weights of gate and up as a group of `up_kind`; down: those of down_proj, of `down_kind`.
        act: one of ACTS, on gate.
        keep: keep gate_up [rows, 2 intermediate] for the backward pass, in place of computing it again.
        tiles: take the rows in so many parts; more than one implies keep=False.
    """
    keep = keep and tiles == 1 and torch.is_grad_enabled()
    y = torch.ops.fxtune.lora_mlp(
        _flat(x), list(a), list(b), list(up), list(down), list(scaling), up_kind, down_kind, act, keep, tiles, None
    )[0]
    return y.view(x.shape)


def base_of(kind: str, tensors: Sequence[Tensor], adapters: Adapters) -> Base:
    """The base of a kind, from the tensors that an operator was given for it."""
    if is_dense(kind):
        return Dense(tensors, adapters, kind)
    if kind == "fp8":
        from fxtune.kernels.lora_fp8 import Fp8

        made: Base = Fp8(tensors, adapters)
        return made
    return Dequantized(kind, tensors, adapters)


def _flat(x: Tensor) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return x.reshape(-1, x.shape[-1]).to(dtype)


@torch.library.custom_op(
    "fxtune::lora_linear",
    mutates_args=(),
    schema=f"(Tensor x, {_PARTS}, bool room, Tensor? residual) -> (Tensor, Tensor)",
)
def _linear(
    x: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    bias: list[Tensor],
    base: list[Tensor],
    scaling: list[float],
    kind: str,
    room: bool,
    residual: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """lora_linear() of x [rows, in] -> y [rows, out], xa [rows, padded rank]: x A^T, which the backward pass needs.

    `residual` [rows, out]: what y is to be added to. It has no gradient here: residual.py puts it in, after autograd.
    """
    with torch.autocast(x.device.type, enabled=False):
        group = base_of(kind, base, Adapters(a, b, bias, scaling, x.dtype))
        return group.whole(_rows(x), None if residual is None else _rows(residual))


@_linear.register_fake
def _(
    x: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    bias: list[Tensor],
    base: list[Tensor],
    scaling: list[float],
    kind: str,
    room: bool,
    residual: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    out, width = sum(one.shape[0] for one in b), padded_rank([one.shape[0] for one in a], bool(bias))
    return x.new_empty(x.shape[0], out), x.new_empty(x.shape[0], width)


@torch.library.custom_op(
    "fxtune::lora_linear_backward",
    mutates_args=(),
    schema=f"(Tensor dy, Tensor x, Tensor xa, {_PARTS}, bool[] wanted, bool room) -> (Tensor, Tensor[], Tensor[])",
)
def _linear_backward(
    dy: Tensor,
    x: Tensor,
    xa: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    bias: list[Tensor],
    base: list[Tensor],
    scaling: list[float],
    kind: str,
    wanted: list[bool],
    room: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(dx, da, db). `wanted`: of x, a and b; what is not wanted comes back empty. `room`: dy's rows may have room behind them,
    which is nobody's.
    """
    with torch.autocast(x.device.type, enabled=False):
        adapters = Adapters(a, b, bias, scaling, x.dtype)
        group = base_of(kind, base, adapters)
        sums = Sums(adapters, wanted[1:])
        dx, dyb, dy = x.new_empty(0), xa, _rows(dy)
        if wanted[0]:
            dx, dyb = group.whole_backward(dy, room)
        elif wanted[1]:
            dyb = group.projected(dy, group.b)
        sums.add(dyb, _rows(x), xa, dy)
        return dx, *sums.gradients()


@_linear_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    xa: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    bias: list[Tensor],
    base: list[Tensor],
    scaling: list[float],
    kind: str,
    wanted: list[bool],
    room: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return _gradients(x, a, b, wanted)


@torch.library.custom_op(
    "fxtune::lora_mlp",
    mutates_args=(),
    schema=f"(Tensor x, {_MLP_PARTS}, Tensor? residual) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _mlp(
    x: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    scaling: list[float],
    up_kind: str,
    down_kind: str,
    act: str,
    keep: bool,
    tiles: int,
    residual: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lora_mlp() of x [rows, hidden] -> y, and for the backward pass gate_up, x A^T, p A^T: empty unless `keep`.

    `residual` [rows, hidden]: as for _linear().
    """
    assert act in ACTS, act
    with torch.autocast(x.device.type, enabled=False):
        first, second = _halves(x, a, b, up, down, scaling, up_kind, down_kind)
        y = x.new_empty(x.shape)
        kept = x.new_empty(0), x.new_empty(0), x.new_empty(0)
        for rows in _tiles(len(x), tiles):
            gate_up, xa = first.apart(_rows(x[rows]))
            p = gated(act, gate_up, (xa, first.b), second.space(len(xa)))
            if not keep:
                del gate_up
            _, pa = second.whole(p, None if residual is None else _rows(residual[rows]), y[rows], room=True)
            if keep:
                kept = gate_up, xa, pa
            del p  # or it would still be there when the next tile's is made
        return y, *kept


@_mlp.register_fake
def _(
    x: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    scaling: list[float],
    up_kind: str,
    down_kind: str,
    act: str,
    keep: bool,
    tiles: int,
    residual: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not keep:
        return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0), x.new_empty(0)
    rows, ranks, wide = x.shape[0], [one.shape[0] for one in a], 2 * b[0].shape[0]
    narrow = padded_rank(ranks[:2])
    between = narrow if is_dense(up_kind) else 0  # where x A^T was, see Dense.apart()
    return (
        x.new_empty(x.shape),
        x.new_empty_strided((rows, wide), (wide + between, 1)),
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
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    xa: Tensor,
    pa: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    scaling: list[float],
    up_kind: str,
    down_kind: str,
    act: str,
    keep: bool,
    tiles: int,
    wanted: list[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(dx, da, db). `wanted`: of x, a and b; what is not wanted comes back empty."""
    with torch.autocast(x.device.type, enabled=False):
        first, second = _halves(x, a, b, up, down, scaling, up_kind, down_kind)
        sums = [Sums(half.adapters, wanted[1:]) for half in (first, second)]
        dx = x.new_empty(x.shape if wanted[0] else 0)
        for rows in _tiles(len(x), tiles):
            inputs, above = _rows(x[rows]), _rows(dy[rows])
            if not keep:
                gate_up, xa = first.apart(inputs)
            p, dyb = second.apart_backward(above)  # dp, until the gated kernel has been there
            passing = _passing(first, second, sums, xa, dyb, not keep)
            g = gated_backward(
                act, gate_up, p, (xa, first.b), (dyb, second.a), spaced(x, len(p), 2 * p.shape[1]), passing
            )
            if passing:
                sums[0].totals[1], sums[1].totals[0] = passing.totals
            if not keep:
                del gate_up
                pa = second.projected(p, second.a.t())
            sums[1].add(dyb, None if passing else p, pa, above)
            del p
            if wanted[0]:
                product, gb = first.apart_backward(g, dx[rows])
                added(product, gb, first.a, dx[rows])
                del product
            else:
                gb = first.projected(g, first.b)
            sums[0].add(gb, inputs, xa, None if passing else g)
            del g
        (da, db), (da_down, db_down) = (one.gradients() for one in sums)
        return dx, da + da_down, db + db_down


@_mlp_backward.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    xa: Tensor,
    pa: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    scaling: list[float],
    up_kind: str,
    down_kind: str,
    act: str,
    keep: bool,
    tiles: int,
    wanted: list[bool],
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return _gradients(x, a, b, wanted)


def _halves(
    x: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    up: list[Tensor],
    down: list[Tensor],
    scaling: list[float],
    up_kind: str,
    down_kind: str,
) -> tuple[Base, Base]:
    """The bases of gate and up, and of down."""
    return (
        base_of(up_kind, up, Adapters(a[:2], b[:2], [], scaling[:2], x.dtype)),
        base_of(down_kind, down, Adapters(a[2:], b[2:], [], scaling[2:], x.dtype)),
    )


def _passing(
    first: Base, second: Base, sums: Sequence[Sums], xa: Tensor, dyb: Tensor, keep_p: bool
) -> Optional[Passing]:
    """The sums over the rows of [dgate | dup] and p, for the kernel that makes these to take: else each is a pass over them."""
    gate, up, down = *first.adapters.ranks, *second.adapters.ranks
    if all(sums[0].wanted) and sums_in_passing(xa, (gate, up, down)):
        return Passing(xa, dyb, (gate, up, down), keep_p, (sums[0].totals[1], sums[1].totals[0]))
    return None


def _tiles(rows: int, tiles: int) -> Iterator[slice]:
    """The rows in `tiles` parts of one size, but for the last. One part of none, if there are none."""
    size = max(-(-rows // tiles), 1)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def _rows(x: Tensor) -> Tensor:
    """Rows that a kernel can read: wherever they lie, but each in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _gradients(
    x: Tensor, a: list[Tensor], b: list[Tensor], wanted: list[bool]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return (
        x.new_empty(x.shape if wanted[0] else (0,)),
        [one.new_empty(one.shape) for one in a if wanted[1]],
        [one.new_empty(one.shape) for one in b if wanted[2]],
    )


def _wanted(ctx: Any) -> list[bool]:
    x, a, b = ctx.needs_input_grad[:3]
    return [bool(x), any(a), any(b)]


def _save(ctx: Any, lists: list[list[Tensor]], *tensors: Tensor) -> None:
    ctx.lengths = [len(one) for one in lists]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *(tensor for one in lists for tensor in one))


def _saved(ctx: Any, tensors: int) -> list[Any]:
    """What _save() kept: first the tensors, then the lists."""
    found, at = list(ctx.saved_tensors), tensors
    lists = []
    for length in ctx.lengths:
        lists.append(found[at : at + length])
        at += length
    return [*found[:tensors], *lists]


def _returned(wanted: list[bool], lengths: list[int], dx: Tensor, da: list[Tensor], db: list[Tensor]) -> list[Any]:
    return [
        dx if wanted[0] else None,
        da if wanted[1] else [None] * lengths[0],
        db if wanted[2] else [None] * lengths[1],
        *([None] * length for length in lengths[2:]),
    ]


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, a, b, bias, base, *ctx.options, residual = inputs
    assert residual is None
    ctx.mark_non_differentiable(output[1])
    _save(ctx, [a, b, bias, base], x, output[1])


def _linear_gradients(ctx: Any, dy: Optional[Tensor], *_: Any) -> tuple[Any, ...]:
    wanted = _wanted(ctx)
    if dy is None:
        return *_returned([False] * 3, ctx.lengths, *[None] * 3), *[None] * 4  # type: ignore[arg-type]
    x, xa, *lists = _saved(ctx, 2)
    scaling, kind, room = ctx.options
    found = torch.ops.fxtune.lora_linear_backward(dy, x, xa, *lists, scaling, kind, wanted, room)
    return *_returned(wanted, ctx.lengths, *found), *[None] * 4


def _mlp_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    x, a, b, up, down, *ctx.options, residual = inputs
    assert residual is None
    ctx.mark_non_differentiable(*output[1:])
    # Without `keep` x alone: then a recomputation needs no result of this operator, and leaves it out.
    _save(ctx, [a, b, up, down], x, *(output[1:] if ctx.options[4] else ()))


def _mlp_gradients(ctx: Any, dy: Optional[Tensor], *_: Any) -> tuple[Any, ...]:
    wanted, nothing = _wanted(ctx), [None] * 7
    if dy is None:
        return *_returned([False] * 3, ctx.lengths, *[None] * 3), *nothing  # type: ignore[arg-type]
    if ctx.options[4]:
        x, *rest = _saved(ctx, 4)
    else:
        x, *lists = _saved(ctx, 1)
        rest = [x.new_empty(0), x.new_empty(0), x.new_empty(0), *lists]
    found = torch.ops.fxtune.lora_mlp_backward(dy, x, *rest, *ctx.options, wanted)
    return *_returned(wanted, ctx.lengths, *found), *nothing


_linear.register_autograd(_linear_gradients, setup_context=_linear_setup)
_mlp.register_autograd(_mlp_gradients, setup_context=_mlp_setup)


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in FORMULAS.items():
        register_flop_formula(getattr(torch.ops.fxtune, name))(formula)


_register_flops()
