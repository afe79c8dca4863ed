"""Large products in 16 bits by one of two kernels: cuBLAS's, or quack's for Hopper, written in CuTe DSL.

The large products of a model with frozen weights take three quarters of a step's time, and cuBLAS is not the fastest
for them. On an H200 at its power limit, all linears of an 8B model's layer (forward and dx at 16,384 rows in bfloat16)
take 22.28 ms by cuBLAS and 21.38 ms by quack's kernel.

A GPU at its power limit is faster if its work takes less energy. The energy depends on how often an operand crosses
the chip. So `gemm="cute"` is quack-kernels' GEMM with tiles of 256 x 192, two warp groups for each tile, clusters of
two adjacent tiles that read the same rows of the left factor, and a persistent grid: one program for each streaming
multiprocessor ("processor" below). Sums are float32 in a fixed order: the same bits in each run.

`gemm` is a preference: cuBLAS still computes small products, and products whose operands the CuTe kernel cannot read
(is_served()). The call of quack is an operator, `fxtune::cute_mm`, so that FLOP counters, fake tensors and profilers
see a product. On a CPU the operator is torch's product, the reference.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxtune.system.machine import packages

CUBLAS, CUTE = "cublas", "cute"
Pair = tuple[int, int]
VERSION = packages.QUACK_VERSION
"""The release of quack-kernels whose inner function is called here."""
CAPABILITY = (9, 0)
TILE = (256, 192)
CLUSTER = (1, 2)
MIN_ROWS, MIN_SIZE = 8192, 1024
"""The CuTe kernel computes products with at least MIN_ROWS rows, MIN_SIZE columns and MIN_SIZE terms in each sum. Its
tile is fixed, and cuBLAS has smaller tiles for small products: 2.04 ms for 6,272 rows, 4,096 terms and 28,672 columns
on an H200, 2.36 ms by the CuTe kernel."""
LOGITS, MIN_LOGIT_ROWS = 2**16, 2048
"""A product of LOGITS columns, such as a head's, needs only MIN_LOGIT_ROWS rows."""
MIN_UTILIZATION = 0.92
"""The lowest utilization() at which the CuTe kernel computes a product. It was measured from 0.94 on."""
MAX_SPAN = 2**31
"""cuBLAS computes the product if a tensor spans this many numbers: the CuTe kernel's offsets may have 32 bits."""

_PREPARED: set[tuple[torch.device, torch.dtype]] = set()


def mm(
    left: Tensor, right: Tensor, out: Tensor | None = None, gemm: str = CUBLAS, plus: Tensor | None = None
) -> Tensor:
    """left right + plus, [rows, columns], for `left` [rows, k] and `right` [k, columns]; in `out` if given.

    Rows may have gaps between them; `right` may be a transpose. `plus` [rows, columns] must not be `out`. The CuTe
    kernel (only if `right` is a transpose) and a CPU add `plus` to the float32 sums and round once. cuBLAS adds it to
    the rounded product. `gemm`: CUBLAS, or CUTE after prepare(); see is_served(). Not for autograd.
    """
    if gemm == CUTE:
        out = left.new_empty(left.shape[0], right.shape[1]) if out is None else out
        if is_served(left, right, out, plus):
            torch.ops.fxtune.cute_mm(left, right, out, plus)
            return out
    if plus is not None:
        return torch.addmm(plus, left, right) if out is None else torch.addmm(plus, left, right, out=out)
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)


