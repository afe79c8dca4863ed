"""Gives each answer of a table a mismatched twin: its prompt with the answer of another row.

KTO (arXiv:2402.01306) measures with the twins how far the model has moved from its reference. The twin is the second
document of the answer's group and has no label. So packing, hold-outs and resuming keep answer and twin together. The
other row is the next row with another prompt and another answer, so each run has the same table, whatever its batches.

With data.on_long=truncate, both documents lose the same tokens at the beginning of the prompt until they fit. A row is
left out if its two answers do not fit.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fxtune.data.chat.encode import Document
from fxtune.data.chat.pairs import shortened
from fxtune.data.chat.split import SplitCounts
from fxtune.data.tokenized import cache
from fxtune.data.tokenized.table import DATA_FILES, EncodedShard, ShardBuilder, TableWriter, TokenTable, is_intact
from fxtune.errors import DataError, writing

GROUPS_AT_ONCE = 4096
"""Groups that are written together."""
VERSION = 3


def with_mismatched(table: TokenTable, longest: int | None = None, packing: bool = True) -> TokenTable:
    """Give each document of `table` its twin, or take the result from the cache. In `table` a group is one document.

    `longest`: tokens of a row of a batch. With `packing` the row holds both documents of a group; otherwise each
    document has a row. Groups that do not fit lose the beginning of their prompt. None: prompts stay as they are.

    Raises DataError if all answers are the same or no group fits, StorageError if the table cannot be written.
    """
    assert len(table.groups) == len(table) + 1
    # The twins are made from whole prompts, so that the lost tokens of a row are counted once.
    whole = table.whole or table
    name = f"{whole.folder.name}-mismatched-{VERSION}"
    if longest is not None:
        name += f"-{longest}{'' if packing else '-each'}"
    folder = whole.folder.with_name(name)
    place = "or set data.cache_dir to a folder that can be written"
    with writing(f"Tokens of {table.name} cannot be stored in {folder}", place):
        cache.require_usable_paths(folder, [cache.META, *DATA_FILES])
        with cache.locked(folder, table.name):
            if not is_intact(folder, table.name):
                _build(folder, whole, longest, packing)
    found = TokenTable(folder, table.name, image_processor=table.image_processor)
    found.whole, found.bad_rows = table.by_row, table.bad_rows
    return found


def _build(folder: Path, table: TokenTable, longest: int | None, packing: bool) -> None:
    prompts = _prompt_lengths(table)
    rows = np.arange(len(table))
    if longest is not None:
        # An answer that does not fit into a row of a batch is not used in a twin either.
        needed = np.diff(table.offsets) - prompts + max(len(table.beginning), 1)
        rows = rows[needed <= longest]
    twins = rows[_mismatched_rows(table, rows, prompts)] if len(rows) else rows
    with cache.staged(folder) as staging, TableWriter(staging, []) as writer:
        writer.split += SplitCounts(chats=len(table) - len(rows), dropped=len(table) - len(rows))
        for start in range(0, len(rows), GROUPS_AT_ONCE):
            part = slice(start, start + GROUPS_AT_ONCE)
            writer.append(_shard(table, rows[part], twins[part], prompts, longest, packing))
        if not writer.documents:
            raise DataError(
                f"{table.name}: in each of its {len(table):,} rows the answer and the mismatched answer of "
                f"objective=kto, with the images of the prompt, are longer than data.sequence_length={longest:,}. "
                "Raise it."
            )
        writer.finish(name=table.name, format=table.format.name, beginning=table.beginning)


def _shard(
    table: TokenTable, rows: np.ndarray, twins: np.ndarray, prompts: np.ndarray, longest: int | None, packing: bool
) -> EncodedShard:
    """The groups of `rows`. `twins`: for each row, the row with the other answer. `prompts`: see _prompt_lengths()."""
    built, split = ShardBuilder(), SplitCounts()
    assert table.prompts is not None
    for row, twin in zip(rows.tolist(), twins.tolist(), strict=True):
        begin, end = int(table.offsets[row]), int(table.offsets[row + 1])
        border = begin + int(prompts[row])
        other = slice(int(table.offsets[twin] + prompts[twin]), int(table.offsets[twin + 1]))
        own_images = table.placed_images(begin, end - begin)
        of_prompt = [image for image in own_images if image.end <= border - begin]
        of_other = table.placed_images(other.start, other.stop - other.start)
        of_other = [image._replace(start=image.start + border - begin) for image in of_other]
        own, mismatched = (
            [np.concatenate([array[begin:border], array[answer]]).tolist() for array in (table.ids, table.supervised)]
            for answer in (slice(border, end), other)
        )
        placed = ((own, tuple(own_images)), (mismatched, (*of_prompt, *of_other)))
        documents = [Document(tokens, marks, images=images) for (tokens, marks), images in placed]
        lengths = [len(document.ids) for document in documents]
        if longest is not None and (sum if packing else max)(lengths) > longest:
            shorter = shortened(documents, longest, packing, table.beginning)
            if shorter is None:
                split += SplitCounts(chats=1, dropped=1)
                continue
            lost = lengths[0] - len(shorter[0].ids)
            split += SplitCounts(chats=1, pieces=1, truncated=1, lost_tokens=lost)
            documents = shorter
        label = math.nan if table.labels is None else float(table.labels[row])
        built.add(documents, int(table.digests[row]), [label, math.nan], int(table.prompts[row]))
    return built.shard(split=split)


def _prompt_lengths(table: TokenTable) -> np.ndarray:
    """The number of tokens before the first supervised token of each document, int64 [documents]."""
    targets = np.flatnonzero(table.supervised)
    return np.asarray(targets[np.searchsorted(targets, table.offsets[:-1])] - table.offsets[:-1])


def _mismatched_rows(table: TokenTable, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each of `rows`, the index in `rows` of the next row with another prompt and another answer, int64 [rows]. If
    there is no such row, the next row with another answer is taken. After the last row, the search goes on at the
    first. `lengths`: see _prompt_lengths(). Raises DataError if all answers are the same."""
    spans = zip(table.offsets[rows] + lengths[rows], table.offsets[rows + 1], strict=True)
    digests = (blake2b(table.ids[begin:end].tobytes(), digest_size=8).digest() for begin, end in spans)
    answers = np.frombuffer(b"".join(digests), "<u8")
    assert table.prompts is not None
    prompts = table.prompts[rows]
    after_answer, after_prompt = _next_change(answers), _next_change(prompts)
    if after_answer is None:
        raise DataError(
            f"{table.name}: all answers are the same, and objective=kto compares each with another row's answer. Add "
            "rows with other answers."
        )
    if after_prompt is None:
        return after_answer
    found, waiting, passed = after_answer.copy(), np.arange(len(rows)), np.zeros(len(rows), np.int64)
    place = waiting.copy()
    while len(waiting):
        same_prompt = prompts[place] == prompts[waiting]
        later = np.where(same_prompt, after_prompt[place], after_answer[place])
        is_found = ~same_prompt & (answers[place] != answers[waiting])
        found[waiting[is_found]] = place[is_found]
        passed = passed + (later - place) % len(rows)
        # A row that was compared with all others keeps the next row with another answer.
        goes_on = ~is_found & (passed < len(rows))
        waiting, place, passed = waiting[goes_on], later[goes_on], passed[goes_on]
    return found


def _next_change(values: np.ndarray) -> np.ndarray | None:
    """For each of `values`, the index of the next value that differs, int64 [values]. After the last value, the search
    goes on at the first. None if all values are equal."""
    changes = np.flatnonzero(values != np.roll(values, -1))
    if not len(changes):
        return None
    at = np.searchsorted(changes, np.arange(len(values)))
    return np.asarray((changes[at % len(changes)] + 1) % len(values))
