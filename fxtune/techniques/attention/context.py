"""Context parallelism: attention of rows whose tokens are cut into pieces, one on each rank.

Everything in a decoder but attention works on single tokens. So each rank holds one piece of each row (see `cut` of
data/batches/batch.py), and only attention needs the other pieces. Before attention the ranks exchange tokens for
heads: each rank sends the queries, keys and values of its piece, and gets the queries, keys and values of the whole
row for its share of the heads. After attention they exchange back. This is DeepSpeed-Ulysses (arXiv 2309.14509).
Attention itself runs as on one card, by any kernel: it sees whole rows with the `cu_seqlens` of all their documents,
and fewer heads.

The exchange wraps the functions in transformers' registry, and acts in calls that have `context_group`. Other
calls (generation, and checks on a whole row) run as before.

If there are fewer key heads than ranks, or their numbers do not divide, each key head is sent to all ranks that have
query heads of its group. So the number of query heads is the only limit. A ring of ranks that pass keys and values on
would send at least as many bytes of them, none of queries and outputs, and would need the log-sum-exp of every kernel.

Each rank sends (ranks - 1) / ranks of 2 q + 2 k numbers a token of its piece in each layer, where q and k are the
widths of all query heads and of all key heads, copies included: the outputs are as wide as the queries, the values as
the keys. The backward pass sends the same amount. A recomputed layer sends them again, because received tensors are
not kept: over NVLink that takes less time than other recomputation for the same memory.
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
"""Tokens of each piece of the row that observe() compares."""
LIMIT, HALF_LIMIT = 2e-3, 5e-2
"""The largest relative difference of its logits in float32 (with TF32), and in 16 bits. Without an exchange it is
about 1."""


def register(backend: Backend) -> None:
    """Let the backend's function in transformers' registry exchange tokens for heads; once or again."""
    from transformers import AttentionInterface

    plain = AttentionInterface().get(backend.implementation)
    if not hasattr(plain, "exchanges"):
        AttentionInterface.register(backend.implementation, _exchanging(backend, plain))


def _exchanging(backend: Backend, plain: Optional[Callable[..., Any]]) -> Callable[..., Any]:
    """`plain`, None for eager, which each model defines for itself, with an exchange around it."""

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
        # A StandIn of lora/fused_modules.py stands for its attention.
        attend = plain or eager_attention(type(getattr(module, "stands_for", module)))
        if not context_group:
            if position_ids is not None:
                options["position_ids"] = position_ids
            whole: tuple[Tensor, Any] = attend(module, query, key, value, attention_mask, **options)
            return whole
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

    `query` [rows, heads, piece, d], `key` and `value` [rows, key heads, piece, any]: for this rank's piece of each
    row. Returns the three for whole rows, [rows, heads / ranks, ranks * piece, d] and so on, and this rank's heads.
    """
    # Norms or RoPE may have made queries and keys float32. Attention would cast them; casting first sends half the
    # bytes.
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
    """The exchange back: [rows, ranks * piece, heads / ranks, d] of whole rows to [rows, piece, heads, d]."""
    rows, length, _, width = out.shape
    parts = out.unflatten(1, (ranks, length // ranks)).transpose(0, 1)
    received = all_to_all(parts.contiguous(), group)  # [ranks, rows, piece, heads / ranks, d]
    return received.permute(1, 2, 0, 3, 4).reshape(rows, length // ranks, -1, width)


def refusals(facts: Facts) -> Iterator[str]:
    """Each reason why rows cannot be cut under `facts`, with what to change."""
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
    """Whether each of the `layers` attention layers exchanges, and a small row gives the same logits cut and whole.
    All ranks of `world` call it together, under training's autocast. `packing`: with documents to separate."""
    ranks, device = world.context_ranks, next(model.parameters()).device
    length = PROBE * ranks
    ids = kind_of(model.config).small_row(model, length)["input_ids"]
    # The second document reaches over every border.
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
    """A module whose attention has another number of query heads for each key head on this rank."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self.module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)
