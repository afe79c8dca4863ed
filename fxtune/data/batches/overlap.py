"""Rows that are both trained on and held out, found by their tokens.

With such a row an evaluation measures what the model remembers. Two rows are the same if their token ids have the same
digest, which the tables store; their files, names and formats may differ. Two rows of preferences count as the same
row if their prompts have the same token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fxtune.data.batches.segments import Side, is_on_side
from fxtune.data.chat.encode import Encoder
from fxtune.data.config import DataConfig, OnOverlap, QuestionsConfig, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.rows import place_of_row
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import encode_shard
from fxtune.errors import DataError

MAX_SHOWN_PAIRS = 3
"""Pairs of rows that a message names for each held-out source."""


@dataclass
class _HeldOut:
    """A source with held-out rows: a part of a training source, a source for evaluation, or the questions."""

    key: str
    """The recipe's key that names the source."""
    source: SourceConfig
    hashes: np.ndarray
    """The hashes by which rows are compared, see TokenTable.held_out_by."""
    table: TokenTable | None = None
    mask: np.ndarray | None = None
    """Which documents of the source are held out, bool; None: all."""


def require_no_overlap(
    data: DataConfig,
    tables: Sequence[TokenTable],
    eval_tables: Sequence[TokenTable],
    tokenizer: Any,
    images: ImageProcessor | None = None,
) -> np.ndarray:
    """Digests of documents to leave out of training, sorted uint64. `tables`: the tables of data.sources;
    `eval_tables`: the tables of data.eval_sources. With data.on_overlap=error, raises DataError for such documents."""
    if data.on_overlap is OnOverlap.keep:
        return np.zeros(0, np.uint64)
    tables, eval_tables = [table.by_row for table in tables], [table.by_row for table in eval_tables]
    held_out = [
        _HeldOut("data.eval_sources", source, table.held_out_by, table)
        for source, table in zip(data.eval_sources, eval_tables, strict=False)
    ]
    if (questions := data.applicable_questions()).path is not None:
        held_out.append(_tokenized_questions(questions, data, tokenizer, images))
    shares = data.held_out_shares
    if len(set(shares)) > 1:  # a row may be in two sources: one trains on it, the other holds it out
        for source, table, share in zip(data.sources, tables, shares, strict=True):
            mask = is_on_side(Side.held_out, table.held_out_by, share)
            held_out.append(_HeldOut("data.sources", source, table.held_out_by, table, mask))
    trained = [is_on_side(Side.train, table.held_out_by, share) for table, share in zip(tables, shares, strict=True)]
    every = [held.hashes if held.mask is None else held.hashes[held.mask] for held in held_out]
    hashes = np.concatenate([np.zeros(0, np.uint64), *every])
    both = [np.isin(table.held_out_by, hashes) & mask for table, mask in zip(tables, trained, strict=True)]
    if any(mask.any() for mask in both) and data.on_overlap is OnOverlap.error:
        raise _overlap_error(data, tables, both, held_out)
    return np.unique(np.concatenate([table.digests[mask] for table, mask in zip(tables, both, strict=True)]))


def _tokenized_questions(
    questions: QuestionsConfig, data: DataConfig, tokenizer: Any, images: ImageProcessor | None
) -> _HeldOut:
    assert questions.path is not None
    source = SourceConfig(path=questions.path, limit=questions.limit)
    opened = open_source(source)
    opened.keeps_images = images is not None
    encoder = Encoder.of(data, tokenizer, opened.format(), images)
    encoder.folders = opened.folders
    hashes = [np.zeros(0, np.uint64)]
    for shard in (encode_shard(shard, encoder) for shard in opened.shards()):
        of_documents = shard.digests if shard.prompts is None else shard.prompts
        sizes = np.ones(len(of_documents), np.int64) if shard.group_sizes is None else shard.group_sizes
        hashes.append(of_documents[np.cumsum(sizes) - sizes])
    return _HeldOut("data.questions", source, np.concatenate(hashes))


def _overlap_error(
    data: DataConfig, tables: Sequence[TokenTable], both: Sequence[np.ndarray], held_out: Sequence[_HeldOut]
) -> DataError:
    """The error for rows that are trained on and held out. `both`: for each table, a mask of these documents."""
    common = np.concatenate([table.held_out_by[mask] for table, mask in zip(tables, both, strict=True)])
    by_prompt = any(table.prompts is not None for table in tables)
    count = sum(int(mask.sum()) for mask in both)
    lines = []
    for held in held_out:
        shared = np.isin(held.hashes, common) & (True if held.mask is None else held.mask)
        if not shared.any():
            continue
        pairs = []
        for document in np.flatnonzero(shared)[:MAX_SHOWN_PAIRS]:
            copies = (
                (source, table, int(np.argmax(copy)))
                for source, table, mask in zip(data.sources, tables, both, strict=True)
                if (copy := mask & (table.held_out_by == held.hashes[document])).any()
            )
            places = (place_of_row(held.source, held.table, int(document), data), place_of_row(*next(copies), data))
            pairs.append((" has the prompt of " if by_prompt else " is ").join(places))
        more = f", and {shared.sum() - MAX_SHOWN_PAIRS:,} more" if shared.sum() > MAX_SHOWN_PAIRS else ""
        lines.append(
            f"  {shared.sum():,} of {len(shared):,} rows of {held.key} ({held.source.path}): {', '.join(pairs)}{more}"
        )
    are = "1 row of data.sources is" if count == 1 else f"{count:,} rows of data.sources are"
    if by_prompt:
        are = "The prompt of " + are if count == 1 else "The prompts of " + are
    return DataError(
        f"{are} held out as well, so an evaluation would tell what "
        "the model remembers:\n" + "\n".join(lines) + "\nSet data.on_overlap=drop to leave them out of training (keep "
        "trains on them all the same); or hold out other rows: data.eval_sources=[] data.eval_fraction=0.05, or two "
        "slices such as `split: train[:95%]` and `split: train[95%:]`."
    )


def notes_on_copies(tables: Sequence[TokenTable], used: Sequence[np.ndarray]) -> Iterator[str]:
    """A sentence for each table with copies of a document, and a sentence about documents in several tables. `used`:
    for each table, a mask of the groups that are used, bool."""
    uniques = []
    for table, is_used in zip(tables, used, strict=True):
        digests = table.by_group.digests[is_used]
        if table.whole is not None:  # the pieces of a chat have the same digest, so count whole chats
            whole = table.by_row.digests
            digests = whole[np.isin(whole, digests)]
        unique, times = np.unique(digests, return_counts=True)
        uniques.append(unique)
        if repeated := int(times.sum()) - len(unique):
            yield (
                f"{table.name}: {repeated:,} of {times.sum():,} {table.format.noun} are copies of others; the most "
                f"frequent occurs {times.max():,} times."
            )
    if shared := sum(map(len, uniques)) - len(np.unique(np.concatenate(uniques))):
        yield f"{shared:,} documents are in several of data.sources; the model learns them from each source."
