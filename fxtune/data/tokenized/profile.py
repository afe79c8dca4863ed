"""Statistics of documents: lengths, share of supervised tokens, scripts of letters, and share of each token id.

Scripts stand for languages. The Unicode name of a letter names its script, so no model is needed. Scripts distinguish
Greek from Korean, but not French from German.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fxtune.data.tokenized.table import TokenTable

PERCENTILES = (5, 50, 95)
_DECODED = 512
"""Letters are counted only in the first _DECODED tokens of each document."""


@dataclass(frozen=True)
class Profile:
    documents: int
    lengths: tuple[int, ...]
    """Number of tokens of a document at each of PERCENTILES."""
    supervised: float
    """Share of the tokens that are supervised."""
    scripts: dict[str, float]
    """Share of each script among the letters, most frequent script first."""
    tokens: np.ndarray
    """float64 [largest id + 1]: share of each token id among the tokens."""

    def distance(self, other: Profile) -> float:
        """Total variation distance between the shares of token ids: 0 if they are equal, 1 if no id occurs in both."""
        size = max(len(self.tokens), len(other.tokens))
        own, others = (np.pad(side.tokens, (0, size - len(side.tokens))) for side in (self, other))
        return float(np.abs(own - others).sum() / 2)


def profile(tables: Sequence[TokenTable], digests: np.ndarray, tokenizer: Any) -> Profile:
    """The profile of the documents with these digests. A digest counts once. There must be at least one document."""
    left = {int(digest) for digest in digests}
    lengths, supervised, letters = list[int](), 0, Counter[str]()
    ids = [np.zeros(0, np.int32)]
    for table in tables:
        table = table.by_row
        for document in np.flatnonzero(np.isin(table.digests, digests)).tolist():
            digest = int(table.digests[document])
            if digest not in left:
                continue
            left.remove(digest)
            span = slice(int(table.offsets[document]), int(table.offsets[document + 1]))
            ids.append(table.ids[span])
            lengths.append(len(ids[-1]))
            supervised += int(table.supervised[span].sum())
            text = tokenizer.decode(ids[-1][:_DECODED].tolist(), skip_special_tokens=True)
            letters.update(script(letter) for letter in text if letter.isalpha())
    counts = np.bincount(np.concatenate(ids)).astype(np.float64)
    shares = {name: count / letters.total() for name, count in letters.most_common()}
    percentiles = tuple(int(length) for length in np.percentile(lengths, PERCENTILES, method="inverted_cdf"))
    return Profile(len(lengths), percentiles, supervised / sum(lengths), shares, counts / counts.sum())


@lru_cache(maxsize=100_000)
def script(letter: str) -> str:
    """The script of a letter, by its Unicode name: Latin, Cyrillic, Greek, Arabic, Cjk, Hangul, ..."""
    return unicodedata.name(letter, "other").split()[0].capitalize()
