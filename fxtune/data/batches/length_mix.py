"""Short and long documents together: an order of rows that gives every step the same share of long documents.

A model that is tuned on long documents alone loses quality on short documents. A model that sees long and short
documents in turns is pulled back and forth. So each step has the share that `data.mix.long_share` declares:

- An epoch has as many tokens as the data, and draws the declared share from the long documents. Long documents are an
  endless sequence of passes, and so are short ones (epochs.py). `Plan.notes()` says how often each kind is repeated.
- The epoch's rows are ordered so that every stretch is balanced: while the rows so far have too many long tokens, take
  a row with too few, else a row with too many. (Steinitz 1913 has the theorem for any dimension.)

Any stretch of rows differs from the epoch's share by at most one row's tokens, so a step of G rows differs by at most
1/G. No order does better for rows with one long document each. Over a run the share is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LengthMix:
    long_share: float
    """Share of the tokens, above 0 and below 1."""
    threshold: int
    """Segments with more tokens are long."""


def balanced_order(long: np.ndarray, tokens: np.ndarray, order: np.ndarray) -> np.ndarray:
    """A permutation of rows, int64 [rows], in which each stretch has about the overall share of long tokens.

    `long`: each row's tokens in long documents, int64 [rows]. `tokens`: each row's tokens in all documents. `order`: a
    permutation. The rows with too many long tokens keep this order among each other, and so do the other rows.
    """
    # The number of a row's long tokens beyond the overall share, times sum(tokens), so that integers are exact.
    excess = long * int(tokens.sum()) - tokens * int(long.sum())
    above, below = order[excess[order] > 0], order[excess[order] <= 0]
    gains, losses = excess[above].tolist(), excess[below].tolist()
    from_above = np.zeros(len(order), bool)
    total = used_above = used_below = 0
    while used_above < len(gains) and used_below < len(losses):
        if total > 0:
            total += losses[used_below]
            used_below += 1
        else:
            from_above[used_above + used_below] = True
            total += gains[used_above]
            used_above += 1
    # The rows left are of one kind, and with them `total` returns to 0.
    from_above[used_above + used_below :] = used_above < len(gains)
    result = np.empty(len(order), np.int64)
    result[from_above], result[~from_above] = above, below
    return result
