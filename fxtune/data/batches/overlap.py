"""Rows that are both trained on and held out, found by their tokens.

With such a row an evaluation measures what the model remembers. Two rows are the same if their token ids have the same
digest, which the tables store; their files, names and formats may differ.
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

MAX_SHOWN_PAIRS = 3
"""Pairs of rows that a message names for each held-out source."""


@dataclass
class _HeldOut:
    """A source with held-out rows: a part of a training source, a source for evaluation, or the questions."""

    key: str
    """The recipe's key that names the source."""
    source: SourceConfig
    digests: np.ndarray
    table: TokenTable | None = None
    mask: np.ndarray | None = None
    """Which documents of the source are held out, bool; None: all."""

    def held_digests(self) -> np.ndarray:
        return self.digests if self.mask is None else self.digests[self.mask]


def require_no_overlap(
    data: DataConfig, tables: Sequence[TokenTable], eval_tables: Sequence[TokenTable], tokenizer: Any
) -> np.ndarray:
    """Digests of documents to leave out of training, sorted uint64. `tables` are of data.sources, `eval_tables` of
    data.eval_sources.

    Raises DataError if there are such documents and data.on_overlap=error.
    """
    if data.on_overlap is OnOverlap.keep:
        return np.zeros(0, np.uint64)
    tables, eval_tables = [table.by_row for table in tables], [table.by_row for table in eval_tables]
    held_out = [
        _HeldOut("data.eval_sources", source, table.digests, table)
        for source, table in zip(data.eval_sources, eval_tables, strict=False)
    ]
    if (questions := data.applicable_questions()).path is not None:
        held_out.append(_tokenized_questions(questions, data, tokenizer))
    shares = data.held_out_shares
    if len(set(shares)) > 1:  # a row may be in two sources, trained on in one and held out in the other
        for source, table, share in zip(data.sources, tables, shares, strict=True):
            mask = is_on_side(Side.held_out, table.digests, share)
            held_out.append(_HeldOut("data.sources", source, table.digests, table, mask))
    trained = [is_on_side(Side.train, table.digests, share) for table, share in zip(tables, shares, strict=True)]
    found = [
        np.intersect1d(table.digests[mask], held.held_digests())
        for table, mask in zip(tables, trained, strict=True)
        for held in held_out
    ]
    common = np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))
    if len(common) and data.on_overlap is OnOverlap.error:
        raise _overlap_error(data, tables, trained, held_out, common)
    return common


def _tokenized_questions(questions: QuestionsConfig, data: DataConfig, tokenizer: Any) -> _HeldOut:
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
    trained: Sequence[np.ndarray],
    held_out: Sequence[_HeldOut],
    common: np.ndarray,
) -> DataError:
    """The error for rows that are trained on and held out: how many, the first pairs by file and line, and the keys
    that keep the two apart. `trained`: for each table, which documents are trained on."""
    both = [np.isin(table.digests, common) & mask for table, mask in zip(tables, trained, strict=True)]
    count = sum(int(mask.sum()) for mask in both)
    lines = []
    for held in held_out:
        shared = np.isin(held.digests, common) & (True if held.mask is None else held.mask)
        if not shared.any():
            continue
        pairs = []
        for document in np.flatnonzero(shared)[:MAX_SHOWN_PAIRS]:
            copies = (
                (source, table, int(np.argmax(copy)))
                for source, table, mask in zip(data.sources, tables, both, strict=True)
                if (copy := mask & (table.digests == held.digests[document])).any()
            )
            places = _place(held.source, held.table, int(document), data), _place(*next(copies), data)
            pairs.append(" is ".join(places))
        more = f", and {shared.sum() - MAX_SHOWN_PAIRS:,} more" if shared.sum() > MAX_SHOWN_PAIRS else ""
        lines.append(
            f"  {shared.sum():,} of {len(shared):,} rows of {held.key} ({held.source.path}): {', '.join(pairs)}{more}"
        )
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return DataError(
        f"{rows} of data.sources {'is' if count == 1 else 'are'} held out as well, so an evaluation would tell what "
        "the model remembers:\n" + "\n".join(lines) + "\nSet data.on_overlap=drop to leave them out of training (keep "
        "trains on them all the same); or hold out other rows: data.eval_sources=[] data.eval_fraction=0.05, or two "
        "slices such as `split: train[:95%]` and `split: train[95%:]`."
    )


def _place(source: SourceConfig, table: TokenTable | None, document: int, data: DataConfig) -> str:
    """File and line of a document."""
    return next(islice(usable_rows(source, table, data), document, None)).where


def notes_on_copies(tables: Sequence[TokenTable], used: Sequence[np.ndarray]) -> Iterator[str]:
    """A sentence for each table with copies of a document, and a sentence on documents that several tables have.

    `used`: for each table, which of its groups are used, bool.
    """
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
                f"{table.name}: {repeated:,} of {times.sum():,} {table.noun} are copies of others; the most frequent "
                f"occurs {times.max():,} times."
            )
    if shared := sum(map(len, uniques)) - len(np.unique(np.concatenate(uniques))):
        yield f"{shared:,} documents are in several of data.sources; the model learns them from each source."
