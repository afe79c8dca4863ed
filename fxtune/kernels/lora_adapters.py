"""The trained half of fused LoRA: packing A and B for the frozen half's matmul, multiplying by them, and their
gradients.

On a GPU and in 16 bits the kernels of lora_triton.py do this, for groups that are small enough and have enough rows;
otherwise torch does, in the same numeric order. Sums over rows stay float32 until they are written as gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 16
"""The padded rank is a multiple of this: 16 numbers of 2 bytes keep all rows at 32-byte boundaries."""
MAX_RANK = 128
"""The largest padded rank for lora_triton's products: the accumulator of a larger one does not fit into registers."""
MIN_ROWS = 4096
"""The fewest rows for lora_triton's products: a program handles 64 rows, and fewer rows do not fill a GPU."""
MAX_SIBLINGS = 4


@dataclass(frozen=True)
class Adapters:
    """The trained half of a group, as an operator receives it.

    a, b: lora_A [rank, in] and lora_B [out, rank] of each sibling, in any dtype. bias: empty, or [out] of each
    sibling. scaling: one factor for each sibling. dtype: the compute dtype.
    """

    a: Sequence[Tensor]
    b: Sequence[Tensor]
    bias: Sequence[Tensor]
    scaling: Sequence[float]
    dtype: torch.dtype

    @property
    def ranks(self) -> list[int]:
        return [factor.shape[0] for factor in self.a]

    @property
    def outs(self) -> list[int]:
        return [factor.shape[0] for factor in self.b]

    @property
    def inner(self) -> int:
        return self.a[0].shape[1]

    @property
    def width(self) -> int:
        """R, the padded rank."""
        return padded_rank(self.ranks, bool(self.bias))


def padded_rank(ranks: Sequence[int], bias: bool = False) -> int:
    """Columns of x A^T: the siblings' ranks, a column of ones where there is a bias, and zeros to a multiple of
    ALIGN."""
    return -(-(sum(ranks) + bias) // ALIGN) * ALIGN


def pack(adapters: Adapters, a: Tensor, b: Tensor) -> None:
    """Write A and B: all of `a` [R, in] and `b` [out, R], zeros included. Rows may have gaps between them."""
    # The kernel computes in float32.
    if a.is_cuda and a.dtype is not torch.float64 and len(adapters.a) <= MAX_SIBLINGS:
        from fxtune.kernels.lora_triton import pack as launch

        factors_a, factors_b = ([factor.contiguous() for factor in half] for half in (adapters.a, adapters.b))
        bias = torch.cat(list(adapters.bias)) if adapters.bias else None
        launch(factors_a, factors_b, adapters.scaling, bias, a, b)
        return
    a.zero_()
    b.zero_()
    row, column = 0, 0
    for lora_a, lora_b, scaling in zip(adapters.a, adapters.b, adapters.scaling, strict=True):
        a[column : column + len(lora_a)].copy_(lora_a)
        # lora_B is scaled before it is rounded. peft scales the product: the same numbers for powers of two.
        b[row : row + len(lora_b), column : column + len(lora_a)].copy_(lora_b.detach() * scaling)
        row, column = row + len(lora_b), column + len(lora_a)
    if adapters.bias:
        b[:, column].copy_(torch.cat(list(adapters.bias)))


def project(
    x: Tensor,
    factor: Tensor,
    left: Tensor | None = None,
    right: Tensor | None = None,
    ones: int | None = None,
    value: float = 1.0,
) -> Tensor:
    """x factor, as lora_triton.project(), for any dtype and R."""
    if by_triton(x, factor.shape[1]):
        from fxtune.kernels.lora_triton import project as launch

        return launch(x, factor, left, right, -1 if ones is None else ones, value)
    product = x @ factor
    if ones is not None:
        product[:, ones] = value
    if left is not None:
        left.copy_(x)
    if right is not None:
        right.copy_(product)
    return product


def add(
    y: Tensor, narrow: Tensor, factor: Tensor, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y + narrow factor + residual, as lora_triton.add(), for any dtype and R; in y where there is no `out`."""
    into = y if out is None else out
    if by_triton(y, len(factor)):
        from fxtune.kernels.lora_triton import add as launch

        return launch(y, narrow, factor, into, residual)
    torch.addmm(y, narrow, factor, out=into)
    return into if residual is None else into.add_(residual)


class AdapterGradients:
    """The gradients of a group's A and B, summed over tiles of the rows.

    dA^T = x^T (dy B), [in, R], and dB = dy^T (x A^T), [out, R]. A sibling's gradients are the sibling's rows and
    columns of these products.
    """

    def __init__(self, adapters: Adapters, wanted: Sequence[bool]) -> None:
        """`wanted`: whether A, and B, need gradients."""
        self.adapters, self.wanted = adapters, wanted
        self.totals: list[Tensor | None] = [None, None]

    def add(self, dyb: Tensor, x: Tensor | None, xa: Tensor, dy: Tensor | None) -> None:
        """Add some rows: dy B and x A^T [rows, R], x [rows, in] and dy [rows, out]. A sum without its x or dy is in
        `totals` already.
        """
        for index, (wide, narrow) in enumerate(((x, dyb), (dy, xa))):
            if self.wanted[index] and wide is not None:
                self.totals[index] = _outer(wide, narrow, self.totals[index])

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of each lora_A and of each lora_B, as separate tensors; empty lists where none are wanted."""
        adapters = self.adapters
        grads = [[factor.new_empty(factor.shape) for factor in half] for half in (adapters.a, adapters.b)]
        da, db = self.totals
        sums = db if da is None else da
        if sums is not None and sums.is_cuda and sums.dtype is torch.float32 and len(adapters.a) <= MAX_SIBLINGS:
            from fxtune.kernels.lora_triton import unpack as launch

            launch(da, db, adapters.scaling, grads[0], grads[1])
        else:
            row, column = 0, 0
            da, db = (None if total is None else total.sum(0) for total in (da, db))
            for grad_a, grad_b, scaling in zip(*grads, adapters.scaling, strict=True):
                ranks = slice(column, column + len(grad_a))
                if da is not None:
                    grad_a.copy_(da[:, ranks].t())
                if db is not None:
                    grad_b.copy_(db[row : row + len(grad_b), ranks] * scaling)
                row, column = row + len(grad_b), column + len(grad_a)
        first, second = ([*half] if wanted else [] for half, wanted in zip(grads, self.wanted, strict=True))
        return first, second


def _outer(wide: Tensor, narrow: Tensor, into: Tensor | None) -> Tensor:
    """wide^T narrow as partial sums [parts, width, R], added to `into` if given; float32, or float64 for float64."""
    if (into is not None and into.shape[0] > 1) or by_triton(wide, narrow.shape[1]):
        from fxtune.kernels.lora_triton import reduce

        return reduce(wide, narrow, into)
    if wide.dtype.itemsize > 2:
        product = wide.t() @ narrow
    elif wide.is_cuda:
        product = torch.mm(wide.t(), narrow, out_dtype=torch.float32)
    else:
        product = wide.t().float() @ narrow.float()
    return product.unsqueeze(0) if into is None else into.add_(product)


def by_triton(x: Tensor, width: int) -> bool:
    """Whether lora_triton.py computes a product of `x` [rows, ...] that is `width` wide."""
    return x.is_cuda and x.dtype.itemsize == 2 and width <= MAX_RANK and len(x) >= MIN_ROWS