def is_served(left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> bool:
    """Whether the CuTe kernel computes this product: on a GPU that it supports, in 16 bits, large, and aligned for it.

    Hopper's copy engine (TMA) moves boxes of matrices whose rows are contiguous and begin at multiples of 16 bytes. It
    writes multiples of 16 bytes, so a row of another size would overwrite the numbers behind its end.
    """
    (rows, inner), columns = left.shape, right.shape[1]
    results = [out] if plus is None else [out, plus]
    tensors = (left, right, *results)
    if left.dtype not in (torch.bfloat16, torch.float16) or any(tensor.dtype != left.dtype for tensor in tensors):
        return False
    if rows < (MIN_ROWS if columns < LOGITS else MIN_LOGIT_ROWS) or min(inner, columns) < MIN_SIZE:
        return False
    sizes = ((size, stride) for x in tensors for size, stride in zip(x.shape, x.stride(), strict=True))
    if any(size * stride >= MAX_SPAN for size, stride in sizes):
        return False
    processors = processors_of(left.device)
    if not processors or utilization(rows, columns, processors) < MIN_UTILIZATION or columns * out.itemsize % 16:
        return False
    right_readable = _readable(right.t()) or (plus is None and _readable(right))
    return _readable(left) and all(map(_readable, results)) and right_readable


def utilization(rows: int, columns: int, processors: int) -> float:
    """The share of the kernel's time in which its processors compute numbers of the result [rows, columns]. The parts
    of tiles beyond the result's edge, and processors without a tile in the last round, are wasted.
    """
    cluster = CLUSTER[0] * CLUSTER[1]
    computed = rounds(rows, columns, processors) * (processors // cluster) * cluster * TILE[0] * TILE[1]
    return rows * columns / computed


def rounds(rows: int, columns: int, processors: int) -> int:
    """The number of tiles that the busiest processor computes, one after the other, for a result [rows, columns]."""
    down, across = (-(-size // tile) for size, tile in zip((rows, columns), TILE, strict=True))
    clusters = -(-down // CLUSTER[0]) * -(-across // CLUSTER[1])
    return -(-clusters // (processors // (CLUSTER[0] * CLUSTER[1])))


@torch.no_grad()
def prepare(device: torch.device, dtype: torch.dtype, cache: Path) -> None:
    """Compile the CuTe kernel for products of `dtype`, or load it from disk, and check its products.

    Call it before the first product, because compiling must not be part of a CUDA graph or of a measurement. The
    kernels are kept in QUACK_CACHE_DIR if it is set, else in `cache`; quack's own default is a folder under /tmp that
    others may write to. Raises whatever the package and its compiler raise, and RuntimeError if a product is wrong.
    """
    if (device, dtype) in _PREPARED:
        return
    use_cache(cache)
    generator = torch.Generator(device).manual_seed(0)  # the default generator must not advance
    left, wide, tall = (
        torch.randn(size, generator=generator, device=device).to(dtype)[:, :width]
        for size, width in (((600, 1064), 1056), ((1056, 784), 776), ((776, 1064), 1056))
    )
    out, stream = torch.empty(2, 600, 784, dtype=dtype, device=device)[..., :776].unbind()
    stream.copy_(left[:, :776])
    for right, plus in ((wide, None), (tall.t(), None), (tall.t(), stream)):
        by_quack(left, right, out.fill_(float("nan")), plus)
        with torch.autocast(device.type, enabled=False):
            exact = left.float() @ right.float() + (0 if plus is None else plus.float())
        error = ((out.float() - exact).norm() / exact.norm()).item()
        if not error < 1e-2:
            raise RuntimeError(f"its product is {error:.1e} from float32's")
    _PREPARED.add((device, dtype))


def use_cache(folder: Path) -> None:
    """Let quack keep its compiled kernels in QUACK_CACHE_DIR if it is set, else in `folder`."""
    from quack import cache  # read at each compilation, so FlashAttention may have imported it before

    if cache.CACHE_DIR is None:
        cache.CACHE_DIR = str(folder)


def by_quack(left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
    """Write left right + plus to `out` with the CuTe kernel. The tensors must be aligned as is_served() requires."""
    if (left.device, left.dtype) not in _PREPARED and left.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the CuTe kernel would be compiled within a CUDA graph: call matmul.prepare() first")
    call_quack(left, right, out, plus, TILE, CLUSTER, pingpong=False, b_kn=True)


def call_quack(
    left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None, tile: Pair, cluster: Pair, **options: Any
) -> None:
    """quack's GEMM with a persistent grid. Without `b_kn=True` the right factor is [columns, k]. `pingpong`: two warp
    groups take turns."""
    from quack.gemm import gemm

    # detach(), because DLPack exports no tensors that require a gradient.
    tensors = [tensor if tensor is None else tensor.detach() for tensor in (left, right, out, plus)]
    gemm(*tensors, None, *tile, *cluster, persistent=True, is_dynamic_persistent=False, **options)


torch.library.define("fxtune::cute_mm", "(Tensor left, Tensor right, Tensor(a!) out, Tensor? plus=None) -> ()")
torch.library.impl("fxtune::cute_mm", "cuda")(by_quack)


@torch.library.impl("fxtune::cute_mm", "cpu")
def reference(left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
    """The operator on a CPU: the product by torch."""
    mm(left, right, out, CUBLAS, plus)


@torch.library.register_fake("fxtune::cute_mm")
def _(left: Tensor, right: Tensor, out: Tensor, plus: Tensor | None = None) -> None:
    assert out.shape == (left.shape[0], right.shape[1])


def _flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


register_flop_formula(torch.ops.fxtune.cute_mm)(_flops)


@functools.cache
def processors_of(device: torch.device) -> int:
    """The number of processors of a GPU that the CuTe kernel supports; 0 for any other device."""
    if device.type != "cuda":
        return 0
    gpu = torch.cuda.get_device_properties(device)
    return int(gpu.multi_processor_count) if (gpu.major, gpu.minor) == CAPABILITY else 0


def _readable(x: Tensor) -> bool:
    step = 16 // x.itemsize
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0
