"""The kernels of flash-linear-attention (package fla-core), forward and backward apart.

What: chunk_*_fwd and chunk_*_bwd of fla.ops, the parts of the gated delta rule, and causal_conv1d_fwd and _bwd.
Why: torch.compile cannot trace the public functions, which switch it off and hold their own autograd.
When they are gone: the range of fla-core in pyproject.toml ends before the version without them.

The scan runs the parts of the gated delta rule with a correction of zero. simple_gla's own functions wait for the
device to count chunks, and take no key head that serves several value heads.

fla-core keeps chunk offsets by the identity of `cu_seqlens`, so no caller may write into that tensor in place
(compile/cuda_graphs.py records over copies).

All tensors are of one packed row: [tokens, ...] here, [1, tokens, ...] there.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from torch import Tensor

CHUNK = 64
LOG2_E = 1.4426950408889634
"""The kernels take powers of two."""


class Inputs(NamedTuple):
    """The arguments of linear_attention() in kernels/linear_attention.py, which describes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Optional[Tensor]
    scale: float
    cu_seqlens: Tensor
    chunks: Tensor


def forward(given: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of fxtune::linear_attention."""
    q, k, v, g, beta, scale, cu_seqlens, chunks = given
    bounds: dict[str, Any] = dict(cu_seqlens=cu_seqlens, chunk_indices=chunks)
    options = dict(scale=scale, initial_state=None, output_final_state=False, **bounds)
    none = v.new_empty(0)
    if beta is None:
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.utils import chunk_local_cumsum

        q, k, v = _row(q), _row(k), _row(v)
        sums = chunk_local_cumsum(_row(g), chunk_size=CHUNK, scale=LOG2_E, **bounds)
        out = chunk_fwd_o(q, k, v, _states(k, v, sums, bounds), sums, scale=scale, **bounds)
        return out[0], sums[0], none, none.clone()
    rows = dict(q=_row(q), k=_row(k), v=_row(v), g=_row(g), beta=_row(beta))
    if g.ndim == 3:
        from fla.ops.kda.chunk_fwd import chunk_kda_fwd

        out, _, sums, scores, solved, *_ = chunk_kda_fwd(**rows, **options)
        return out[0].to(v.dtype), sums[0], scores[0], solved[0]
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    sums, out, solved, *_ = chunk_gated_delta_rule_fwd(**rows, **options)
    return out[0].to(v.dtype), sums[0], solved[0], none


def backward(
    grad: Tensor, given: Inputs, sums: Tensor, first: Tensor, second: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Optional[Tensor]]:
    """The gradients of q, k, v, g and beta."""
    q, k, v, _, beta, scale, cu_seqlens, chunks = given
    bounds: dict[str, Any] = dict(cu_seqlens=cu_seqlens, chunk_indices=chunks)
    options = dict(scale=scale, initial_state=None, do=_row(grad), dht=None, **bounds)
    if beta is None:
        return *_scan_backward(_row(grad), _row(q), _row(k), _row(v), _row(sums), scale, bounds), None
    rows = dict(q=_row(q), k=_row(k), v=_row(v), g=_row(sums), beta=_row(beta))
    if sums.ndim == 3:
        from fla.ops.kda.chunk_bwd import chunk_kda_bwd

        dq, dk, dv, dbeta, dg, *_ = chunk_kda_bwd(**rows, Aqk=_row(first), Akk=_row(second), **options)
    else:
        from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

        dq, dk, dv, dbeta, dg, *_ = chunk_gated_delta_rule_bwd(**rows, A=_row(first), **options)
    return dq[0], dk[0], dv[0], dg[0], dbeta[0]


def _states(k: Tensor, v: Tensor, sums: Tensor, bounds: dict[str, Any]) -> Tensor:
    """The state of the scan at the begin of each chunk."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    return chunk_gated_delta_rule_fwd_h(k, _no_correction(k, v), v, sums, save_new_value=False, **bounds)[0]


def _no_correction(k: Tensor, v: Tensor) -> Tensor:
    """What the delta rule takes from each value, for a recurrence without it: zero [1, tokens, heads, K]."""
    return k.new_zeros(*v.shape[:3], k.shape[-1])


def _scan_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, scale: float, bounds: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu
    from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local
    from fla.ops.utils import chunk_local_cumsum

    given = dict(g=sums, scale=scale, **bounds)
    within = chunk_bwd_dv_local(q, k, grad, **given)
    of_states, _, dv = chunk_gated_delta_rule_bwd_dhu(q, k, _no_correction(k, v), grad, within, **given)
    dq, dk, _, dg = chunk_bwd_dqkwg(q, k, v, grad, _states(k, v, sums, bounds), of_states, **given)
    dg = chunk_local_cumsum(dg, chunk_size=CHUNK, reverse=True, **bounds)
    return dq[0], dk[0], dv[0], dg[0]


def convolution(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cu_seqlens: Tensor, chunks: Tensor
) -> Tensor:
    """The result of fxtune::short_convolution."""
    from fla.modules.causal_conv1d import causal_conv1d_fwd

    out, _ = causal_conv1d_fwd(x.unsqueeze(0), weight, bias, None, **_of_convolution(silu, cu_seqlens, chunks))
    return out[0].contiguous()


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Optional[Tensor], silu: bool, cu_seqlens: Tensor, chunks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; of bias an empty tensor, if there is none."""
    from fla.modules.causal_conv1d import causal_conv1d_bwd

    dx, dweight, dbias, *_ = causal_conv1d_bwd(
        x.unsqueeze(0), _row(grad), None, weight, bias, **_of_convolution(silu, cu_seqlens, chunks)
    )
    return dx[0].contiguous(), dweight, x.new_empty(0) if dbias is None else dbias


def runs_tilelang() -> bool:
    """Whether tilelang's kernels compute gradients of a decay: installed, with a compiler, and switched on."""
    from fla.ops.common.backends.tilelang import CommonTileLangBackend as Backend

    return bool(Backend.is_available() and Backend().is_enabled())


def flops(which: str, keys: int, values: int) -> tuple[int, int]:
    """FLOPs of one head for one token: of the forward pass, and of what the backward pass computes again. The backward
    pass costs twice the first number, and the second number.

    which: delta, kda or scan (kernels/linear_attention.py). keys, values: the widths K and V of a head. The
    products in chunks of C = 64 tokens, with full matrices:

        2 C K    q k^T; for delta and kda also k k^T, and its inverse times k
        2 C V    q k^T times v; for delta and kda also the inverse times v
        2 K V    the update of the state, and q times the state; for delta and kda also k times the state

    The backward pass computes again: q k^T, except for kda, which keeps it; the states; for delta and kda also k times
    the state, and the inverse times k and v. Not counted are the inverse itself and, for a scan,
    products with zero."""
    in_chunk, state = 2 * CHUNK, 2 * keys * values
    if which == "scan":
        return in_chunk * (keys + values) + 2 * state, in_chunk * keys + state
    again = in_chunk * (keys + values) + 2 * state
    return in_chunk * (3 * keys + 2 * values) + 3 * state, again + (which == "delta") * in_chunk * keys


def _of_convolution(silu: bool, cu_seqlens: Tensor, chunks: Tensor) -> dict[str, Any]:
    return dict(activation="silu" if silu else None, cu_seqlens=cu_seqlens, chunk_indices=chunks)


def _row(x: Tensor) -> Tensor:
    return x.contiguous().unsqueeze(0)
