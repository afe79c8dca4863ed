"""Runs the linear attention and the short convolutions of transformers' hybrid models as operators that keep packed
documents apart (kernels/linear_attention.py, short_convolution.py).

The recurrent layers of the hybrid families call module functions of the same few names, and hand them the keyword
arguments of the model's forward pass. attach() lets one layer call fxtune's functions instead:

    causal_conv1d_fn                    the convolution over a few tokens of each channel
    torch_chunk_gated_delta_rule        Qwen3-Next, Qwen3.5, OLMo hybrid
    chunk_kimi_delta_attention          Kimi Linear, Bailing hybrid
    mamba2_chunk_scan                   Mamba-2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2
    mamba2_split_conv1d_scan_combined   all of a Mamba-2 layer in one kernel, which reads the weight of `out_proj` and
                                        skips its adapters: never taken

The documents are those of documents_of(); without these arguments each row is one document. A call that continues
from a cache runs transformers' own function.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxtune.facts.run import Facts
from fxtune.kernels.linear_attention import document_chunks, linear_attention
from fxtune.kernels.short_convolution import short_convolution
from fxtune.upstream.transformers import calls, with_operators

BOUNDS, CHUNKS = "document_bounds", "document_chunks"
"""Arguments of a forward pass: cu_seqlens of its rows, and document_chunks() of it."""
PACKAGE = "fla-core"
RECURRENCE, CONVOLUTION = "linear_attention", "short_convolution"
"""The operators of fxtune, without their namespace."""
COMBINED = "mamba2_split_conv1d_scan_combined"


def documents_of(cu_seqlens: Tensor, tokens: int) -> dict[str, Tensor]:
    """The arguments of a forward pass over `tokens` tokens for layers with the operators."""
    return {BOUNDS: cu_seqlens, CHUNKS: document_chunks(cu_seqlens, tokens)}


def has_kernels(facts: Facts) -> bool:
    """Whether the operators run on this machine: on a GPU they are kernels of a package."""
    return facts.device != "cuda" or PACKAGE in facts.packages


def serves(part: nn.Module, decays: bool) -> bool:
    """Whether the operators are all that mixes tokens in `part`, a recurrent part of a layer. `decays`: whether it has
    a state that decays. Mamba-1 has one, and calls the convolution alone by a known name. A part without `**kwargs`
    (LFM2 of transformers 5.17) would not get BOUNDS and CHUNKS."""
    forward = type(part).forward
    if inspect.getfullargspec(inspect.unwrap(forward)).varkw is None:
        return False
    known = calls(forward) & FUNCTIONS.keys()
    return bool(known - {"causal_conv1d_fn"} if decays else known)


def operators(part: nn.Module) -> set[str]:
    """The names of the operators that `part` calls after attach()."""
    known = calls(type(part).forward) & FUNCTIONS.keys()
    return {CONVOLUTION if name == "causal_conv1d_fn" else RECURRENCE for name in known - {COMBINED}}


def attach(part: nn.Module) -> None:
    """Let `part` call the operators, in place."""
    part.forward = types.MethodType(with_operators(type(part).forward, tuple(FUNCTIONS.items())), part)


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
    found = short_convolution(rows.flatten(0, 1), weight, bias, activation is not None, *documents(rows, given))
    return found.view(rows.shape).transpose(1, 2)


def _delta(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **given: Any
) -> tuple[Tensor, Optional[Tensor]]:
    """query, key, value [rows, length, heads, d], g [rows, length, heads] or, for Kimi's, [rows, length, heads, d]."""
    if given.get("use_qk_l2norm_in_kernel"):
        query, key = _unit(query), _unit(key)
    q, k, v, g, beta = (of.flatten(0, 1) for of in (query, key, value, g.float(), beta))
    out = linear_attention(q, k, v, g, beta, query.shape[-1] ** -0.5, *documents(value, given))
    return out.view(value.shape), None


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
    q, k, v, g = (of.flatten(0, 1) for of in (C, B, values, A.float() * dt))
    out = linear_attention(q, k, v, g, None, 1.0, *documents(values, given)).view(hidden_states.shape)
    return out if D is None else (out + D.unsqueeze(-1) * hidden_states).to(out.dtype)


def _no_combination(*_: Any, **__: Any) -> None:
    """transformers runs the parts of a layer one by one, if their combination gives None."""


CONTINUED = ("initial_state", "initial_states", "output_final_state", "return_final_states")
"""Arguments of a call that continues from a cache or fills one."""


def _instead(ours: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of a function that runs `ours`, and for a cache the given function."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **given: Any) -> Any:
            continued = any(given.get(name) is not None and given[name] is not False for name in CONTINUED)
            if not continued:
                return ours(*args, **given)
            # On a CPU fla-core's kernels, which transformers has chosen for any device, do not run.
            tensor = next(each for each in (*args, *given.values()) if isinstance(each, Tensor))
            return (plain if tensor.is_cuda else inspect.unwrap(plain))(*args, **given)

        return function

    return make


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _instead(_convolution),
    "torch_chunk_gated_delta_rule": _instead(_delta),
    "chunk_kimi_delta_attention": _instead(_delta),
    "mamba2_chunk_scan": _instead(_scan),
    COMBINED: _instead(_no_combination),
}
"""The name of a function of transformers -> a maker of what runs in its place."""


def documents(rows: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """cu_seqlens and chunks of the documents of `rows` [rows, length, ...]."""
    if given.get(CHUNKS) is None:
        count, length = rows.shape[:2]
        lone = torch.arange(count + 1, dtype=torch.int32, device=rows.device) * length
        given = documents_of(lone, count * length)
    return given[BOUNDS], given[CHUNKS]


def _unit(x: Tensor) -> Tensor:
    """x with heads of length one."""
    numbers = x.float()
    return (numbers * torch.rsqrt(numbers.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)
