"""Rows that are both trained on and held out, found by their tokens.

With such a row an evaluation measures what the model remembers. The row is found by the digest of its token ids, which
the tables store, so it may be in another file, under another name or in another format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from fxtune.data.batches.segments import Side, is_on_side
from fxtune.data.chat.encode import Encoder
from fxtune.data.config import DataConfig, OnOverlap, QuestionsConfig, SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import encode_shard
from fxtune.errors import DataError

SHOWN = 3
"""Pairs of rows that a message names."""


@dataclass
class _HeldOut:
    """The rows of a held-out source, or of the questions."""

    key: str
    source: SourceConfig
    digests: np.ndarray
    table: TokenTable | None = None
    held: np.ndarray | None = None
    """Which of its documents are held out, bool; None: all."""


def require_no_overlap(
    data: DataConfig, tables: Sequence[TokenTable], held_out: Sequence[TokenTable], tokenizer: Any
) -> np.ndarray:
    """Digests of documents to leave out of training, sorted uint64. `tables`: of data.sources; `held_out`: of
    data.eval_sources, where there are any.

    Raises DataError if there are such documents and data.on_overlap=error.
    """
    if data.on_overlap is OnOverlap.keep:
        return np.zeros(0, np.uint64)
    tables, held_out = ([table.by_row for table in tables_of_side] for tables_of_side in (tables, held_out))
    sides = [
        _HeldOut("data.eval_sources", source, table.digests, table)
        for source, table in zip(data.eval_sources, held_out, strict=False)
    ]
    if (questions := data.own_questions()).path is not None:
        sides.append(_questions(questions, data, tokenizer))
    shares = data.held_out_shares
    if len(set(shares)) > 1:  # a row of two sources may be on both sides
        for source, table, share in zip(data.sources, tables, shares, strict=True):
            held = is_on_side(Side.held_out, table.digests, share)
            sides.append(_HeldOut("data.sources", source, table.digests, table, held))
    trained = [is_on_side(Side.train, table.digests, share) for table, share in zip(tables, shares, strict=True)]
    found = [
        np.intersect1d(table.digests[mask], side.digests if side.held is None else side.digests[side.held])
        for table, mask in zip(tables, trained, strict=True)
        for side in sides
    ]
    common = np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))
    if len(common) and data.on_overlap is OnOverlap.error:
        raise _overlap_error(data, tables, trained, sides, common)
    return common


def _questions(questions: QuestionsConfig, data: DataConfig, tokenizer: Any) -> _HeldOut:
    assert questions.path is not None
    source = SourceConfig(path=questions.path, limit=questions.limit)
    opened = open_source(source)
    encoder = Encoder(
        tokenizer,
        opened.format(),
        data.chat_template,
        data.system,
        variables=data.chat_template_kwargs,
        template_time=data.template_time,
    )
    digests = [encode_shard(shard, encoder).digests for shard in opened.shards()]
    return _HeldOut("data.questions", source, np.concatenate([np.zeros(0, np.uint64), *digests]))


def _overlap_error(
    data: DataConfig,
    tables: Sequence[TokenTable],
    masks: Sequence[np.ndarray],
    held_out: Sequence[_HeldOut],
    common: np.ndarray,
) -> DataError:
    """The error for rows on both sides: how many, the first pairs by file and line, and the keys that settle it.
    `masks`: for each table, which of its documents are trained on."""
    both = [np.isin(table.digests, common) & mask for table, mask in zip(tables, masks, strict=True)]
    trained = sum(int(mask.sum()) for mask in both)
    lines = []
    for side in held_out:
        shared = np.isin(side.digests, common) & (True if side.held is None else side.held)
        if not shared.any():
            continue
        pairs = []
        for index in np.flatnonzero(shared)[:SHOWN]:
            same = [mask & (table.digests == side.digests[index]) for table, mask in zip(tables, both, strict=True)]
            number = next(number for number, mask in enumerate(same) if mask.any())
            table, other = tables[number], int(np.argmax(same[number]))
            places = (
                _place(side.source, side.table, int(index), data),
                _place(data.sources[number], table, other, data),
            )
            pairs.append(" is ".join(places))
        more = f", and {shared.sum() - SHOWN:,} more" if shared.sum() > SHOWN else ""
        lines.append(
            f"  {shared.sum():,} of {len(shared):,} rows of {side.key} ({side.source.path}): {', '.join(pairs)}{more}"
        )
    rows = "1 row" if trained == 1 else f"{trained:,} rows"
    return DataError(
        f"{rows} of data.sources {'is' if trained == 1 else 'are'} held out as well, so an evaluation would tell what "
        "the model remembers:\n" + "\n".join(lines) + "\nSet data.on_overlap=drop to leave them out of training (keep "
        "trains on them all the same); or hold out other rows: data.eval_sources=[] data.eval_fraction=0.05, or two "
        "slices such as `split: train[:95%]` and `split: train[95%:]`."
    )


def _place(source: SourceConfig, table: TokenTable | None, document: int, data: DataConfig) -> str:
    """File and line of a document."""
    return next(islice(usable_rows(source, table, data), document, None)).where


def copies(tables: Sequence[TokenTable], used: Sequence[np.ndarray]) -> Iterator[str]:
    """A sentence for each table with documents that repeat another one, and one for documents in several tables.

    `used`: for each table, which of its groups are used, bool.
    """
    uniques = []
    for table, chosen in zip(tables, used, strict=True):
        digests = table.by_group.digests[chosen]
        if table.whole is not None:  # the pieces of a chat are no copies
            whole = table.by_row.digests
            digests = whole[np.isin(whole, digests)]
        unique, times = np.unique(digests, return_counts=True)
        uniques.append(unique)
        if repeated := int(times.sum()) - len(unique):
            yield (
                f"{table.name}: {repeated:,} of {times.sum():,} {table.noun} repeat another one; the most frequent is "
                f"there {times.max():,} times."
            )
    if shared := sum(map(len, uniques)) - len(np.unique(np.concatenate(uniques))):
        yield f"{shared:,} documents are in several of data.sources, and are learned from each."
