"""Context parallelism: attention of rows whose tokens are cut into pieces, one on each rank.

Everything in a decoder but attention works on single tokens. So each rank holds one piece of each row (`cut` in
data/batches/batch.py), and only attention needs the other pieces. Before attention the ranks exchange tokens for
heads: each rank sends the queries, keys and values of its piece, and gets the queries, keys and values of whole rows
for its share of the heads. After attention the ranks exchange back. This is DeepSpeed-Ulysses (arXiv 2309.14509).
Attention itself runs as on one card, by any kernel: the kernel gets whole rows with the `cu_seqlens` of all their
documents, and fewer heads.

register() wraps a function in transformers' registry. The wrapped function exchanges only in calls that have
`context_group`. Other calls (generation, and checks on a whole row) run without an exchange.

If the number of ranks does not divide the number of key heads, each key head is sent to all ranks that have query
heads of its group. So only the number of query heads limits the ranks. The alternative is a ring of ranks that pass
keys and values on. A ring sends no queries and outputs, but at least the same bytes of keys and values, and it needs
the log-sum-exp of every kernel.

In each layer a rank sends (ranks - 1) / ranks of 2 q + 2 k numbers for each token of its piece. q is the width of all
query heads, and k the width of all key heads with their copies. Outputs have the width of queries, and values have the
width of keys. The backward pass sends the same amount. A recomputed layer repeats the exchange, because received
tensors are not kept. Over NVLink this takes less time than other recomputation that saves the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from torch import Tensor, nn

from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.kernels.all_to_all import all_to_all
from fxtune.kernels.autocast import compute_dtype
from fxtune.models.dims import Shape, key_copies, position_limit
from fxtune.models.kinds.known import kind_of
from fxtune.models.structure import observing
from fxtune.system.process.profiler import OperatorCounter
from fxtune.techniques.attention.backends.backend import SINKS, Backend, offers
from fxtune.techniques.attention.inputs import model_inputs
from fxtune.techniques.base import Evidence
from fxtune.techniques.rope import BY_LONGEST, rope_types
from fxtune.upstream.transformers import eager_attention

PROBE = 8
"""Tokens in each piece of the row that observe() cuts."""
LIMIT, HALF_LIMIT = 2e-3, 5e-2
"""The largest relative difference that observe() accepts between the logits of a cut and a whole row: in float32 (with
TF32), and in 16 bits. Without an exchange the difference is about 1."""


def register(backend: Backend) -> None:
    """Let the backend's function in transformers' registry exchange tokens for heads. May be called again."""
    from transformers import AttentionInterface

    plain = AttentionInterface().get(backend.implementation)
    if not hasattr(plain, "exchanges"):
        AttentionInterface.register(backend.implementation, _exchanging(backend, plain))


def _exchanging(backend: Backend, plain: Optional[Callable[..., Any]]) -> Callable[..., Any]:
    """Wrap `plain` in an exchange. `plain` is None for eager attention, which each model defines for itself."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        context_group: str = "",
        context_ranks: int = 1,
        position_ids: Optional[Tensor] = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        # In fused LoRA `module` is a StandIn (lora/fused_modules.py) for the attention.
        attend = plain or eager_attention(type(getattr(module, "stands_for", module)))
        if not context_group:
            if position_ids is not None:
                options["position_ids"] = position_ids
            return attend(module, query, key, value, attention_mask, **options)
        cu_seqlens = options.get("cu_seq_lens_q")
        if cu_seqlens is None:
            raise ConfigError(
                f"parallel.context: {type(module).__name__} does not pass the documents' bounds to its attention, so "
                "it cannot run on pieces of rows. Set it to 1."
            )
        groups = getattr(module, "num_key_value_groups", 1)
        query, key, value = tokens_to_heads(query, key, value, context_group, context_ranks)
        if query.shape[1] // key.shape[1] != groups:
            module = _OwnGroups(module, query.shape[1] // key.shape[1])  # type: ignore[assignment]
        if backend.core is None:
            attention_mask = backend.row_mask(query, cu_seqlens, options.get("sliding_window") or 0)
        out = attend(module, query, key, value, attention_mask, **options)[0]
        return heads_to_tokens(out, context_group, context_ranks), None

    attention.exchanges = True  # type: ignore[attr-defined]
    return attention


def tokens_to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: str, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads among the `ranks` ranks of the process group `group`.

    `query` [rows, heads, piece, d], `key` and `value` [rows, key heads, piece, any] hold this rank's piece of each
    row. Returns the three tensors for whole rows and this rank's heads, the query as [rows, heads / ranks, ranks *
    piece, d].
    """
    # Norms or RoPE may have made queries and keys float32. Attention would cast them. A cast before the
    # exchange halves the bytes that are sent.
    dtype, rows, piece = compute_dtype(value), len(query), query.shape[2]
    copies = key_copies(query.shape[1], key.shape[1], ranks)
    parts, widths = [], []
    for x in (query, *(tensor.repeat_interleave(copies, 1) if copies > 1 else tensor for tensor in (key, value))):
        own = x.shape[1] // ranks
        parts.append(x.to(dtype).unflatten(1, (ranks, own)).permute(1, 0, 3, 2, 4).flatten(3))
        widths.append(own * x.shape[-1])
    received = all_to_all(torch.cat(parts, -1), group)  # [ranks, rows, piece, widths]
    whole = received.transpose(0, 1).reshape(rows, ranks * piece, -1).split(widths, -1)
    query, key, value = (
        gathered.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
        for gathered, x in zip(whole, (query, key, value), strict=True)
    )
    return query, key, value


def heads_to_tokens(out: Tensor, group: str, ranks: int) -> Tensor:
    """Exchange back: [rows, ranks * piece, heads / ranks, d] of whole rows becomes [rows, piece, heads, d]."""
    rows, length, _, width = out.shape
    parts = out.unflatten(1, (ranks, length // ranks)).transpose(0, 1)
    received = all_to_all(parts.contiguous(), group)  # [ranks, rows, piece, heads / ranks, d]
    return received.permute(1, 2, 0, 3, 4).reshape(rows, length // ranks, -1, width)


def refusals(facts: Facts) -> Iterator[str]:
    """Yield each reason why rows cannot be cut under `facts`, with the change that helps."""
    ranks, text = facts.degrees.context, facts.text
    kind, whole = text.get("model_type", "this model"), "Set parallel.context=1"
    heads = [each.heads for each in Shape.of(facts.model).attentions]
    if not facts.techniques.attention.enabled:
        yield "techniques.attention.enabled=false leaves nothing that exchanges the pieces. Set it to true."
    if not offers(kind, "_supports_attention_backend"):
        yield f"{kind} of transformers calls its attention directly, so rows cannot be cut. {whole}."
    elif uneven := [count for count in heads if count % ranks]:
        fits = max(count for count in range(1, ranks) if not any(each % count for each in heads))
        yield f"{ranks} ranks do not divide {kind}'s {uneven[0]} query heads. Set it to {fits}, or change the ranks."
    if layers := set(text.get("layer_types") or ()) - {"full_attention", "sliding_attention"}:
        yield f"the {', '.join(sorted(layers))} layers of {kind} need a whole row. {whole}."
    if kind in SINKS:
        yield f"{kind} has attention sinks, which are not divided among the ranks. {whole}."
    padded, limit = -(-facts.row_length // ranks) * ranks, position_limit(text)
    if limit and padded > limit and not text.get("rope_parameters"):
        yield (
            f"rows are padded to {padded} tokens, beyond the {limit} positions of {kind}. Set data.sequence_length to "
            f"{limit // ranks * ranks}."
        )
    if by_longest := rope_types(facts) & BY_LONGEST:
        yield (
            f"RoPE of type {by_longest.pop()} depends on the longest row, and a rank sees a piece. Use "
            "techniques.rope.type=yarn, or parallel.context=1."
        )


def observe(model: nn.Module, world: World, layers: int, packing: bool) -> Evidence:
    """Observe whether each of the `layers` attention layers exchanges, and whether a small row gives the same logits
    cut and whole. All ranks of `world` call this function together, under training's autocast. `packing`: whether the
    row has several documents."""
    ranks, device = world.context_ranks, next(model.parameters()).device
    length = PROBE * ranks
    ids = kind_of(model.config).small_row(model, length)["input_ids"]
    # The second document crosses every border between pieces.
    bounds = [0, 3, length - 2, length] if packing else [0, length]
    starts = torch.tensor(bounds, dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(int(size), device=device) for size in starts.diff()]).unsqueeze(0)
    piece = slice(world.context_rank * PROBE, (world.context_rank + 1) * PROBE)
    counter = OperatorCounter(lambda name, _: name if name == "fxtune.all_to_all" else None)
    with observing(model):
        whole = model(**model_inputs(model, ids, positions, starts)).logits[:, piece].float()
        cut = model_inputs(model, ids[:, piece], positions[:, piece], starts, ranks, world.context_group)
        with counter:
            own = model(**cut).logits
    half = own.dtype is not torch.float32
    difference = max(world.gather(((own.float() - whole).norm() / whole.norm()).item(), "comparing logits"))
    calls = sum(counter.counts.values())
    return Evidence(
        "attention",
        f"rows in {ranks} pieces, exchanged before and after attention",
        f"{calls} exchanges in {layers} layers; logits of a cut row within {difference:.1e} of the whole row's",
        calls == 2 * layers and difference <= (HALF_LIMIT if half else LIMIT),
    )


class _OwnGroups:
    """Replaces an attention module whose key heads serve another number of query heads on this rank."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self.module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
