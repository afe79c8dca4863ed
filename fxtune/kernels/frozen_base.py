"""The frozen half of fused LoRA: products with the weights of a group of linears, for each way of storing them.

A group is one linear, or siblings that read the same input (q, k, v; gate, up). W [out, in] is their weights stacked
by rows. `A` [R, in] stacks the siblings' lora_A; `B` [out, R] has scaling * lora_B of each sibling in its own rows and
columns. Each call makes A and B from the parameters, in the compute dtype. R is the sum of the ranks, padded with
zeros to a multiple of ALIGN. A bias is one more column of B, which a column of ones in x A^T multiplies.

kind                tensors                                       product
dense, dense/cute   [M]: W with space for A and B, augment()      one matmul, see below
nf4, int8           quantized_modules.packed() of each sibling    W is dequantized, B is added to y afterwards
fp8                 the two or four tensors of its fp8.Weight     two fp8 operands, B is added to y afterwards

`Base` is the interface of a kind. To add a kind: subclass Base, define forward() and backward() (and operand(), if the
product needs x in another form), and name the class in fused_lora.base_of().

M = [[W, B], [A, 0]], [out + R, in + R]. [x | x A^T] M[:out]^T is x W^T + (x A^T) B^T, accumulated in float32 and
rounded once. [dy | dy B] M[:, :in] is dx. In the first steps (x A^T) B^T is smaller than the last bit of a bfloat16
result. Added to a rounded result, it would be lost. Added to a result with the residual stream, it would decide
rounding ties, and change the result by more than its size. So rounding once is worth copying an x without padding.

Where the activation kernels (kernels/swiglu.py) multiply x A^T by B, or dy B by A, the product with M also computes
x A^T or dy B: x M[:, :in]^T is [x W^T | x A^T], and dy M[:out] is [dy W | dy B]. The extra columns are nearly free,
because they lie in the matmul's last tile. Writing A and B into M has no visible effect: only the call that has just
written them reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxtune.kernels.fp8 import quantize_rows, scaled_mm, times_codes
from fxtune.kernels.lora_adapters import ALIGN, Adapters, add, pack, padded_rank, project
from fxtune.kernels.matmul import CUBLAS, CUTE, mm

DENSE = "dense"
DENSE_CUTE = f"{DENSE}/{CUTE}"
"""`dense` with quack's kernel for large products (matmul.py). The kind is an argument of the operators. It includes
the GEMM backend, because two models of one process may have different backends.
"""


def is_dense(kind: str) -> bool:
    """Whether a group of this kind has its weights in 16 or 32 bits."""
    return kind in (DENSE, DENSE_CUTE)


@torch.no_grad()
def augment(weights: Sequence[Tensor], ranks: Sequence[int], bias: bool = False) -> Tensor:
    """M for siblings' `weights` [out_i, in], in their dtype and on their device. A and B in M are zero."""
    outs, inner, width = list(map(len, weights)), weights[0].shape[1], padded_rank(ranks, bias)
    matrix = weights[0].new_zeros(sum(outs) + width, inner + width)
    for into, weight in zip(matrix[: sum(outs), :inner].split(outs), weights, strict=True):
        into.copy_(weight)
    return matrix


class Operand(NamedTuple):
    """Activations, prepared for a product with weights of one kind."""

    x: Tensor
    """The activations [rows, width] in the compute dtype. Rows may have gaps between them."""
    prepared: Any = None
    """What forward() and backward() of the kind need besides x."""


