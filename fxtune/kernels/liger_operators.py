"""Liger's kernels as operators, for compiled code.

torch.compile takes a Triton kernel into its graph and analyses which inputs it writes. If it cannot tell (torch 2.11
fails at Liger 0.8.5's RMSNorm), it assumes that the kernel writes every input, weights included, and only warns: the
logits of the next forward pass are wrong. An operator is opaque to that analysis. For gated products this costs a copy
of gate and up in the backward pass, because Liger's kernel overwrites them.

In eager mode Liger's own autograd functions run (techniques/liger/forwards.py), which overwrite tensors that are not
needed any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxtune.upstream import liger


@torch.library.custom_op("fxtune::liger_rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    """x / rms(x) * (offset + weight) over the last dimension, in x's dtype, and 1 / rms(x), float32 [rows], which the
    backward pass needs.

    `casting`: "llama" (rounded before the product with the weight) or "gemma" (everything in float32).
    """
    from liger_kernel.ops import rms_norm_forward

    y, _, scale, *_ = rms_norm_forward(x.contiguous(), weight, eps, offset, casting, None)
    return y, scale


@rms_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(_rows(x), dtype=torch.float32)


@torch.library.custom_op("fxtune::liger_rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, casting: str, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); the second is empty unless `need_dweight`."""
    rows = x.contiguous().view(-1, x.shape[-1])
    dx, dweight = liger.rms_norm_backward(dy.contiguous(), rows, weight, scale, offset, casting, need_dweight)
    return dx, weight.new_empty(0) if dweight is None else dweight


@_rms_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape if rest[-1] else 0)


@torch.library.custom_op("fxtune::liger_layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm over the last dimension, in x's dtype, and for the backward pass mean and 1 / standard deviation,
    float32 [rows].
    """
    from liger_kernel.ops import layer_norm_forward

    y, _, mean, scale, *_ = layer_norm_forward(x.contiguous(), weight, bias, eps)
    return y, mean, scale


@layer_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = (x.new_empty(_rows(x), dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, scale


@torch.library.custom_op("fxtune::liger_layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    scale: Tensor,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias); the second is empty unless `need_dweight`, the third unless `need_dbias`."""
    from liger_kernel.ops import layer_norm_backward

    x = x.contiguous()
    dx, dweight, dbias = layer_norm_backward(
        dy.contiguous(), x.view(-1, x.shape[-1]), weight, bias, mean, scale, needs_dw=need_dweight, needs_db=need_dbias
    )
    found = ((dweight, weight), (dbias, bias))
    return dx, *(like.new_empty(0) if one is None else one for one, like in found)


@_layer_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = (
        one.new_empty(one.shape if need else 0) for one, need in zip((weight, bias), rest[-2:], strict=True)
    )
    return x.new_empty(x.shape), dweight, dbias


@torch.library.custom_op("fxtune::liger_gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up of two tensors of one shape; `kind`: "swiglu" (SiLU) or "geglu" (GELU's tanh form)."""
    from liger_kernel import ops

    forward = ops.swiglu_forward if kind == "swiglu" else ops.geglu_forward
    product: Tensor = forward(gate.contiguous(), up.contiguous())[2]
    return product


@gated.register_fake
def _(gate: Tensor, *_: Any) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("fxtune::liger_gated_backward", mutates_args=())
def _gated_backward(dp: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    from liger_kernel import ops

    backward = ops.swiglu_backward if kind == "swiglu" else ops.geglu_backward
    gate, up = (one.clone(memory_format=torch.contiguous_format) for one in (gate, up))
    backward(gate, up, dp.contiguous())  # overwrites both with their gradients
    return gate, up


@_gated_backward.register_fake
def _(dp: Tensor, gate: Tensor, up: Tensor, _: str) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _rms_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.offset, ctx.casting = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _rms_gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    need_dweight = ctx.needs_input_grad[1]
    dx, dweight = torch.ops.fxtune.liger_rms_norm_backward(
        dy, *ctx.saved_tensors, ctx.offset, ctx.casting, need_dweight
    )
    return dx, dweight if need_dweight else None, None, None, None


def _layer_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _layer_gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    need_dweight, need_dbias = ctx.needs_input_grad[1:3]
    dx, dweight, dbias = torch.ops.fxtune.liger_layer_norm_backward(dy, *ctx.saved_tensors, need_dweight, need_dbias)
    return dx, dweight if need_dweight else None, dbias if need_dbias else None, None


def _gated_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gated_gradients(ctx: Any, dp: Tensor) -> tuple[Any, ...]:
    return *torch.ops.fxtune.liger_gated_backward(dp, *ctx.saved_tensors, ctx.kind), None


rms_norm.register_autograd(_rms_gradients, setup_context=_rms_setup)
layer_norm.register_autograd(_layer_gradients, setup_context=_layer_setup)
gated.register_autograd(_gated_gradients, setup_context=_gated_setup)
