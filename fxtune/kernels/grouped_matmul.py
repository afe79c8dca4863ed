"""Products of rows with a matrix for each group of rows, as operators. A group is the rows of one expert of a mixture.

Rows are sorted by group, and `ends` [groups] says where each group ends. A group may have any number of rows. The host
never reads `ends`, so it does not wait for the device, and no shape depends on the data.

- `fxtune::grouped_mm`: each row times its group's matrix.
- `fxtune::grouped_outer`: the sum of outer products of each group's rows. This is the gradient of the group's matrix,
  and is computed only for trained matrices.

On a GPU both are torch's grouped GEMM (`torch.nn.functional.grouped_mm`, from compute capability 8.0 on), or quack's
on Hopper. The loops below are their reference, and run elsewhere. torch has a kernel for bfloat16 on Hopper and
Blackwell; for other dtypes and cards it loops over the groups itself, and waits for the device.

They are operators for three reasons: torch's compiler takes grouped GEMMs in bfloat16 only, a checkpointing policy can
name them, and their backward pass is written here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from fxtune.kernels.matmul import CUBLAS, CUTE, call_quack, use_cache

ALIGNMENT = 16
"""Grouped GEMMs want each row of a matrix to begin at a multiple of this many bytes."""
NARROW = 64
"""The most columns of a result that is one tile wide, such as an adapter's."""

_PREPARED: set[tuple[torch.device, torch.dtype]] = set()
_TAKES_GAPS: set[tuple[torch.device, torch.dtype]] = set()