class Base:
    """A group's frozen weights of one kind with its packed adapters, made for one call of an operator."""

    a: Tensor
    """The packed A [R, in], in the compute dtype."""
    b: Tensor
    """The packed B [out, R], in the compute dtype: scaled, with the bias in column sum(ranks)."""

    def __init__(self, tensors: Sequence[Tensor], adapters: Adapters) -> None:
        self.adapters, self.tensors = adapters, tensors
        dtype, device = adapters.dtype, adapters.a[0].device
        self.a = torch.empty(adapters.padded_rank, adapters.in_features, dtype=dtype, device=device)
        self.b = torch.empty(sum(adapters.out_features), adapters.padded_rank, dtype=dtype, device=device)
        pack(adapters, self.a, self.b)

    def operand(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        """The operand for `x` [rows, in or out], and x times `factor` [in or out, R]: self.a.t() or self.b."""
        return Operand(x), self.project(x, factor)

    def padded(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        """operand() for an `x` that may have padding behind its rows. The padding may be overwritten."""
        return self.operand(x, factor)

    def forward(self, operand: Operand, xa: Tensor | None, out: Tensor | None = None) -> Tensor:
        """x W^T + xa B^T, or x W^T if xa is None: [rows, out] in the compute dtype, written to `out` if given."""
        raise NotImplementedError

    def backward(self, operand: Operand, dyb: Tensor | None, out: Tensor | None = None) -> Tensor:
        """dy W + dyb A, or dy W if dyb is None: [rows, in] in the compute dtype, written to `out` if given."""
        raise NotImplementedError

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x W^T and x A^T, for `x` [rows, in] with contiguous rows. The rows of x W^T may have gaps between them."""
        operand, xa = self.operand(x, self.a.t())
        return self.forward(operand, None), xa

    def split_backward(self, dy: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """dy W and dy B, for `dy` [rows, out]. dy W is in `out` [rows, in], if this kind can write it there."""
        operand, dyb = self.operand(dy, self.b)
        return self.backward(operand, None, out), dyb

    def padded_buffer(self, rows: int) -> Tensor:
        """An uninitialized x [rows, in]. full(padded=True) reads it without a copy."""
        return spaced(self.a, rows, self.adapters.in_features)

    def full(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None, padded: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x W^T + xa B^T + residual, [rows, out], written to `out` if given, and xa. `padded`: use padded() for x."""
        operand, xa = (self.padded if padded else self.operand)(x, self.a.t())
        return add_adapter(self.forward(operand, None, out), xa, self.b.t(), residual=residual), xa

    def full_backward(self, dy: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        """dy W + dyb A, [rows, in], and dyb. `padded`: use padded() for dy."""
        operand, dyb = (self.padded if padded else self.operand)(dy, self.b)
        return self.backward(operand, dyb), dyb

    def project(self, x: Tensor, factor: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        """lora_adapters.project(). If there is a bias, its column of the product is ones (zeros in dy B)."""
        ones = sum(self.adapters.ranks) if self.adapters.bias else None
        return project(x, factor, left, right, ones, 0.0 if factor is self.b else 1.0)


class Dense(Base):
    """Weights in 16 or 32 bits. If their dtype is not the compute dtype, each call casts them."""

    def __init__(self, tensors: Sequence[Tensor], adapters: Adapters, kind: str = DENSE) -> None:
        (matrix,) = tensors
        self.adapters, self.gemm = adapters, CUTE if kind == DENSE_CUTE else CUBLAS
        # .data hides the writes of pack() from autograd. Only the call that has written A and B reads them.
        self.matrix = matrix = matrix.data.to(adapters.dtype)
        self.out, self.inner, rank = sum(adapters.out_features), adapters.in_features, adapters.padded_rank
        assert matrix.shape == (self.out + rank, self.inner + rank), (matrix.shape, adapters.ranks)
        self.a, self.b = matrix[self.out :, : self.inner], matrix[: self.out, self.inner :]
        pack(adapters, self.a, self.b)

    def buffer(self, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """A buffer [rows, width + R], its left part and its right part."""
        buffer = self.matrix.new_empty(rows, width + self.adapters.padded_rank)
        left, right = buffer[:, :width], buffer[:, width:]
        if not buffer.is_cuda:
            right.zero_()  # oneDNN's bfloat16 matmul multiplies the gap between rows by zeros, and NaN stays NaN
        return buffer, left, right

    def operand(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        buffer, left, right = self.buffer(*x.shape)
        return Operand(x, buffer), self.project(x, factor, left, right)

    def padded(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        """With a padding of R numbers x is already the left part of a buffer. (On a CPU the padding is zeros.)"""
        rows, width = x.shape
        row = width + self.adapters.padded_rank
        end = (x.storage_offset() + rows * row) * x.itemsize
        if (x.dtype, x.stride()) != (self.matrix.dtype, (row, 1)) or end > x.untyped_storage().nbytes():
            return self.operand(x, factor)
        buffer = x.as_strided((rows, row), (row, 1))
        return Operand(x, buffer), self.project(x, factor, right=buffer[:, width:])

    def padded_buffer(self, rows: int) -> Tensor:
        return self.buffer(rows, self.inner)[1]

    def forward(
        self, operand: Operand, xa: Tensor | None, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        return mm(operand.prepared, self.matrix[: self.out].t(), out, self.gemm, residual)

    def backward(self, operand: Operand, dyb: Tensor | None, out: Tensor | None = None) -> Tensor:
        return mm(operand.prepared, self.matrix[:, : self.inner], out, self.gemm)

    def full(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None, padded: bool = False
    ) -> tuple[Tensor, Tensor]:
        operand, xa = (self.padded if padded else self.operand)(x, self.a.t())
        return self.forward(operand, xa, out, residual), xa

    def full_backward(self, dy: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        if padded or self.inner > self.out or self.adapters.bias:  # with padding dy is not copied
            return super().full_backward(dy, padded)
        product, dyb = self.split_backward(dy)
        return add_adapter(product, dyb, self.a, product.new_empty(product.shape)), dyb

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _split_columns(mm(x, self.matrix[:, : self.inner].t(), gemm=self.gemm), self.out)

    def split_backward(self, dy: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return _split_columns(mm(dy, self.matrix[: self.out], gemm=self.gemm), self.inner)


def _split_columns(product: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first `width` columns of a product, and a copy of the rest: a view would keep the whole product alive."""
    return product[:, :width], product[:, width:].clone(memory_format=torch.contiguous_format)


class Dequantized(Base):
    """Weights in 4 or 8 bits that are dequantized to the compute dtype in each call, all siblings into one matrix."""

    def __init__(self, kind: str, tensors: Sequence[Tensor], adapters: Adapters) -> None:
        super().__init__(tensors, adapters)
        self.kind = kind

    def weight(self) -> Tensor:
        """The dequantized weights of all siblings, [out, in]."""
        from fxtune.kernels.quantized import unpack

        outs, count = self.adapters.out_features, len(self.tensors) // len(self.adapters.out_features)
        matrix = torch.empty(sum(outs), self.adapters.in_features, dtype=self.adapters.dtype, device=self.a.device)
        for index, into in enumerate(matrix.split(outs)):
            unpack(self.kind, self.tensors[index * count : (index + 1) * count], into)
        return matrix

    def forward(self, operand: Operand, xa: Tensor | None, out: Tensor | None = None) -> Tensor:
        return add_adapter(mm(operand.x, self.weight().t(), out), xa, self.b.t())

    def backward(self, operand: Operand, dyb: Tensor | None, out: Tensor | None = None) -> Tensor:
        return add_adapter(mm(operand.x, self.weight(), out), dyb, self.a)


class Fp8(Base):
    """Weights in fp8. `tensors`: one fp8.Weight for the whole group: four tensors, or two if no transpose is kept.

    Activations are quantized once for all siblings, forward and backward. The adapters' products take the activations
    before quantization, so no trained weight is multiplied in fp8. (One launch for both would be slower.)
    """

    def __init__(self, tensors: Sequence[Tensor], adapters: Adapters) -> None:
        super().__init__(tensors, adapters)
        self.codes, self.scales = tensors[:2]
        self.transpose = tuple(tensors[2:])

    def operand(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        is_gradient = factor is self.b
        columns = self.scales if is_gradient and not self.transpose else None
        return Operand(x, quantize_rows(x, columns=columns)), self.project(x, factor)

    def forward(self, operand: Operand, xa: Tensor | None, out: Tensor | None = None) -> Tensor:
        return add_adapter(self.product(operand, (self.codes, self.scales), out), xa, self.b.t())

    def backward(self, operand: Operand, dyb: Tensor | None, out: Tensor | None = None) -> Tensor:
        return add_adapter(self.product(operand, self.transpose, out), dyb, self.a)

    def product(self, operand: Operand, matrix: tuple[Tensor, ...], out: Tensor | None) -> Tensor:
        """The product with `matrix` (codes, scales); if `matrix` is empty, with the transpose of self.codes."""
        is_bfloat16 = self.adapters.dtype is torch.bfloat16
        into = out if is_bfloat16 else None
        if matrix:
            codes, scales = matrix
            product = scaled_mm(operand.prepared, codes, scales, into)
        else:
            product = times_codes(operand.prepared, self.codes, into)
        if is_bfloat16:
            return product
        return product.to(self.adapters.dtype) if out is None else out.copy_(product)


def add_adapter(
    product: Tensor, narrow: Tensor | None, factor: Tensor, out: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """lora_adapters.add(), or the product alone if `narrow` is None."""
    return product if narrow is None else add(product, narrow, factor, out, residual)


def spaced(like: Tensor, rows: int, width: int) -> Tensor:
    """An uninitialized tensor [rows, width]. On a GPU there is a gap of ALIGN numbers between rows.

    In many models a row without a gap is a multiple of 8 KiB. Programs that read down a column would then hit the same
    memory banks again and again. (On a CPU there is no gap, see Dense.buffer().)
    """
    return like.new_empty(rows, width + ALIGN)[:, :width] if like.is_cuda else like.new_empty(rows, width)
