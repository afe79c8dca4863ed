"""Large products in 16 bits by one of two kernels: cuBLAS's, or quack's for Hopper, written in CuTe DSL.

`mm(left, right, out, by, plus)` is torch.mm, or torch.addmm, with a word for who multiplies. The large products of a model with
frozen weights are three quarters of a step's time, and cuBLAS's choice for them is not the fastest there is. On an H200, in
bfloat16, 16,384 rows, the card at its limit of 700 W for a minute, kernels in turn, milliseconds (the linears of an 8B model's
layer with room for adapters of rank 16, forward and their dx):

                     cuBLAS   256 x 192, 1 x 2   2 x 1   2 x 2   1 x 1   128 x 256, 1 x 2
    gate and up      5.95     5.65               5.81    5.87    5.94    6.00
        dx           5.90     5.72               5.88    5.91    5.98    5.89
    down             2.99     2.89               2.97    2.98    3.03    2.98
        dx           3.01     2.88               2.96    3.01    3.01    3.05
    all of a layer   22.28    21.38              22.06   22.21   22.41   22.36

A card that draws all the power it may have is as fast as its work is frugal: what counts is how often an operand crosses the
chip. So `by="cute"` is quack-kernels' GEMM with tiles of 256 x 192, two warp groups to a tile, a cluster of two tiles side by
side that share the rows of the left factor, and a grid that stays (a program for each processor, tiles in turn). Sums are
float32 in a fixed order: the same bits from run to run. Sizes and strides are no part of what is compiled, so there is one
kernel for each dtype and order of the right factor in memory, and one that adds a third tensor. Compiling takes seconds and is
kept on disk (prepare()).

`by` says what is wanted of large products; a small one, or one that the kernel cannot read, is cuBLAS's all the same (served()).
It is an argument and no state of this module: models of one process may differ in it, and nobody has to remember to set it.

The call of quack is an operator, `fxtune::cute_mm`, since what counts operations, traces with fake tensors or profiles
must see a product there. On a CPU it is torch's own product, which is its reference.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor

CUBLAS, CUTE = "cublas", "cute"
VERSION = "0.6.5"
"""The release of quack-kernels whose inner function is called here."""
CAPABILITY = (9, 0)
TILE = (256, 192)
CLUSTER = (1, 2)
LEAST_ROWS, LEAST_SIZE = 2048, 1024
"""Rows, and numbers in and out, from which products are the CuTe kernel's. Where it was measured it had 16,384 rows and 4,096
numbers or more; its tile is fixed, while cuBLAS has others for small products. A chunk of the loss (linear_cross_entropy.py)
has up to 4,096 rows, a few less where documents end, and is among the large ones by its other side."""
FULL = 0.92
"""The part of the processors' time that must fall on numbers of the result: see filled(). The least that was measured is 0.94."""

_READY: set[tuple[torch.device, torch.dtype]] = set()
"""What prepare() has compiled for."""


def mm(
    left: Tensor, right: Tensor, out: Optional[Tensor] = None, by: str = CUBLAS, plus: Optional[Tensor] = None
) -> Tensor:
    """left right + plus, [rows, columns] in their dtype, for `left` [rows, k] and `right` [k, columns]; in `out` where given.

    Rows may lie apart; `right` may be a transpose. `plus` [rows, columns], not `out`: the CuTe kernel, and a CPU, adds it to sums
    in float32 and rounds once, the kernel where `right` is a transpose; cuBLAS (of CUDA 13, on an H200) adds it to what it has
    rounded. `by`: CUBLAS, or CUTE for products that it serves, for which prepare() was called. Autograd is not told of it.
    """
    if by == CUTE:
        out = left.new_empty(left.shape[0], right.shape[1]) if out is None else out
        if served(left, right, out, plus):
            torch.ops.fxtune.cute_mm(left, right, out, plus)
            return out
    if plus is not None:
        return torch.addmm(plus, left, right) if out is None else torch.addmm(plus, left, right, out=out)
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)


FARTHEST = 2**31
"""Numbers from the first to the last of a factor or of the result from which cuBLAS is taken: whether the kernel's strides hold
more than 32 bits there has not been shown."""


def served(left: Tensor, right: Tensor, out: Tensor, plus: Optional[Tensor] = None) -> bool:
    """Whether this product is one for the CuTe kernel: on a card that it is for, in 16 bits, large, and readable by it.

    The copy engine of Hopper (TMA) moves boxes whose first dimension is contiguous and whose rows begin on 16 bytes. It writes
    whole 16 bytes, so that the end of a row which is no multiple of them would spill into what lies behind it.
    """
    (rows, inner), columns = left.shape, right.shape[1]
    results = [out] if plus is None else [out, plus]
    if left.dtype not in (torch.bfloat16, torch.float16) or {right.dtype, *(one.dtype for one in results)} != {
        left.dtype
    }:
        return False
    if rows < LEAST_ROWS or min(inner, columns) < LEAST_SIZE:
        return False
    if any(
        size * stride >= FARTHEST
        for one in (left, right, *results)
        for size, stride in zip(one.shape, one.stride(), strict=True)
    ):
        return False
    processors = processors_of(left.device)
    if not processors or filled(rows, columns, processors) < FULL:
        return False
    if columns * out.itemsize % 16:
        return False
    factor = _readable(right.t()) or (plus is None and _readable(right))
    return _readable(left) and all(_readable(one) for one in results) and factor


