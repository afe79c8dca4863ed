"""The experts of a mixture whose frozen weights are in fp8 (kernels/fp8_experts.py).

transformers keeps the experts of a layer as two tensors, `gate_up_proj` [experts, 2 width, d] and `down_proj`
[experts, d, width]. Here the parameters of these names hold the codes, as uint8, because peft would give adapters the
dtype of a floating-point weight; scales and transposes are buffers beside them. The module stays the same object, with
a subclass of its class, so peft's names, saving and routing do not change. It runs as one operator, with or without
adapters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxtune.kernels import fp8_experts
from fxtune.techniques.lora.experts import FIRST, LAST, follows_interface, one_operator, run_experts, run_grouped

TENSORS = (FIRST[0], LAST)
PARTS = ("scales", "back", "back_scales")
"""The ends of its buffers' names: the fields of fp8_experts.Weights after the codes."""
MULTIPLE = 16
"""Both sizes of an expert's matrices are multiples of this."""
SMALL = 2**24
"""Where experts are in fp8 and all other linears have fewer weights, these stay in 16 bits: beside experts they take
hardly any memory, and to quantize their input and to add their adapter takes about as long as the faster product saves
(by calculation)."""


def experts_of(model: nn.Module) -> Iterator[Any]:
    """The modules that hold all experts of a layer."""
    return (module for module in model.modules() if follows_interface(module))


def obstacle(experts: Any) -> str | None:
    """Why the weights of these experts cannot be in fp8, None if they can."""
    if experts.has_bias or experts.is_transposed or one_operator(experts) is None:
        return f"{type(experts).__name__} has biases or another layout, or does more than down(act(gate) * up)"
    sizes = sorted({size for name in TENSORS for size in getattr(experts, name).shape[1:]})
    if odd := [size for size in sizes if size % MULTIPLE]:
        return f"products in fp8 take sizes of a multiple of {MULTIPLE}, and experts have one of {odd[0]}"
    return None


@torch.no_grad()
def quantize_experts(experts: Any, compute: torch.dtype, device: torch.device, transpose: bool) -> float:
    """Store the weights of `experts` in fp8 on `device`, in place. Returns |dequantized - weight| / |weight| of the
    first expert's down_proj. `compute`: the dtype of everything else that they compute on a CPU; on a GPU that is
    bfloat16. `transpose`: see fp8_experts.Weights."""
    act, error = one_operator(experts), 0.0
    for name in TENSORS:
        weight = getattr(experts, name).detach().to(device)
        made = fp8_experts.quantize_experts(weight, transpose)
        first = fp8_experts.dequantize_experts(made.codes[:1], made.scales[:1], torch.float32)[0]
        error = ((first - weight[0].float()).norm() / weight[0].float().norm()).item()
        del weight
        setattr(experts, name, nn.Parameter(made.codes, requires_grad=False))
        for part, tensor in zip(PARTS, made[1:], strict=True):
            if tensor is not None:
                experts.register_buffer(f"{name}_{part}", tensor, persistent=False)
    experts.compute_dtype, experts.expert_act = compute, act
    kind: Any = type(experts)
    experts.__class__ = _fp8_class(kind)
    return error


def in_fp8(module: nn.Module) -> bool:
    """Whether `module` is one that quantize_experts() changed."""
    return hasattr(module, "fp8_weights")


def stored_bytes(experts: Any) -> int:
    """Bytes of the weights of fp8 experts, scales included."""
    return sum(tensor.nbytes for weights in experts.fp8_weights() for tensor in weights if tensor is not None)


@functools.cache
def _fp8_class(kind: Any) -> Any:
    def weights(self: Any) -> tuple[fp8_experts.Weights, fp8_experts.Weights]:
        first: Any = [getattr(self, f"{TENSORS[0]}_{part}", None) for part in PARTS]
        last: Any = [getattr(self, f"{TENSORS[1]}_{part}", None) for part in PARTS]
        return fp8_experts.Weights(self.gate_up_proj, *first), fp8_experts.Weights(self.down_proj, *last)

    def forward(self: Any, hidden: Tensor, index: Tensor, router_weights: Tensor) -> Tensor:
        return run_experts(self, {}, hidden, index, router_weights)

    own_names = {
        "forward": forward,
        "fp8_weights": weights,
        "run_grouped": staticmethod(run_grouped),
        "__module__": kind.__module__,
    }
    return type(f"Fp8{kind.__name__}", (kind,), own_names)
