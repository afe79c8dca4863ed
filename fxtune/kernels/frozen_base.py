"""The frozen half of fused LoRA: what a group of linears multiplies by, for each way in which its weights may be stored.

A group is one linear, or siblings that read the same input (q, k, v; gate, up). W [out, in] are its weights stacked by rows.
`A` [R, in] stacks the siblings' lora_A, `B` [out, R] has scaling * lora_B of each sibling in its own rows and columns, and both
are in the compute dtype, made from the float32 parameters anew in each call. R is the sum of the ranks, padded with zeros to
a multiple of ALIGN. A bias of the frozen linears is one more column of B, opposite a column of ones in x A^T.

What a kind of base does (`Base`; fused_lora.py calls nothing else of it). For a group whose result is read as it is:

    whole(x, residual)              -> x W^T + xa B^T + residual, xa = x A^T       [rows, out] and [rows, R]
    whole_backward(dy)              -> dy W + dyb A, dyb = dy B                    [rows, in] and [rows, R]
    space(rows)                     -> where an x can be put that whole() reads without a copy
    projected(x, A)                 -> x A^T alone

Around a gated activation, whose kernels add the adapters' second half in passing (kernels/gated.py):

    apart(x)                        -> x W^T, x A^T
    apart_backward(dy)              -> dy W, dy B

and all of these come from three that a kind defines:

    operand(x, A)                   -> Operand, x A^T       take activations in, and multiply them by the adapters' first half
    forward(operand, xa)            -> x W^T + xa B^T       without the second half where xa is None
    backward(operand, dyb)          -> dy W + dyb A         likewise; of operand(dy, B)

An `Operand` is what a kind makes of activations before it multiplies them: `.x`, the activations themselves in the compute
dtype, and whatever else it wants to carry to forward() and backward() (a padded buffer, an fp8 copy with its scales). That
is where a new kind comes in: subclass Base, override operand (by default nothing is quantised), forward and backward, and name
it in fused_lora.base_of(). Its tensors are whatever flat list its own module makes of a group.

kind            tensors                                     the product
dense, dense/cute   [M]: W beside room for A, B, augment()  one matmul, see below
nf4/..., int8/...   quantized.packed() of each sibling      with W dequantised for the call, B added to y afterwards
fp8             lora_fp8.py                                 two fp8 operands, B added to y afterwards

M = [[W, B], [A, 0]], [out + R, in + R]. [x | x A^T] M[:out]^T is x W^T + (x A^T) B^T, added up in float32 and rounded once, and
[dy | dy B] M[:, :in] is dx. That one rounding is why results are always made so, though it takes a copy of an x that has no
room beside its rows, which is more than a pass over y that adds (x A^T) B^T where x is the wider one: a result in bfloat16 has
no bits for what an adapter adds in its first steps, and a sum of the two loses it (or, with the residual stream in it, has it
decide ties, so that it acts by more than its size). Where second halves come in passing, in float32 too, the first ones are
what rides along: x M[:, :in]^T is [x W^T | x A^T], and dy M[:out] is [dy W | dy B]. A product of their own would read x once
more, and in front of a matmul over both it is a copy of x; what a matmul's last tile computes beyond W's columns is free.
Gradients take dy B so, too, where dy is no narrower than dx, and (dy B) A is added in a pass: but where dy has room, or there
is a bias. The frozen parameters of the model are views of M (weight_views), so nothing is stored twice. Writing A and B into M
is no effect that anyone can see: nobody reads them but a call that has just written them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from fxtune.kernels.lora_adapters import ALIGN, Adapters, add, pack, padded_rank, project
from fxtune.kernels.matmul import CUBLAS, CUTE, mm

DENSE = "dense"
DENSE_CUTE = f"{DENSE}/{CUTE}"
"""`dense` whose large products are quack's (kernels/matmul.py). Who multiplies is said by the kind, which is an argument of the
operators: a compiled graph has it as a constant of each call, and two models of one process may differ in it."""


def is_dense(kind: str) -> bool:
    """Whether a group of this kind has its weights in 16 or 32 bits."""
    return kind in (DENSE, DENSE_CUTE)


@torch.no_grad()
def augment(weights: Sequence[Tensor], ranks: Sequence[int], bias: bool = False) -> Tensor:
    """M of kind `dense` for siblings' weights [out_i, in], of their dtype and device; A and B are zero in it."""
    out, inner, width = sum(len(one) for one in weights), weights[0].shape[1], padded_rank(ranks, bias)
    made = weights[0].new_zeros(out + width, inner + width)
    for into, weight in zip(weight_views(made, [len(one) for one in weights], inner), weights, strict=True):
        into.copy_(weight)
    return made