def filled(rows: int, columns: int, processors: int) -> float:
    """The part of a kernel's time in which its processors make numbers of the result [rows, columns].

    They take a tile each, all at once: tiles over the edge, and processors without a tile in the last round, do nothing of use.
    """
    together = CLUSTER[0] * CLUSTER[1]
    return (
        rows * columns / (rounds(rows, columns, processors) * (processors // together) * together * TILE[0] * TILE[1])
    )


def rounds(rows: int, columns: int, processors: int) -> int:
    """How many tiles one after the other the busiest of the processors makes of the result [rows, columns]."""
    down, across = (-(-size // tile) for size, tile in zip((rows, columns), TILE, strict=True))
    clusters = -(-down // CLUSTER[0]) * -(-across // CLUSTER[1])
    return -(-clusters // (processors // (CLUSTER[0] * CLUSTER[1])))


@torch.no_grad()
def prepare(device: torch.device, dtype: torch.dtype, cache: Path) -> None:
    """Compile the CuTe kernel for products of `dtype`, or load it from disk, and see that it multiplies.

    To be called before a product is asked for, since neither a recording of CUDA graphs nor a clock should have that in it: some
    seconds for each of three kernels the first time, then milliseconds. They are kept in QUACK_CACHE_DIR where it is set, else in
    `cache`; quack's own default is a folder under /tmp that others may write to.

    Raises whatever the package and its compiler do, and RuntimeError where the product is wrong.
    """
    if (device, dtype) in _READY:
        return
    from quack import cache as kept  # read at each compilation, so FlashAttention may have imported it before

    if kept.CACHE_DIR is None:
        kept.CACHE_DIR = str(cache)
    draw = torch.Generator(device).manual_seed(0)  # of its own: random state is left as it is
    left, wide, tall = (
        torch.randn(size, generator=draw, device=device).to(dtype)[:, :width]
        for size, width in (((600, 1064), 1056), ((1056, 784), 776), ((776, 1064), 1056))
    )
    out, stream = torch.empty(2, 600, 784, dtype=dtype, device=device)[..., :776].unbind()
    stream.copy_(left[:, :776])
    for right, plus in ((wide, None), (tall.t(), None), (tall.t(), stream)):
        by_quack(left, right, out.fill_(float("nan")), plus)
        with torch.autocast(device.type, enabled=False):
            exact = left.float() @ right.float() + (0 if plus is None else plus.float())
        off = ((out.float() - exact).norm() / exact.norm()).item()
        if not off < 1e-2:
            raise RuntimeError(f"its product is {off:.1e} from float32's")
    _READY.add((device, dtype))


def by_quack(left: Tensor, right: Tensor, out: Tensor, plus: Optional[Tensor] = None) -> None:
    """Write left right + plus to `out` by the CuTe kernel. For what served() allows, or as aligned as that."""
    if (left.device, left.dtype) not in _READY and left.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the CuTe matmul would be compiled while a CUDA graph is recorded: call matmul.prepare() first"
        )
    from quack.gemm import gemm

    # detach: what is exported to it must not ask for a gradient. b_kn: the right factor is [k, columns], as torch has it.
    gemm(
        left.detach(),
        right.detach(),
        out.detach(),
        None if plus is None else plus.detach(),
        None,
        *TILE,
        *CLUSTER,
        pingpong=False,
        persistent=True,
        is_dynamic_persistent=False,
        b_kn=True,
    )


torch.library.define("fxtune::cute_mm", "(Tensor left, Tensor right, Tensor(a!) out, Tensor? plus=None) -> ()")
torch.library.impl("fxtune::cute_mm", "cuda")(by_quack)


@torch.library.impl("fxtune::cute_mm", "cpu")
def reference(left: Tensor, right: Tensor, out: Tensor, plus: Optional[Tensor] = None) -> None:
    """The same by torch."""
    mm(left, right, out, CUBLAS, plus)


@torch.library.register_fake("fxtune::cute_mm")
def _(left: Tensor, right: Tensor, out: Tensor, plus: Optional[Tensor] = None) -> None:
    assert out.shape == (left.shape[0], right.shape[1])


def _flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(torch.ops.fxtune.cute_mm)(_flops)


_register_flops()


@functools.cache
def processors_of(device: torch.device) -> int:
    """Of a card that the CuTe kernel is for; 0 for any other device."""
    if device.type != "cuda":
        return 0
    card = torch.cuda.get_device_properties(device)
    return int(card.multi_processor_count) if (card.major, card.minor) == CAPABILITY else 0


def _readable(x: Tensor) -> bool:
    step = 16 // x.itemsize
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0
