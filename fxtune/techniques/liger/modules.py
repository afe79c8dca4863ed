"""Replaces a model's norms and gated MLPs by Liger's. They compute with the model's own parameters.

transformers calls RoPE as a function inside an attention's forward. So the attention gets a subclass whose forward
calls fxtune's kernel instead of this function (with_rotation()). Liger's RoPE is not used: it overwrites its inputs,
and checkpointing may have saved these inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.kernels.rotary import apply_rotary
from fxtune.models.replacement import InPlaceOf
from fxtune.upstream.transformers import rotation_of, with_rotation

_OPERATIONS = {
    "LigerRMSNorm": "rms_norm",
    "LigerLayerNorm": "layer_norm",
    "LigerSwiGLUMLP": "swiglu",
    "LigerPhi3SwiGLUMLP": "swiglu",
    "LigerGEGLUMLP": "geglu",
}
"""Name of Liger's class -> name of the operation."""


@dataclass(frozen=True)
class Family:
    """The norms and MLPs of a family of models. Source: liger_kernel.transformers.monkey_patch, version 0.8.5."""

    norms: int
    """The number of norms in a layer, including the norms of queries and keys."""
    offset: float = 0.0
    """A number that is added to a norm's weight."""
    casting: str = "llama"
    """`llama`: a norm rounds its result before it multiplies by the weight. `gemma`: it computes all in float32."""
    in_place: bool = True
    """Whether a norm's backward pass may overwrite the incoming gradient. It may not if a residual also reads it."""
    layer_norm: bool = False
    gated: bool = True
    """Whether the MLP is down(act(gate(x)) * up(x))."""
    joint: bool = False
    """Whether gate and up are one linear."""
    heads_normed: bool = False
    """Whether queries and keys are normed between their projections and RoPE."""


def replace_modules(root: nn.Module, name: str, family: Family) -> None:
    """Replace the modules of `root` that compute operation `name` by modules that call its kernel."""
    for parent in list(root.modules()):
        if name == "rope" and is_attention(parent):
            kind: Any = type(parent)
            parent.__class__ = _with_forward(kind, with_rotation(kind.forward, apply_rotary))
        for child, module in list(parent.named_children()):
            if (replacement := _module_of(name, module, family)) is not None:
                setattr(parent, child, replacement.train(module.training))


def operation_of(module: nn.Module) -> str | None:
    """The operation for which replace_modules() gave this module a kernel; None if it gave none."""
    while isinstance(module, InPlaceOf):
        module = module.replaced
    if rotation_of(type(module)) is apply_rotary:
        return "rope"
    return _OPERATIONS.get(type(module).__name__)


def is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")


def _module_of(name: str, module: nn.Module, family: Family) -> nn.Module | None:
    """Liger's module with the parameters of `module`, or None if `module` does not compute operation `name`."""
    from liger_kernel import transformers as liger

    title, children = type(module).__name__, dict(module.named_children())
    own: Any
    if name == "rms_norm" and title.endswith("RMSNorm") and operation_of(module) is None:
        eps: Any = getattr(module, "variance_epsilon", None) or module.eps
        own = liger.LigerRMSNorm(1, float(eps), family.offset, family.casting, in_place=family.in_place)
        own.weight = module.weight
        return own
    if name == "layer_norm" and type(module) is nn.LayerNorm and module.bias is not None:
        own = liger.LigerLayerNorm(1, module.eps, bias=True, impl="nvidia-triton")
        own.weight, own.bias = module.weight, module.bias
        return own
    if name == "swiglu" and "gate_up_proj" in children:
        kind = liger.LigerPhi3SwiGLUMLP
    elif name in ("swiglu", "geglu") and "gate_proj" in children:
        kind = liger.LigerSwiGLUMLP if name == "swiglu" else liger.LigerGEGLUMLP
    else:
        return None
    with torch.device("meta"):
        own = kind(module.config)
    for child, layer in children.items():
        setattr(own, child, layer)
    return own


@functools.cache
def _with_forward(kind: Any, forward: Any) -> Any:
    """The subclass of `kind` with this forward. All layers share the subclass, so they share a compiled graph."""
    return type(f"Liger{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})
