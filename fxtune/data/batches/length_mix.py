"""Short and long documents together: the order of rows in which every step has the same share of long documents' tokens.

A model that is tuned on long documents alone forgets how short ones go, and one that sees them in turns is pulled to and fro.
So each optimizer step has the share that `data.mix.long_share` declares. Two things bring that about:

- An epoch has as many tokens as the data, and draws the declared share of them from the long documents and the rest from the
  short ones. Each kind is an endless line of passes (stream.py), so no document comes again before all of its kind have come;
  the kind that there is too little of comes more often, and `Plan.notes()` says how often.
- The epoch's rows are put in an order whose every stretch is balanced, wherever a step begins and however long it is. In one
  dimension that is simple: while what was taken so far has too much of long documents, take a row with too little, else one
  with too much. (Steinitz 1913 has the theorem for any dimension.)

How close: any stretch of rows is within one row's tokens of the epoch's share, so a step of G rows is within 1/G of it. No
order does better where rows hold nothing but one long document. Nothing drifts: over a run the share is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LengthMix:
    """What is asked for, as part of what decides the rows."""

    long_share: float
    """Share of the tokens, above 0 and below 1."""
    threshold: int
    """Segments of more tokens are long."""


def balanced_order(long: np.ndarray, tokens: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Reorder rows so that each stretch of them has about the share of long tokens that all of them have.

    `long` and `tokens`: int64 [rows], a row's tokens in long documents and in all. `order`: a permutation of the rows; among
    rows that serve equally its first comes first. Returns a permutation, int64 [rows]. For any stretch of it the sum of
    `long` is less than max(tokens) away from the sum of `tokens` times sum(long) / sum(tokens).
    """
    # In units of 1 / sum(tokens), so that it is exact; positive: more than the share.
    excess = long * int(tokens.sum()) - tokens * int(long.sum())
    above, below = order[excess[order] > 0], order[excess[order] <= 0]
    gains, losses = excess[above].tolist(), excess[below].tolist()
    from_above = np.zeros(len(order), bool)
    so_far = rich = poor = 0
    while rich < len(gains) and poor < len(losses):
        if so_far > 0:
            so_far += losses[poor]
            poor += 1
        else:
            from_above[rich + poor] = True
            so_far += gains[rich]
            rich += 1
    from_above[rich + poor :] = rich < len(gains)  # what is left is all of one kind, and brings the sum back to 0
    result = np.empty(len(order), np.int64)
    result[from_above], result[~from_above] = above, below
    return result
