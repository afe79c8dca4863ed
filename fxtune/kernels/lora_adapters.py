"""The adapters' part of fused LoRA: packs A and B for the matmul with the frozen weights (frozen_base.py), multiplies
activations by A and B, and sums the gradients of A and B.

A group is the linears that read the same input, such as q, k and v. Siblings are the linears of one group. On a GPU
the kernels of lora_triton.py compute this for 16-bit numbers, small ranks and many rows (see the constants below).
Otherwise torch does, with the same roundings. Sums over rows stay float32 until they are written as gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGN = 16
"""The padded rank is a multiple of this: 16 numbers of 2 bytes keep all rows at 32-byte boundaries."""
MAX_RANK = 128
"""The largest padded rank for lora_triton's products: the accumulator of a larger rank does not fit into registers."""
MIN_ROWS = 4096
"""The fewest rows for lora_triton's products: a program handles 64 rows, and fewer rows do not fill a GPU."""
MAX_SIBLINGS = 4
"""The most siblings that lora_triton packs and unpacks."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of a group, as the operators of fused_lora.py receive them.

    a, b: the lora_A [rank, in] and the lora_B [out, rank] of each sibling, in any dtype. bias: empty, or the frozen
    bias [out] of each sibling. scaling: one factor for each sibling. dtype: the compute dtype.
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
    def out_features(self) -> list[int]:
        return [factor.shape[0] for factor in self.b]

    @property
    def in_features(self) -> int:
        return self.a[0].shape[1]

    @property
    def padded_rank(self) -> int:
        """R in the shapes of this file."""
        return padded_rank(self.ranks, bool(self.bias))


def padded_rank(ranks: Sequence[int], bias: bool = False) -> int:
    """The number of columns of x A^T: one for each rank of each sibling, one for a bias (a column of ones), and
    columns of zeros up to a multiple of ALIGN."""
    return -(-(sum(ranks) + bias) // ALIGN) * ALIGN


def pack(adapters: Adapters, a: Tensor, b: Tensor) -> None:
    """Write every element of the packed A, `a` [R, in], and of the packed B, `b` [out, R]. Each sibling's lora_A is a
    block of A, and its scaled lora_B a block of B. The other elements are 0, or the bias in B. The rows of `a` and `b`
    may have gaps between them."""
    # The kernel computes in float32, so it is not for float64.
    if a.is_cuda and a.dtype is not torch.float64 and len(adapters.a) <= MAX_SIBLINGS:
        from fxtune.kernels.lora_triton import pack as launch

        factors_a, factors_b = ([factor.contiguous() for factor in factors] for factors in (adapters.a, adapters.b))
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
    """The product x F for F = `factor` [width, R]. This is lora_triton.project() for any dtype and R.

    x is also written to `left`, and the product to `right`: the parts of a matmul's operand. Column `ones` of the
    product is replaced by `value`.
    """
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


def add(y: Tensor, t: Tensor, factor: Tensor, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Return y + t F + residual, written to `out`, or to y if `out` is None. `t` is [rows, R], and F is `factor`
    [R, width]. This is lora_triton.add() for any dtype and R."""
    into = y if out is None else out
    if by_triton(y, len(factor)):
        from fxtune.kernels.lora_triton import add as launch

        return launch(y, t, factor, into, residual)
    torch.addmm(y, t, factor, out=into)
    return into if residual is None else into.add_(residual)


class AdapterGradients:
    """The gradients of a group's packed A and B, summed over tiles of the rows.

    dA^T = x^T (dy B), [in, R], and dB = dy^T (x A^T), [out, R]. Each sibling's gradients are a block of dA^T and a
    block of dB.
    """

    def __init__(self, adapters: Adapters, wanted: Sequence[bool]) -> None:
        """`wanted`: (whether the lora_A need gradients, whether the lora_B do)."""
        self.adapters, self.wanted = adapters, wanted
        self.totals: list[Tensor | None] = [None, None]
        """Partial sums of dA^T and of dB, see _outer()."""

    def add(self, dyb: Tensor, x: Tensor | None, xa: Tensor, dy: Tensor | None) -> None:
        """Add a tile of rows to the sums. `dyb`, `xa`: dy B and x A^T, [rows, R]. `x`: [rows, in]. `dy`: [rows, out].

        If `x` is None, the caller has already added the tile to A's sum in `totals`; if `dy` is None, to B's sum.
        """
        for index, (activations, t) in enumerate(((x, dyb), (dy, xa))):
            if self.wanted[index] and activations is not None:
                self.totals[index] = _outer(activations, t, self.totals[index])

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of each lora_A and of each lora_B, as separate tensors; empty lists where none are wanted."""
        adapters = self.adapters
        grads = [[factor.new_empty(factor.shape) for factor in factors] for factors in (adapters.a, adapters.b)]
        da, db = self.totals
        known = db if da is None else da
        if known is not None and known.is_cuda and known.dtype is torch.float32 and len(adapters.a) <= MAX_SIBLINGS:
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
        grads_a, grads_b = (grad if wanted else [] for grad, wanted in zip(grads, self.wanted, strict=True))
        return grads_a, grads_b


def _outer(x: Tensor, t: Tensor, into: Tensor | None) -> Tensor:
    """x^T t for `x` [rows, width] and `t` [rows, R], added to `into` if given: partial sums [parts, width, R] in
    float32 (float64 for float64). Only lora_triton computes more than one part."""
    if (into is not None and into.shape[0] > 1) or by_triton(x, t.shape[1]):
        from fxtune.kernels.lora_triton import reduce

        return reduce(x, t, into)
    if x.dtype.itemsize > 2:
        product = x.t() @ t
    elif x.is_cuda:
        product = torch.mm(x.t(), t, out_dtype=torch.float32)
    else:
        product = x.t().float() @ t.float()
    return product.unsqueeze(0) if into is None else into.add_(product)


def by_triton(x: Tensor, columns: int) -> bool:
    """Whether lora_triton.py computes a product of `x` [rows, ...] with this many columns."""
    return x.is_cuda and x.dtype.itemsize == 2 and columns <= MAX_RANK and len(x) >= MIN_ROWS