def weight_views(made: Tensor, outs: Sequence[int], inner: int) -> list[Tensor]:
    """The siblings' weights [out_i, in] inside of augment()'s result: views, which a model may have as its parameters."""
    return list(made[: sum(outs), :inner].split(list(outs)))


class Operand(NamedTuple):
    """Activations as a kind of base multiplies them."""

    x: Tensor
    """[rows, width] in the compute dtype; rows may lie apart."""
    more: Any = None
    """Whatever else the kind needs in forward() or backward()."""


class Base:
    """A group's frozen weights of one kind, with its adapters packed: made for one call of an operator."""

    a: Tensor
    """[R, in], compute dtype."""
    b: Tensor
    """[out, R], compute dtype, scaled; with the bias in column sum(ranks)."""

    def __init__(self, tensors: Sequence[Tensor], adapters: Adapters) -> None:
        self.adapters, self.tensors = adapters, tensors
        first = adapters.a[0]
        self.a, self.b = (
            torch.empty(rows, columns, dtype=adapters.dtype, device=first.device)
            for rows, columns in ((adapters.width, adapters.inner), (sum(adapters.outs), adapters.width))
        )
        pack(adapters, self.a, self.b)

    def operand(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        """`x` [rows, in or out]; `factor` is self.a.t() or self.b: what to multiply x by, [in or out, R]."""
        return Operand(x), self.projected(x, factor)

    def beside(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        """operand() of an `x` between whose rows may be room that is nobody's: the kind may write there."""
        return self.operand(x, factor)

    def forward(self, operand: Operand, xa: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        """x W^T + xa B^T, [rows, out] in the compute dtype, written to `out` where it is given; without B where xa is None."""
        raise NotImplementedError

    def backward(self, operand: Operand, dyb: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        """dy W + dyb A, [rows, in] in the compute dtype, written to `out` where it is given; without A where dyb is None."""
        raise NotImplementedError

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x W^T and x A^T, for `x` [rows, in] with contiguous rows; rows of the first may lie apart."""
        operand, xa = self.operand(x, self.a.t())
        return self.forward(operand, None), xa

    def apart_backward(self, dy: Tensor, out: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """dy W and dy B, for `dy` [rows, out]; the first in `out` [rows, in], where a kind has a use for it."""
        operand, dyb = self.operand(dy, self.b)
        return self.backward(operand, None, out), dyb

    def space(self, rows: int) -> Tensor:
        """Where an x [rows, in] may be put for whole() to read with `room`."""
        return spaced(self.a, rows, self.adapters.inner)

    def whole(
        self, x: Tensor, residual: Optional[Tensor] = None, out: Optional[Tensor] = None, room: bool = False
    ) -> tuple[Tensor, Tensor]:
        """x W^T + xa B^T + residual, [rows, out], written to `out` where it is given, and xa. `room`: as for whole_backward()."""
        operand, xa = (self.beside if room else self.operand)(x, self.a.t())
        return added(self.forward(operand, None, out), xa, self.b.t(), residual=residual), xa

    def whole_backward(self, dy: Tensor, room: bool) -> tuple[Tensor, Tensor]:
        """dy W + dyb A, [rows, in], and dyb. `room`: between dy's rows may be some that is nobody's."""
        operand, dyb = (self.beside if room else self.operand)(dy, self.b)
        return self.backward(operand, dyb), dyb

    def projected(
        self, x: Tensor, factor: Tensor, left: Optional[Tensor] = None, right: Optional[Tensor] = None
    ) -> Tensor:
        """x factor, [rows, R], with a column of ones opposite the bias (of zeros in dy B); `left`, `right`: as in project()."""
        return project(x, factor, left, right, *self.ones(factor))

    def ones(self, factor: Tensor) -> tuple[Optional[int], float]:
        """The column of x factor that is opposite the bias, and what stands in it."""
        return sum(self.adapters.ranks) if self.adapters.bias else None, 0.0 if factor is self.b else 1.0


class Dense(Base):
    """Weights in 16 or 32 bits. Where they are not of the compute dtype they are cast, anew in each call."""

    def __init__(self, tensors: Sequence[Tensor], adapters: Adapters, kind: str = DENSE) -> None:
        (made,) = tensors
        self.adapters, self.by = adapters, CUTE if kind == DENSE_CUTE else CUBLAS
        self.made = made = made.data.to(
            adapters.dtype
        )  # .data: these writes are no news to autograd (see the module's text)
        self.out, self.inner = sum(adapters.outs), adapters.inner
        assert made.shape == (self.out + adapters.width, self.inner + adapters.width), (made.shape, adapters.ranks)
        self.a, self.b = made[self.out :, : self.inner], made[: self.out, self.inner :]
        pack(adapters, self.a, self.b)

    def room(self, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """A buffer [rows, width + R], its left and its right part."""
        buffer = torch.empty(rows, width + self.adapters.width, dtype=self.made.dtype, device=self.made.device)
        left, right = buffer[:, :width], buffer[:, width:]
        if (
            not buffer.is_cuda
        ):  # oneDNN's bfloat16 matmul reads what lies between two rows, and nan times its zeros is nan
            right.zero_()
        return buffer, left, right

    def operand(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        buffer, left, right = self.room(*x.shape)
        return Operand(x, buffer), self.projected(x, factor, left, right)

    def beside(self, x: Tensor, factor: Tensor) -> tuple[Operand, Tensor]:
        """Where the room is R wide, x is a buffer's left part already. (What lies there is finite on a CPU, see room().)"""
        rows, width = x.shape
        whole = width + self.adapters.width
        ends = (x.storage_offset() + rows * whole) * x.itemsize
        if (x.dtype, x.stride()) != (self.made.dtype, (whole, 1)) or ends > x.untyped_storage().nbytes():
            return self.operand(x, factor)
        buffer = x.as_strided((rows, whole), (whole, 1))
        return Operand(x, buffer), self.projected(x, factor, right=buffer[:, width:])

    def space(self, rows: int) -> Tensor:
        return self.room(rows, self.inner)[1]

    def forward(
        self, operand: Operand, xa: Optional[Tensor], out: Optional[Tensor] = None, residual: Optional[Tensor] = None
    ) -> Tensor:
        return mm(operand.more, self.made[: self.out].t(), out, self.by, residual)

    def backward(self, operand: Operand, dyb: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        return mm(operand.more, self.made[:, : self.inner], out, self.by)

    def whole(
        self, x: Tensor, residual: Optional[Tensor] = None, out: Optional[Tensor] = None, room: bool = False
    ) -> tuple[Tensor, Tensor]:
        operand, xa = (self.beside if room else self.operand)(x, self.a.t())
        return self.forward(operand, xa, out, residual), xa

    def whole_backward(self, dy: Tensor, room: bool) -> tuple[Tensor, Tensor]:
        if room or self.inner > self.out or self.adapters.bias:  # with room there is no copy
            return super().whole_backward(dy, room)
        product, dyb = self.apart_backward(dy)
        return added(product, dyb, self.a, product.new_empty(product.shape)), dyb

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _parted(mm(x, self.made[:, : self.inner].t(), by=self.by), self.out)

    def apart_backward(self, dy: Tensor, out: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        return _parted(mm(dy, self.made[: self.out], by=self.by), self.inner)


def _parted(both: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The wide part of a matmul's result, and the narrow one as a tensor of its own: a view would keep the wide one alive."""
    return both[:, :width], both[:, width:].clone(memory_format=torch.contiguous_format)


class Dequantized(Base):
    """Weights in 4 or 8 bits that are dequantised to the compute dtype in each call, all siblings into one matrix."""

    def __init__(self, kind: str, tensors: Sequence[Tensor], adapters: Adapters) -> None:
        super().__init__(tensors, adapters)
        self.kind = kind

    def weight(self) -> Tensor:
        """[out, in]."""
        from fxtune.kernels.quantized import unpacked

        outs, each = self.adapters.outs, len(self.tensors) // len(self.adapters.outs)
        made = torch.empty(sum(outs), self.adapters.inner, dtype=self.adapters.dtype, device=self.a.device)
        for index, into in enumerate(made.split(outs)):
            unpacked(self.kind, self.tensors[index * each : (index + 1) * each], into)
        return made

    def forward(self, operand: Operand, xa: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        return added(mm(operand.x, self.weight().t(), out), xa, self.b.t())

    def backward(self, operand: Operand, dyb: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
        return added(mm(operand.x, self.weight(), out), dyb, self.a)


def added(
    product: Tensor,
    narrow: Optional[Tensor],
    factor: Tensor,
    out: Optional[Tensor] = None,
    residual: Optional[Tensor] = None,
) -> Tensor:
    """The adapters' product, and `residual`, added in place; or into `out`, which may be the product."""
    return product if narrow is None else add(product, narrow, factor, out, residual)


def spaced(like: Tensor, rows: int, width: int) -> Tensor:
    """Uninitialised, [rows, width], on a GPU with ALIGN numbers between rows: where a row's size is a multiple of 8 KiB, as many
    models' are, programs that go down columns meet in the same banks of memory. (Not on a CPU, see room().)
    """
    return like.new_empty(rows, width + ALIGN)[:, :width] if like.is_cuda else like.new_empty(rows, width)
