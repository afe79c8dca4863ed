"""FlashAttention-4 as fxtune's own operators, so that torch.compile sees no graph break and checkpointing policies can
name them.

They compute attention inside documents that follow one another (or inside rows of one document each) with the CuTe
kernels of `flash-attn-4` (github.com/Dao-AILab/flash-attention, flash_attn/cute). torch.compile cannot trace the
package's own functions. If a checkpointing policy saves `torch.ops.fxtune.flash4.default`, it saves `out` and `lse`,
and no attention is computed twice. On an H200 forward and backward pass together reach 516 TFLOP/s in rows of 4k
tokens and 610 in rows of 64k; the FlashAttention-2 in torch reaches 264 and 326.

The first call with a combination of dtype, head dimension, group size, window and soft cap compiles for five to ten
seconds. The result is cached on disk, see package(). `max_seqlen` is an upper bound, so that it is the same for all
batches. On a CPU the operators run `reference`, with which tests compare them.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fxtune.errors import StorageError
from fxtune.system.machine import packages
from fxtune.system.machine.host import cache_home
from fxtune.upstream import flash_attn

VERSION = packages.FLASH4_VERSION
"""The release of flash-attn-4 whose internal functions are called here."""
MIN_BOUND = 1024
"""The lowest bound that the kernels get. A lower one selects other variants of the kernels, only useful for probes."""


class Options(NamedTuple):
    """The arguments of flash4 after q, k and v."""

    cu_seqlens: Tensor | None
    """int32 [documents + 1]: where each document begins, and at the end the number of tokens. Documents may be empty.
    None: each row is one document."""
    max_seqlen: int
    """An upper bound on the documents' lengths. Not read without `cu_seqlens`."""
    scale: float
    """The factor of the scores, usually d^-0.5."""
    window: int
    """How many tokens a token attends to, itself included (transformers' `sliding_window`); 0: no limit."""
    softcap: float
    """c in c * tanh(score / c) (Gemma 2); 0: no soft cap."""
    sinks: Tensor | None = None
    """[heads], one more score in each softmax of a head. It belongs to no token and has no value (gpt-oss)."""
    cu_seqlens_k: Tensor | None = None
    """int32 [documents + 1], like `cu_seqlens`, but for k and v, which may have another number of tokens. Each
    document has at least as many keys as queries, and its last query and last key are of one token. Keys after the
    last document have no influence, and an arbitrary gradient. None: `cu_seqlens`."""
    causal: bool = True
    """If false, each token attends to all tokens of its document, within `window` to both sides, without `sinks` and
    `cu_seqlens_k`."""

    @classmethod
    def of_backward(cls, *given: Any) -> Options:
        """The options that flash4_backward gets: all but `sinks`."""
        return cls(*(*given[:5], None, *given[5:]))

    def of_package(self) -> dict[str, Any]:
        """Arguments that the package's forward and backward pass share."""
        bound = None if self.cu_seqlens is None else max(self.max_seqlen, MIN_BOUND)
        return dict(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k,
            max_seqlen_q=bound,
            max_seqlen_k=bound,
            softmax_scale=self.scale,
            causal=self.causal,
            window_size_left=self.window - 1 if self.window else None,
            **({} if self.causal or not self.window else {"window_size_right": self.window - 1}),
        )


_QKV = "Tensor q, Tensor k, Tensor v"
_OPTIONS = "Tensor? cu_seqlens, SymInt max_seqlen, float scale, SymInt window, float softcap"
_LAST = "Tensor? cu_seqlens_k=None, bool causal=True"


