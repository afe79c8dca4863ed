"""The forwards of transformers' modules by Liger's kernels, and the classes that carry them.

A module of a model gets a class of its own: a subclass of what it was, with one of these as its forward. All layers share the
class and the function, so they share a compiled graph too: each is made once for its arguments and the kernel's function.

RoPE is our own: Liger's overwrites its inputs, which autograd does not see (they may be results that checkpointing has saved,
and would be turned once more), so that it would have to get copies, and torch.compile cannot trace it. The gated products
overwrite their inputs too, in the backward pass, when nobody needs them any more. In compiled code operators of our own run the
same kernels (liger_operators.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fxtune.kernels import liger_operators as operators
from fxtune.kernels.rotary import apply_rotary, seeing

Forward = Callable[..., Any]


@functools.cache
def variant(kind: Any, name: str, forward: Forward) -> Any:
    """The subclass of `kind` with this forward; `liger` says by which operation."""
    return type(f"Liger{kind.__name__}", (kind,), {"forward": forward, "liger": name, "__module__": kind.__module__})


def rms_norm(eps: float, offset: float, casting: str, in_place: bool) -> Forward:
    return _rms_norm(_function("LigerRMSNormFunction"), eps, offset, casting, in_place)


def layer_norm(eps: float) -> Forward:
    return _layer_norm(_function("LigerLayerNormFunction"), eps)


def swiglu() -> Forward:
    return _gated(_function("LigerSiLUMulFunction"), "swiglu")


def geglu() -> Forward:
    return _gated(_function("LigerGELUMulFunction"), "geglu")


def swiglu_at_once() -> Forward:
    """For an MLP with gate and up in one linear (Phi 3): the kernel reads both halves where they are."""
    return _swiglu_at_once(_function("LigerFusedGateUpSiLUMulFunction"))


def geglu_at_once() -> Forward:
    return _geglu_at_once(_function("LigerGELUMulFunction"))


def rotated(attention: Any) -> Forward:
    """The forward of `attention`, the same code, which finds our own RoPE (rotary.py) where it looks for its module's."""
    forward: Forward = seeing(attention.forward, apply_rotary, attention.__name__)
    return forward


def _function(name: str) -> Any:
    from liger_kernel import ops

    return getattr(ops, name)


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
def _swiglu_at_once(function: Any) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        both = self.gate_up_proj(hidden_states)
        if torch.compiler.is_compiling():
            return self.down_proj(operators.gated(*both.chunk(2, dim=-1), "swiglu"))
        # As a matrix: whatever shape the function is given, the gradient that it returns is one (0.8.5).
        return self.down_proj(function.apply(both.flatten(0, -2)).unflatten(0, both.shape[:-1]))

    return forward


@functools.cache
def _geglu_at_once(function: Any) -> Forward:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        return self.down_proj(_product(function, "geglu", *self.gate_up_proj(hidden_states).chunk(2, dim=-1)))

    return forward


def _product(function: Any, kind: str, gate: torch.Tensor, up: torch.Tensor) -> Any:
    """act(gate) * up. Gate and up are nobody's when it returns: without a backward pass their memory is free."""
    if torch.compiler.is_compiling():
        return operators.gated(gate, up, kind)
    return function.apply(gate, up, *((1.0, 1.0) if kind == "swiglu" else ()))  # its two factors
