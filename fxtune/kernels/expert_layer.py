"""Registers an operator that computes the experts of a layer, with its backward pass (gated_experts.py and
fp8_experts.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxtune.kernels.swiglu import Activation


class Layer(NamedTuple):
    """The arguments of an operator that computes the experts of a layer, in order."""

    hidden: Tensor
    weights: Tensor
    order: Tensor
    back: Tensor
    ends: Tensor
    first: Sequence[Tensor]
    last: Sequence[Tensor]
    a1: Tensor
    b1: Tensor
    a2: Tensor
    b2: Tensor
    bias1: Tensor | None
    bias2: Tensor | None
    act: str
    alpha: float
    limit: float
    shift: float
    interleaved: bool
    gemm: str
    stored: str
    keep: bool
    trained: bool

    @property
    def activation(self) -> Activation:
        return Activation(self.act, self.alpha, self.limit, self.shift, self.interleaved)

    @property
    def token(self) -> Tensor:
        """[rows]: the token of each row."""
        return self.order // self.weights.shape[1]

    @property
    def row_weights(self) -> Tensor:
        """[rows, 1]: the weight of each row."""
        return self.weights.flatten().index_select(0, self.order).unsqueeze(1)


_TENSORS = (
    "Tensor hidden, Tensor weights, Tensor order, Tensor back, Tensor ends, Tensor[] first, Tensor[] last, Tensor a1, "
    "Tensor b1, Tensor a2, Tensor b2, Tensor? bias1, Tensor? bias2"
)
_OPTIONS = (
    "str act, float alpha, float limit, float shift, bool interleaved, str gemm, str stored, bool keep, bool trained"
)
_FOUR, _SEVEN = (f"({', '.join(types)})" for types in (["Tensor"] * 4, [*["Tensor"] * 6, "Tensor[]"]))
_FACTORS = 6
"""The tensors of adapters and biases, which follow `last`."""


def register(
    name: str,
    forward: Callable[[Layer], tuple[Tensor, ...]],
    backward: Callable[[Layer, Tensor, Tensor, Tensor, Tensor], tuple[Any, ...]],
) -> Any:
    """Register and return the operator fxtune::`name` of a Layer's arguments, with its backward pass and its FLOPs.

    Args:
        forward: returns the output and three results for the backward pass: g without its adapter [rows, 2 width], r1
            and r2 [rows, r]. Without `keep` the backward pass does not read the three.
        backward: takes the layer, the gradient of the output, and the three results. Returns the gradients of hidden,
            weights, a1, b1, a2 and b2, and the list of the gradients of trained matrices.
    """
    run = torch.library.custom_op(
        f"fxtune::{name}",
        lambda *inputs: _kept(forward, Layer(*inputs)),
        mutates_args=(),
        schema=f"({_TENSORS}, {_OPTIONS}) -> {_FOUR}",
    )
    run_backward = torch.library.custom_op(
        f"fxtune::{name}_backward",
        lambda dout, *inputs: backward(Layer(*inputs[:-3]), dout, *inputs[-3:]),
        mutates_args=(),
        schema=f"(Tensor dout, {_TENSORS}, {_OPTIONS}, Tensor g, Tensor r1, Tensor r2) -> {_SEVEN}",
    )

    def shapes(*inputs: Any) -> tuple[Tensor, ...]:
        layer = Layer(*inputs)
        sizes = layer.b1.shape[1], layer.a1.shape[1], layer.a2.shape[1]
        rows = layer.order.shape[0] if layer.keep else 0
        return torch.empty_like(layer.hidden), *(layer.hidden.new_empty(rows, size) for size in sizes)

    def shapes_backward(dout: Tensor, *inputs: Any) -> tuple[Any, ...]:
        layer = Layer(*inputs[:-3])
        whole = [layer.hidden, layer.weights, layer.a1, layer.b1, layer.a2, layer.b2]
        matrices = [*layer.first, *layer.last] if layer.trained else []
        return *map(torch.empty_like, whole), [matrix.new_empty(matrix.shape) for matrix in matrices]

    def differentiate(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        frozen = [None] * ctx.parts
        if dout is None:
            return *[None] * 5, frozen, frozen, *[None] * (_FACTORS + len(ctx.options))
        saved = ctx.saved_tensors  # read only once: checkpointing hands out each tensor once
        inputs, factors, others = saved[:5], saved[5:11], list(saved[11:])
        results = [others.pop(0) if ctx.keep else saved[0].new_empty(0) for _ in range(3)]
        matrices = others
        layer = *inputs, matrices[: ctx.parts], matrices[ctx.parts :], *factors, *ctx.options
        dhidden, dweights, *dadapters, dmatrices = run_backward(dout.contiguous(), *layer, *results)
        dfirst, dlast = ([dmatrix] for dmatrix in dmatrices) if dmatrices else (frozen, frozen)
        return dhidden, dweights, None, None, None, dfirst, dlast, *dadapters, None, None, *[None] * len(ctx.options)

    run.register_fake(shapes)
    run_backward.register_fake(shapes_backward)
    run.register_autograd(differentiate, setup_context=_setup)
    register_flop_formula(getattr(torch.ops.fxtune, name))(_flops)
    register_flop_formula(getattr(torch.ops.fxtune, f"{name}_backward"))(_backward_flops)
    return run


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    layer = Layer(*inputs)
    ctx.options, ctx.parts, ctx.keep = inputs[7 + _FACTORS :], len(layer.first), layer.keep
    # Without `keep` only inputs are saved: a compiled recomputation needs no result of this operator and skips it.
    results = output[1:] if layer.keep else ()
    ctx.save_for_backward(*inputs[:5], *inputs[7 : 7 + _FACTORS], *results, *layer.first, *layer.last)
    ctx.set_materialize_grads(False)


def _kept(forward: Callable[[Layer], tuple[Tensor, ...]], layer: Layer) -> tuple[Tensor, ...]:
    """The results of `forward` that the layer keeps; the others are empty."""
    out, *results = forward(layer)
    return out, *(results if layer.keep else (result.new_empty(0, result.shape[1]) for result in results))


def _flops(*inputs: Any, **_: Any) -> int:
    return int(2 * inputs[2][0] * sum(_sizes(*inputs[7:11])))


def _backward_flops(dout: Any, *inputs: Any, **_: Any) -> int:
    first, last, *adapters = _sizes(*inputs[7:11])
    keep, trained = inputs[-5:-3]
    again = 0 if keep else first
    return int(2 * inputs[2][0] * ((1 + trained) * (first + last) + again + 2 * sum(adapters)))


def _sizes(a1: Any, b1: Any, a2: Any, b2: Any) -> list[int]:
    """How many numbers each matrix and each adapter matrix of one expert has, from the adapters' shapes."""
    return [b1[1] * a1[2], b2[1] * a2[2], *(matrix[1] * matrix[2] for matrix in (a1, b1, a2, b2))]
