"""A table in which each answer has a mismatched twin: its prompt with the answer of another row.

KTO (arXiv:2402.01306) measures how far the model has moved from its reference on such pairs. The twin is the second
document of the answer's group, without a label, so that packing, hold-outs and resuming move both together. The other
row is the next one with another answer, so the table is the same in every run, whatever its batches.
"""

from __future__ import annotations

import math
import shutil
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fxtune.data.tokenized import cache
from fxtune.data.tokenized.table import DATA_FILES, EncodedShard, TableWriter, TokenTable, read_meta
from fxtune.errors import DataError, not_written

GROUPS_AT_ONCE = 4096
"""Groups that are written together."""
VERSION = 1


def with_mismatched(table: TokenTable) -> TokenTable:
    """`table`, whose groups are single documents, with the twin of each; from the cache if it is there.

    Raises DataError if all answers are the same, StorageError if the table cannot be written.
    """
    assert len(table.groups) == len(table) + 1
    folder = table.folder.with_name(f"{table.folder.name}-mismatched-{VERSION}")
    try:
        cache.require_usable_paths(folder, [cache.META, *DATA_FILES])
        with cache.locked(folder, table.name):
            if read_meta(folder) is None:
                _build(folder, table)
    except OSError as problem:
        place = "or set data.cache_dir to a folder that can be written"
        raise not_written(f"Tokens of {table.name} cannot be stored in {folder}", problem, place) from problem
    found = TokenTable(folder, table.name)
    found.whole, found.bad_rows = table.by_row, table.bad_rows
    return found


def _build(folder: Path, table: TokenTable) -> None:
    first = table.offsets[:-1] + _prompt_lengths(table)
    """Position of each answer's first token."""
    other = _next_with_another_answer(table, first)
    staging = cache.staging_folder(folder)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with TableWriter(staging, []) as writer:
            for start in range(0, len(table), GROUPS_AT_ONCE):
                rows = range(start, min(start + GROUPS_AT_ONCE, len(table)))
                writer.append(_shard(table, first, other, rows))
            writer.finish(name=table.name, format=table.format.name)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _shard(table: TokenTable, first: np.ndarray, other: np.ndarray, rows: range) -> EncodedShard:
    offsets, spans = table.offsets, []
    for row in rows:
        twin = other[row]
        spans += [
            [(offsets[row], offsets[row + 1])],
            [(offsets[row], first[row]), (first[twin], offsets[twin + 1])],
        ]
    ids, supervised = (
        np.concatenate([array[begin:end] for document in spans for begin, end in document])
        for array in (table.ids, table.supervised)
    )
    labels = np.full(2 * len(rows), math.nan, np.float32)
    if table.labels is not None:
        labels[::2] = table.labels[rows.start : rows.stop]
    return EncodedShard(
        ids=ids,
        supervised=supervised,
        lengths=np.array([sum(end - begin for begin, end in document) for document in spans], np.int64),
        digests=np.repeat(table.digests[rows.start : rows.stop], 2),
        group_sizes=np.full(len(rows), 2, np.int64),
        labels=labels,
    )


def _prompt_lengths(table: TokenTable) -> np.ndarray:
    """Tokens of each document before its first supervised token, int64 [documents]."""
    targets = np.flatnonzero(table.supervised)
    return targets[np.searchsorted(targets, table.offsets[:-1])] - table.offsets[:-1]


def _next_with_another_answer(table: TokenTable, first: np.ndarray) -> np.ndarray:
    """For each document, the next one whose answer differs, int64 [documents]; after the last comes the first."""
    answers = np.array(
        [
            int.from_bytes(blake2b(table.ids[begin:end].tobytes(), digest_size=8).digest(), "little")
            for begin, end in zip(first, table.offsets[1:], strict=True)
        ],
        np.uint64,
    )
    # Where the answer changes from one document to the next; documents up to there have the next one as their twin.
    changes = np.flatnonzero(answers != np.roll(answers, -1))
    if not len(changes):
        raise DataError(
            f"{table.name}: all answers are the same, and objective=kto compares each with another row's answer. Add "
            "rows with other answers."
        )
    at = np.searchsorted(changes, np.arange(len(answers)))
    return (changes[at % len(changes)] + 1) % len(answers)