@torch.library.custom_op(
    "fxtune::flash4",
    mutates_args=(),
    device_types="cuda",
    schema=f"({_QKV}, {_OPTIONS}, Tensor? sinks=None, {_LAST}) -> (Tensor, Tensor)",
)
def flash4(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """Attention inside documents, causal or two-way.

    Args:
        q: [tokens, heads, d], or [rows, length, heads, d] if `cu_seqlens` is None and each row is one document;
            float16 or bfloat16, any strides, but the last is 1.
        k, v: the same with kv_heads (a divisor of heads); v may have another d.
        given: see Options.

    Returns:
        out: like q with v's last dimension, contiguous.
        lse: log-sum-exp of the scores and the sink (natural logarithm), float32 [heads, tokens] or [rows, heads,
            length]; it has no gradient.
    """
    options = Options(*given)
    out, lse = _results(q, k, v, options.cu_seqlens)
    cap, sinks = options.softcap or None, options.sinks
    flash_attn.forward(package())(q, k, v, **options.of_package(), softcap=cap, learnable_sink=sinks, out=out, lse=lse)
    return out, lse


@torch.library.custom_op(
    "fxtune::flash4_backward",
    mutates_args=(),
    device_types="cuda",
    schema=f"(Tensor dout, {_QKV}, Tensor out, Tensor lse, {_OPTIONS}, {_LAST}) -> (Tensor, Tensor, Tensor)",
)
def flash4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of flash4, contiguous. `lse` contains the sinks. With torch.use_deterministic_algorithms the
    gradients have the same bits each time."""
    options, (dq, dk, dv) = Options.of_backward(*given), _gradients(q, k, v)
    deterministic = torch.are_deterministic_algorithms_enabled()
    results = dict(dq=dq, dk=dk, dv=dv, deterministic=deterministic, softcap=options.softcap)
    flash_attn.backward(package())(q, k, v, out, dout.contiguous(), lse, **options.of_package(), **results)
    return dq, dk, dv


@functools.cache
def package() -> Any:
    """flash_attn.cute.interface, with a cache on disk for what it compiles.

    The cache is a folder of fxtune's, unless the environment names another folder or switches the cache off. (The
    package's default is below /tmp, where others could place files that would be loaded as code.) The package reads
    the environment at its first import. A step would fail if the folder were read-only or without file locks, so
    _cache_folder() tries both.
    """
    directory, enabled = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    if os.environ.get(enabled, "1") == "1" and (folder := _cache_folder(os.environ.get(directory))):
        os.environ.update({directory: str(folder), enabled: "1"})
    from flash_attn.cute import interface

    return interface


def _cache_folder(configured: str | None) -> Path | None:
    """A folder where files can be created and locked: `configured`, or one in fxtune's cache. None if this folder
    cannot be used. In fxtune's cache each kind of GPU has a separate folder, because not all of the package's cache
    keys contain the GPU (4.0.0b36: bwd_pre).
    """
    gpu = "sm{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "cpu"
    try:
        folder = Path(configured) if configured else cache_home() / "flash4" / f"{platform.machine()}-{gpu}"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, StorageError):
        return None
    return folder


def reference(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """flash4 in plain torch, document by document, in float32 (float64 for float64)."""
    options = Options(*given)
    out, lse = _results(q, k, v, options.cu_seqlens)
    for rows, columns, keys in _documents(q, options):
        qd, kd, vd = q[rows], k[keys], v[keys]
        scores, sinks = _scores(qd, kd, options)[0], options.sinks
        sums = scores.logsumexp(-1)
        lse[columns] = sums if sinks is None else torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
        probabilities = (scores - lse[columns].unsqueeze(-1)).exp()
        out[rows] = (probabilities @ _per_head(vd, qd)).transpose(0, 1).to(out.dtype)
    return out, lse


def reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """flash4_backward in plain torch: P = exp(S - lse), dS = P * (dO V^T - sum(dO * O)) (arXiv 2205.14135, appendix
    B)."""
    options, (dq, dk, dv) = Options.of_backward(*given), _gradients(q, k, v)
    for rows, columns, keys in _documents(q, options):
        qd, kd, vd, od, dod = q[rows], k[keys], v[keys], out[rows], dout[rows]
        scores, slope = _scores(qd, kd, options)
        probabilities = (scores - lse[columns].unsqueeze(-1)).exp()
        o, do = (_heads_first(x, scores.dtype) for x in (od, dod))
        dscores = probabilities * (do @ _per_head(vd, qd).mT - (do * o).sum(-1, keepdim=True)) * slope * options.scale
        dq[rows] = (dscores @ _per_head(kd, qd)).transpose(0, 1).to(q.dtype)
        dk[keys] = _per_group(dscores.mT @ _heads_first(qd, scores.dtype), kd).to(k.dtype)
        dv[keys] = _per_group(probabilities.mT @ do, vd).to(v.dtype)
    return dq, dk, dv


flash4.register_kernel("cpu")(reference)
flash4_backward.register_kernel("cpu")(reference_backward)


@flash4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return _results(q, k, v, cu_seqlens)


@flash4_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(q, k, v)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.options, sinks, cu_seqlens_k, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, sinks, cu_seqlens_k)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 11
    *tensors, sinks, cu_seqlens_k = ctx.saved_tensors
    gradients = torch.ops.fxtune.flash4_backward(dout, *tensors, *ctx.options, cu_seqlens_k, ctx.causal)
    dsinks = None
    if sinks is not None and ctx.needs_input_grad[8]:
        out, lse = tensors[3:5]
        dot = (dout.to(lse.dtype) * out).sum(-1).transpose(-1, -2)
        token_gradients = -(sinks.to(lse.dtype)[:, None] - lse).exp() * dot
        dsinks = token_gradients.sum(-1).view(-1, len(sinks)).sum(0).to(sinks.dtype)
    return *gradients, None, None, None, None, None, dsinks, None, None


flash4.register_autograd(_backward, setup_context=_setup)


def _flops(
    q: torch.Size, k: torch.Size, v: torch.Size, cu_seqlens: Any, max_seqlen: int, *rest: Any, **named: Any
) -> int:
    """FLOPs of the forward pass, from shapes alone: torch passes nothing else when it estimates what to save."""
    tokens, length = (q[0], max_seqlen) if len(q) == 3 else (q[0] * q[1], q[1])
    causal = named.get("causal", not (rest and rest[-1] is False))
    return tokens * length * q[-2] * (q[-1] + v[-1]) * (1 if causal else 2)


def _backward_flops(
    dout: torch.Size, q: torch.Size, k: torch.Size, v: torch.Size, out: Any, lse: Any, *rest: Any, **named: Any
) -> int:
    return 5 * _flops(q, k, v, *rest) // 2


register_flop_formula(torch.ops.fxtune.flash4)(_flops)
register_flop_formula(torch.ops.fxtune.flash4_backward)(_backward_flops)


def _results(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    assert (cu_seqlens is None) == (q.dim() == 4), (q.shape, cu_seqlens)
    *tokens, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return (q.new_empty([*tokens, heads, v.shape[-1]]), q.new_empty([*tokens[:-1], heads, tokens[-1]], dtype=wide))


def _gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in inputs)
    return dq, dk, dv


def _documents(q: Tensor, options: Options) -> Iterator[tuple[Any, Any, Any]]:
    """For each document that has tokens: its indices in `q`, in `lse` and in `k`."""
    cu_seqlens, cu_seqlens_k = options.cu_seqlens, options.cu_seqlens_k
    if cu_seqlens is None:
        yield from ((row, row, row) for row in range(len(q)))
        return
    keys = (cu_seqlens if cu_seqlens_k is None else cu_seqlens_k).tolist()
    for (start, end), ends in zip(pairwise(cu_seqlens.tolist()), pairwise(keys), strict=True):
        if end > start:
            yield slice(start, end), (slice(None), slice(start, end)), slice(*ends)


def _scores(q: Tensor, k: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Scores of one document, [heads, queries, keys], -inf where masked, and the soft cap's derivative at each."""
    window, softcap, causal = options.window, options.softcap, options.causal
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _heads_first(q, wide) @ _per_head(k, q).mT * options.scale
    slope = torch.ones_like(scores)
    if softcap:
        capped = (scores / softcap).tanh()
        scores, slope = softcap * capped, 1 - capped * capped
    if not causal and not window:
        return scores, slope
    at = torch.arange(len(k), device=q.device)
    back = at[len(k) - len(q) :, None] - at[None, :]
    back = back if causal else back.abs()
    return scores.masked_fill((back < 0) | (back >= (window or len(k))), float("-inf")), slope


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(0, 1)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of one document as [heads, length, d], copied for each head of their group."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return _heads_first(x, wide).repeat_interleave(q.shape[1] // x.shape[1], 0)


def _per_group(x: Tensor, like: Tensor) -> Tensor:
    """[heads, length, d] summed over each group of heads, as [length, kv_heads, d]."""
    return x.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1)
