"""Groups of answers with their prompt once in a row: [prompt, first answer] [last token of prompt, second answer] ...

The answers follow the same prompt, so every layer would compute the prompt for each. Here each later document begins
with the last token of the prompt, at that token's position. Its queries attend to copies of the prompt's keys and
values, which lie before the document's own keys and values (techniques/attention/packed.py). So queries and keys have
different bounds, and no mask is needed. The last token of the prompt is computed for each answer, because it predicts
the first token of each answer, and a position has at most one target.

Rows of whole documents give the same numbers (arXiv 2410.20305). Token tables always hold whole documents.
"""

from __future__ import annotations

import numpy as np

from fxtune.data.batches.segments import before_images, places_within
from fxtune.data.tokenized.table import TokenTable

_BLOCK = 1 << 20
"""Tokens that are compared at a time."""


def shared_tokens(table: TokenTable) -> np.ndarray:
    """The number of first tokens that a document shares with the first document of its group, int64 [documents]. A
    later document of a group shares the unlearned tokens with which both begin, except the last one, or fewer tokens
    if the rest would begin inside an image. The first document of a group shares none."""
    offsets, groups = np.asarray(table.offsets, np.int64), np.asarray(table.groups)
    shared, group_first = np.zeros(len(offsets) - 1, np.int64), np.repeat(groups[:-1], np.diff(groups))
    later = np.flatnonzero(group_first < np.arange(len(shared)))
    first = group_first[later]
    length = np.minimum(np.diff(offsets)[first], np.diff(offsets)[later])
    ends, begin = np.cumsum(length), 0
    while begin < len(first):
        end = max(int(np.searchsorted(ends, ends[begin] - length[begin] + _BLOCK, side="right")), begin + 1)
        size = length[begin:end]
        within = places_within(size)
        in_first, in_later = (np.repeat(offsets[each[begin:end]], size) + within for each in (first, later))
        differs = table.ids[in_first] != table.ids[in_later]
        differs |= table.supervised[in_first] | table.supervised[in_later]
        if table.images is not None:  # images of one size have the same ids
            differs |= _image_digests(table, in_first) != _image_digests(table, in_later)
        borders, start = np.flatnonzero(differs), np.cumsum(size) - size
        prompt = np.append(borders, len(differs))[np.searchsorted(borders, start)] - start
        shared[later[begin:end]] = np.maximum(np.minimum(prompt, size) - 1, 0)
        begin = end
    return before_images(table, offsets[:-1] + shared) - offsets[:-1]


def _image_digests(table: TokenTable, positions: np.ndarray) -> np.ndarray:
    """For each of `positions` in the table's `ids`, the hash of the image that begins there, or 0; uint64."""
    assert table.images is not None
    at = np.minimum(np.searchsorted(table.images["start"], positions), len(table.images) - 1)
    return np.where(table.images["start"][at] == positions, table.images["digest"][at], np.uint64(0))


def keys_of(
    cu_seqlens: np.ndarray, shared: np.ndarray, first: np.ndarray, place: np.ndarray, most: int, capacity: int
) -> dict[str, np.ndarray]:
    """The fields of Batch for the keys of the documents with the bounds `cu_seqlens`, int [slots + 1]. For each
    document, int64 [slots]: `shared`, the number of its keys that are tokens of the document `first`, and `place`, its
    place in its group. `most`: the number of documents in the largest group. `capacity`: the size of `key_index`;
    unused entries at its end are 0."""
    start = cu_seqlens[:-1].astype(np.int64)
    length = shared + np.diff(cu_seqlens)
    of, within = np.repeat(np.arange(len(start)), length), places_within(length)
    is_own = within >= shared[of]
    index = np.where(is_own, start[of] - shared[of], start[first[of]]) + within
    copies = np.full((most, int(cu_seqlens[-1])), -1)
    copies[np.where(is_own, 0, place[of]), index] = np.arange(len(index))
    bounds = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
    return dict(cu_seqlens_k=bounds, key_index=np.pad(index, (0, capacity - len(index))), key_copies=copies)
