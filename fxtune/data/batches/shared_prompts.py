"""Pairs of answers whose prompt lies in a row once: [prompt, chosen answer] [last token of prompt, rejected answer].

Both answers begin with the same prompt, so every layer would compute the prompt twice. Here the second document has
only the rest. Its positions go on from the prompt. Its queries attend to copies of the prompt's keys and values, which
lie before the document's keys and values (techniques/attention/packed.py). So queries and keys have different bounds,
and no mask is needed. The last token of the prompt is computed for both answers, because it predicts the first token
of each answer, and a position has at most one target.

Rows of whole documents give the same numbers (arXiv 2410.20305). Tables hold whole documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxtune.data.batches.segments import before_images, places_within
from fxtune.data.tokenized.table import TokenTable

_BLOCK = 1 << 20
"""Tokens that are compared at a time."""


@dataclass(frozen=True)
class Keys:
    """The keys and values of a micro-batch's documents, taken from its tokens."""

    cu_seqlens: np.ndarray
    """int32 [slots + 1]: where the keys of each document begin; the rest repeats their number."""
    index: np.ndarray
    """int64 [capacity]: the flattened token of each key; 0 after the last document's."""
    copies: np.ndarray
    """int64 [2, tokens]: the key of each token in its own document, and in another one; -1 without another one."""


def shared_tokens(table: TokenTable) -> np.ndarray:
    """How many of its first tokens each document shares with the first document of its group, int64 [documents]: for
    the second document of a group one less than the unlearned tokens that both begin with, or fewer, so that the rest
    does not begin inside an image; else 0."""
    offsets, groups = np.asarray(table.offsets, np.int64), np.asarray(table.groups)
    shared, first = np.zeros(len(offsets) - 1, np.int64), groups[:-1][np.diff(groups) > 1]
    length = np.minimum(np.diff(offsets)[first], np.diff(offsets)[first + 1])
    ends, begin = np.cumsum(length), 0
    while begin < len(first):
        end = max(int(np.searchsorted(ends, ends[begin] - length[begin] + _BLOCK, side="right")), begin + 1)
        size = length[begin:end]
        within, of = places_within(size), np.repeat(first[begin:end], size)
        in_first, in_second = offsets[of] + within, offsets[of + 1] + within
        differs = table.ids[in_first] != table.ids[in_second]
        differs |= table.supervised[in_first] | table.supervised[in_second]
        if table.images is not None:  # images of one size have the same ids
            differs |= _image_digests(table, in_first) != _image_digests(table, in_second)
        borders, start = np.flatnonzero(differs), np.cumsum(size) - size
        prompt = np.append(borders, len(differs))[np.searchsorted(borders, start)] - start
        shared[first[begin:end] + 1] = np.maximum(np.minimum(prompt, size) - 1, 0)
        begin = end
    return before_images(table, offsets[:-1] + shared) - offsets[:-1]


def _image_digests(table: TokenTable, positions: np.ndarray) -> np.ndarray:
    """uint64: for each position in the table's `ids` the hash of the image whose first token is there; 0 without."""
    assert table.images is not None
    at = np.minimum(np.searchsorted(table.images["start"], positions), len(table.images) - 1)
    return np.where(table.images["start"][at] == positions, table.images["digest"][at], np.uint64(0))


def keys_of(cu_seqlens: np.ndarray, shared: np.ndarray, capacity: int) -> Keys:
    """The keys of the documents between `cu_seqlens`, int [slots + 1]. `shared`, int64 [slots]: how many keys of a
    document are tokens of the document before it."""
    start = cu_seqlens[:-1].astype(np.int64)
    length = shared + np.diff(cu_seqlens)
    of, within = np.repeat(np.arange(len(start)), length), places_within(length)
    is_own = within >= shared[of]
    index = np.where(is_own, start[of] - shared[of], start[of - 1]) + within
    copies = np.full((2, int(cu_seqlens[-1])), -1)
    copies[0, index[is_own]] = np.flatnonzero(is_own)
    copies[1, index[~is_own]] = np.flatnonzero(~is_own)
    bounds = np.concatenate([[0], np.cumsum(length)]).astype(np.int32)
    return Keys(bounds, np.pad(index, (0, capacity - len(index))), copies)