@torch.library.custom_op("fxtune::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """[rows, out]: row i of x [rows, in] times the matrix of its group.

    Args:
        weight: [groups, out, in], in x's dtype; [groups, in, out] if `transposed`.
        ends: int32 [groups], ascending: the number of rows in this group and all groups before it. The last is `rows`.
    """
    return product(x, weight if transposed else weight.mT, ends)


def product(x: Tensor, matrices: Tensor, ends: Tensor, plus: Tensor | None = None, gemm: str = CUBLAS) -> Tensor:
    """[rows, out]: row i of x [rows, in] times the matrix of its group in `matrices` [groups, in, out], plus row i of
    `plus` if given. `plus` may be overwritten. Autograd does not see the product.

    `gemm=CUTE`: use quack's kernel, if prepare() ran and the shapes are aligned. It adds `plus` before it rounds.
    Otherwise torch's kernel is used. It rounds before it adds `plus`.
    """
    if not matrices.shape[2]:  # an adapter of rank 0
        return x.new_empty(len(x), 0)
    if gemm == CUTE and _is_served(x, matrices):
        out = x.new_empty(len(x), matrices.shape[2])
        call_quack(x, matrices.mT, out, plus, cu_seqlens_m=F.pad(ends, (1, 0)), **_launch(matrices.shape[2]))
        return out
    if _runs_as_one(x, matrices):
        y = F.grouped_mm(x.contiguous(), matrices, offs=ends)
        return y if plus is None else plus.add_(y)
    y = x.new_empty(len(x), matrices.shape[2])
    for group, rows in segments(ends):
        if plus is None:
            torch.mm(x[rows], matrices[group], out=y[rows])
        else:
            torch.addmm(plus[rows], x[rows], matrices[group], out=y[rows])
    return y


def outer(x: Tensor, y: Tensor, ends: Tensor, gemm: str = CUBLAS) -> Tensor:
    """[groups, in, out]: the sum of x_i y_i^T over each group's rows; zeros for a group without rows. x [rows, in],
    y [rows, out]; `ends`, `gemm`: see product()."""
    if not (x.shape[1] and y.shape[1]):
        return x.new_empty(len(ends), x.shape[1], y.shape[1])
    if gemm == CUTE and _is_served(x, y):
        result = x.new_empty(len(ends), x.shape[1], y.shape[1])
        wide, narrow, out = (x, y, result) if x.shape[1] >= y.shape[1] else (y, x, result.mT)
        call_quack(wide.t(), narrow.t(), out, None, cu_seqlens_k=F.pad(ends, (1, 0)), **_launch(narrow.shape[1]))
    elif _runs_as_one(x, y):
        result = F.grouped_mm(x.contiguous().t(), y.contiguous(), offs=ends)
    else:
        result = x.new_zeros(len(ends), x.shape[1], y.shape[1])
        for group, rows in segments(ends):
            torch.mm(x[rows].t(), y[rows], out=result[group])
        return result
    from fxtune.kernels.gated_experts_triton import clear_empty

    result = result.contiguous()
    clear_empty(result, ends)  # no documentation says what these kernels write for a group without rows
    return result


def segments(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each group that has rows, with the slice of its rows. Waits for the device."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("fxtune::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """outer() by torch's kernel."""
    return outer(x, y, ends)


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends, ctx.transposed = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = grouped_mm(dy, weight, ends, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        dw = grouped_outer(x, dy, ends) if ctx.transposed else grouped_outer(dy, x, ends)
    return dx, dw, None, None


grouped_mm.register_autograd(_backward, setup_context=_setup)


def _is_served(x: Tensor, other: Tensor) -> bool:
    """Whether quack's kernel takes these tensors: 16 bits, prepared, and rows that begin at multiples of 16 bytes."""
    if (x.device, x.dtype) not in _PREPARED or other.dtype != x.dtype:
        return False
    has_gaps = not all(tensor.is_contiguous() or tensor.mT.is_contiguous() for tensor in (x, other))
    if has_gaps and not takes_gaps(x.device, x.dtype):
        return False
    sizes = (x.shape[-1], *other.shape[-2:]) if other.dim() == 3 else (x.shape[-1], other.shape[-1])
    return len(x) > 0 and all(size * x.element_size() % ALIGNMENT == 0 for size in sizes)


def _launch(columns: int) -> dict[str, Any]:
    """The launch that was the fastest on an H200 for results of `columns` columns."""
    if columns <= NARROW:
        return dict(tile=(128, 32 if columns <= 32 else 64), cluster=(1, 1), pingpong=True)
    fits = columns % 192 == 0
    return dict(tile=(128, 192 if fits else 256), cluster=(1, 2), pingpong=fits)


@torch.no_grad()
def prepare(device: torch.device, dtype: torch.dtype, cache: Path) -> None:
    """Try quack's kernel on small products of `dtype`. Call it before the first product with `gemm=CUTE`; `cache`: see
    matmul.prepare(). Raises whatever the package and its compiler raise, and RuntimeError if a product is wrong."""
    if (device, dtype) in _PREPARED:
        return
    use_cache(cache)
    generator = torch.Generator(device).manual_seed(0)  # the default generator must not advance
    sizes = (300, 192), (300, 16), (3, 192, 16)
    x, y, matrices = (torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes)
    ends = torch.tensor([100, 100, 300], dtype=torch.int32, device=device)
    _compare(
        (device, dtype),
        _PREPARED,
        lambda gemm: product(x, matrices, ends, gemm=gemm),
        lambda gemm: product(y, matrices.mT, ends, plus=x.clone(), gemm=gemm),
        lambda gemm: outer(x, y, ends, gemm=gemm),
    )
    rows, columns = matrices.new_zeros(3, 200, 16)[:, :192], matrices.new_zeros(3, 192, 24)[:, :, :16]
    wide = x.new_zeros(300, 200)[:, :192]
    for with_gaps, tensor in ((rows, matrices), (columns, matrices), (wide, x)):
        with_gaps.copy_(tensor)
    # Suppress any error, because the compiler of another package has its own. Products without gaps have passed.
    with contextlib.suppress(Exception):
        _compare(
            (device, dtype),
            _TAKES_GAPS,
            lambda gemm: product(x, rows, ends, gemm=gemm),
            lambda gemm: product(y, columns.mT, ends, gemm=gemm),
            lambda gemm: outer(wide, y, ends, gemm=gemm),
        )


def _compare(
    key: tuple[torch.device, torch.dtype],
    capable: set[tuple[torch.device, torch.dtype]],
    *products: Callable[[str], Tensor],
) -> None:
    """Add `key` to `capable` if quack and torch agree on `products`; else raise quack's error, or RuntimeError."""
    for compute in products:
        capable.add(key)
        try:
            result, expected = compute(CUTE).float(), compute(CUBLAS).float()
        finally:
            capable.discard(key)
        error = ((result - expected).norm() / expected.norm()).item()
        if not error < 1e-2:
            raise RuntimeError(f"its grouped product is {error:.1e} from torch's")
    capable.add(key)


def takes_gaps(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether quack's kernel multiplies matrices and rows that have gaps between them. Call it after prepare()."""
    return (device, dtype) in _TAKES_GAPS


def _runs_as_one(x: Tensor, other: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these tensors."""
    if not (x.is_cuda and len(x)) or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in (x.shape[-1], *other.shape[1:]))
    return aligned and torch.cuda.get_device_capability(x.device) >= (8, 0)


@register_flop_formula(torch.ops.fxtune.grouped_mm)
def _flops(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * x[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.fxtune.grouped_outer)
def _outer_flops(x: Any, y: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * x[0] * x[1] * y[1])


class Routing:
    """Sorts the rows of tokens by expert, and brings them back to their tokens.

    `expert` [tokens, k]: the experts of each token. `ends`: see grouped_mm(). All shapes follow from the shape
    of `expert`, and the host reads nothing.
    """

    complete = True
    """Whether each pair of a token and one of its experts has a row."""

    def __init__(self, expert: Tensor, experts: int) -> None:
        self.tokens, self.k = expert.shape
        self.expert, self.order = expert.flatten().sort(stable=True)
        """[tokens k]: the expert of each sorted row, and the row's index before sorting."""
        indices = torch.arange(experts, device=expert.device)
        self.ends = torch.searchsorted(self.expert, indices, right=True, out_int32=True)
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(len(self.order), device=expert.device)

    def gather(self, states: Tensor) -> Tensor:
        """[rows, d]: the states [tokens, d] of each token once for each of its experts, sorted by expert."""
        return _Gather.apply(states, self.order, self.back, self.k, self.complete)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """[tokens, d]: the sum of each token's sorted rows [rows, d], weighted by `weights` [tokens, k]."""
        unsorted = _Permute.apply(rows, self.back, self.order, self.complete).view(self.tokens, self.k, -1)
        return (unsorted * weights.unsqueeze(-1)).sum(1)


class OwnRouting(Routing):
    """The rows of the experts that a rank holds. A pair of a token and another expert has no row: its entry of `back`
    is -1, and its weight must be 0."""

    complete = False

    def __init__(self, order: Tensor, back: Tensor, ends: Tensor) -> None:
        """`order` [rows], `back` [tokens, k]: see Routing. `ends`: where the rows of each held expert end."""
        self.tokens, self.k = back.shape
        self.order, self.back, self.ends = order, back.flatten(), ends
        self.elsewhere = back < 0
        """[tokens, k]: whether the pair of a token and an expert has no row."""
        numbers = torch.arange(order.shape[0], dtype=ends.dtype, device=ends.device)
        self.expert = torch.searchsorted(ends, numbers, right=True)


def pick(rows: Tensor, back: Tensor, complete: bool = False) -> Tensor:
    """rows[back], zero where `back` is -1. `complete`: `back` is -1 nowhere."""
    return rows.index_select(0, back) if complete else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))[back]


class _Gather(torch.autograd.Function):
    """states[order // k]. Backward adds up a token's k gradients in a fixed order, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Tensor, back: Tensor, k: int, complete: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.k, ctx.complete = k, complete
        return states.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (back,) = ctx.saved_tensors
        pairs = pick(gradient, back, ctx.complete)
        return pairs.unflatten(0, (-1, ctx.k)).sum(1), None, None, None, None


class _Permute(torch.autograd.Function):
    """pick(rows, back). Its gradient is also a permutation."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, back: Tensor, order: Tensor, complete: bool) -> Tensor:
        ctx.save_for_backward(order)
        return pick(rows, back, complete)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None, None, None
