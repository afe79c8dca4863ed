"""Forward functions that run Liger's kernels, and the classes that carry them.

A module of a model gets its own class: a subclass of its former class with one of these functions as its forward. All
layers share the class and the function, so they share a compiled graph.

RoPE is fxtune's own kernel: Liger's overwrites its inputs, which checkpointing may have saved, and torch.compile
cannot trace it. Compiled code runs Liger's kernels through operators (kernels/liger_operators.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxtune.kernels import liger_operators as operators
from fxtune.kernels.rotary import apply_rotary
from fxtune.upstream.transformers import with_rotation

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Family:
    """The norms and MLPs of a family of models. Source: liger_kernel.transformers.monkey_patch, version 0.8.5."""

    norms: int
    """The number of norms in a layer, including those of queries and keys."""
    offset: float = 0.0
    """Added to a norm's weight."""
    casting: str = "llama"
    """`llama`: rounded before the weight multiplies; `gemma`: all in float32."""
    in_place: bool = True
    """Whether a norm's backward pass may overwrite the incoming gradient. It may not if a residual also reads it."""
    layer_norm: bool = False
    gated: bool = True
    """Whether the MLP is down(act(gate(x)) * up(x))."""
    heads_normed: bool = False
    """Whether queries and keys are normed between their projections and RoPE."""


def forward_of(name: str, module: nn.Module, family: Family) -> Forward | None:
    """The forward that runs operation `name` of `module` by its kernel, or None if the module has no such
    operation."""
    kind: Any = type(module)
    if name == "rms_norm" and kind.__name__.endswith("RMSNorm"):
        eps: Any = getattr(module, "variance_epsilon", None) or module.eps
        return _rms_norm(_liger("RMSNorm"), float(eps), family.offset, family.casting, family.in_place)
    if name == "layer_norm" and kind is nn.LayerNorm and module.weight is not None and module.bias is not None:
        return _layer_norm(_liger("LayerNorm"), float(module.eps))  # type: ignore[arg-type]
    if name in ("swiglu", "geglu"):
        product = "SiLUMul" if name == "swiglu" else "GELUMul"
        if hasattr(module, "gate_up_proj"):  # gate and up in one linear (Phi 3)
            return _joint_swiglu(_liger("FusedGateUpSiLUMul")) if name == "swiglu" else _joint_geglu(_liger(product))
        if hasattr(module, "gate_proj"):
            return _gated(_liger(product), name)
    if name == "rope" and is_attention(module):
        # The attention's own code, with fxtune's RoPE in place of its module's function.
        forward: Forward = with_rotation(kind.forward, apply_rotary, kind)
        return forward
    return None


def is_attention(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Attention")


@functools.cache
def subclass(kind: Any, name: str, forward: Forward) -> Any:
    """The subclass of `kind` with this forward. Its attribute `liger` is the operation's name."""
    return type(f"Liger{kind.__name__}", (kind,), {"forward": forward, "liger": name, "__module__": kind.__module__})


def _liger(name: str) -> Any:
    from liger_kernel import ops

    return getattr(ops, f"Liger{name}Function")


@functools.cache
def _rms_norm(function: Any, eps: float, offset: float, casting: str, in_place: bool) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return operators.rms_norm(hidden_states, self.weight, eps, offset, casting)[0]
        return function.apply(hidden_states, self.weight, eps, offset, casting, in_place, None)

    return forward


@functools.cache
def _layer_norm(function: Any, eps: float) -> Forward:
    def forward(self: Any, input: torch.Tensor) -> Any:
        if torch.compiler.is_compiling():
            return operators.layer_norm(input, self.weight, self.bias, eps)[0]
        return function.apply(input, self.weight, self.bias, eps)

    return forward


@functools.cache
def _gated(function: Any, kind: str) -> Forward:
    def forward(self: Any, x: torch.Tensor) -> Any:
        return self.down_proj(_product(function, kind, self.gate_proj(x), self.up_proj(x)))

    return forward


@functools.cache
def _joint_swiglu(function: Any) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        both = self.gate_up_proj(hidden_states)
        if torch.compiler.is_compiling():
            return self.down_proj(operators.gated(*both.chunk(2, dim=-1), "swiglu"))
        # Liger 0.8.5 returns the gradient as a matrix, whatever the shape of its input.
        return self.down_proj(function.apply(both.flatten(0, -2)).unflatten(0, both.shape[:-1]))

    return forward


@functools.cache
def _joint_geglu(function: Any) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        return self.down_proj(_product(function, "geglu", *self.gate_up_proj(hidden_states).chunk(2, dim=-1)))

    return forward


def _product(function: Any, kind: str, gate: torch.Tensor, up: torch.Tensor) -> Any:
    """act(gate) * up. The caller holds neither gate nor up, so without a backward pass their memory is free
    afterwards."""
    if torch.compiler.is_compiling():
        return operators.gated(gate, up, kind)
    return function.apply(gate, up, *((1.0, 1.0) if kind == "swiglu" else ()))  # SwiGLU's has two scale factors
