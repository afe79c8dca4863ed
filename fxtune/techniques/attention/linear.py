"""Runs the linear attention and the short convolutions of transformers' hybrid models as operators that keep packed
documents apart (kernels/linear_attention.py, short_convolution.py).

The layers of transformers' hybrid families call module functions of the same few names, and hand them the keyword
arguments of the model's forward pass. attach() lets the layers of one model call fxtune's functions instead. A call
with DOCUMENTS among its arguments runs the operator; any other call (generation) runs transformers' own function.

    causal_conv1d_fn                    the convolution over a few tokens of each channel
    torch_chunk_gated_delta_rule        Qwen3-Next, Qwen3.5, OLMo hybrid
    chunk_kimi_delta_attention          Kimi Linear, Bailing hybrid
    mamba2_chunk_scan                   Mamba-2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2
    mamba2_split_conv1d_scan_combined   all of Mamba-2's layer in one kernel, which reads the weight of `out_proj` past
                                        its adapters: never taken
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.kernels.linear_attention import linear_attention
from fxtune.kernels.short_convolution import short_convolution
from fxtune.techniques.attention.recurrent import mixers
from fxtune.upstream.transformers import with_operators

DOCUMENTS = "document_chunks"
"""The argument of a forward pass with document_chunks() of the batch."""


def attach(model: nn.Module) -> int:
    """Let the recurrent layers of `model` call fxtune's functions, in place. Returns the number of layers."""
    count = 0
    for module in mixers(model):
        forward = with_operators(type(module).forward, tuple(FUNCTIONS.items()))
        if forward is not None:
            module.forward, count = types.MethodType(forward, module), count + 1
    return count


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    **given: Any,
) -> Tensor:
    """[rows, channels, length], like hidden_states."""
    assert activation in (None, "silu", "swish"), activation
    rows = hidden_states.transpose(1, 2)
    found = short_convolution(rows.flatten(0, 1), weight, bias, activation is not None, *_bounds(given))
    return found.view(rows.shape).transpose(1, 2)


def _delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: Any
) -> tuple[Tensor, Optional[Tensor]]:
    """query, key, value [rows, length, heads, d], g [rows, length, heads] or, for Kimi's, [rows, length, heads, d]."""
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = _unit(query), _unit(key)
    flat = (of.flatten(0, 1) for of in (query, key, value, g.float(), beta))
    return linear_attention(*flat, query.shape[-1] ** -0.5, *_bounds(given)).view(value.shape), None


def _scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Optional[Tensor] = None,
    dt_bias: Optional[Tensor] = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **given: Any,
) -> Tensor:
    """hidden_states [rows, length, heads, d], dt [rows, length, heads], B and C [rows, length, groups, states]."""
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    values = (hidden_states * dt.unsqueeze(-1)).to(hidden_states.dtype)
    flat = (of.flatten(0, 1) for of in (C, B, values, A.float() * dt))
    out = linear_attention(*flat, None, 1.0, *_bounds(given)).view(hidden_states.shape)
    return out if D is None else out + D.unsqueeze(-1) * hidden_states


def _none(*_: Any, **__: Any) -> None:
    """transformers runs the parts one by one, if their combination gives None."""


def _instead(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of the function that runs `ours` with DOCUMENTS among its arguments, and the given one without."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **given: Any) -> Any:
            return plain(*args, **given) if given.get(DOCUMENTS) is None else ours(*args, **given)

        return function

    return make


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _instead(_convolution),
    "torch_chunk_gated_delta_rule": _instead(_delta),
    "chunk_kimi_delta_attention": _instead(_delta),
    "mamba2_chunk_scan": _instead(_scan),
    "mamba2_split_conv1d_scan_combined": _instead(_none),
}
"""The name of a function of transformers -> a maker of what runs in its place."""


def _bounds(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """cu_seqlens and chunks. Some families rename the bounds on the way."""
    cu_seqlens = given.get("cu_seq_lens_q")
    return given["cu_seqlens"] if cu_seqlens is None else cu_seqlens, given[DOCUMENTS]


def _unit(x: Tensor) -> Tensor:
    """x with heads of length one."""
    numbers = x.float()
    return (numbers * torch.rsqrt(numbers.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
