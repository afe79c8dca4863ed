"""Tests whether two means differ. Permutation tests are exact for any distribution. They compare the observed
difference with differences of the same numbers under random labels or random signs (Fisher 1935, Pitman 1937).

A test with the rate `alpha` of false alarms rejects where p <= alpha. The observation counts as one of the draws, so
p is never too small (Phipson and Smyth 2010).
"""

from __future__ import annotations

import numpy as np

DRAWS = 19_999
"""Number of random draws of labels or signs. The smallest p is 1 / (DRAWS + 1)."""
_CHUNK = 4_000_000
"""The most random numbers in memory at a time."""


def higher_mean(baseline: np.ndarray, sample: np.ndarray, seed: int = 0) -> float:
    """The p-value under the hypothesis that `sample` [n] has no higher mean than `baseline` [m].

    The numbers must be independent. The labels are permuted: the p-value is exact if both arrays have one
    distribution.
    """
    pooled = np.concatenate([baseline, sample]).astype(np.float64)
    pooled -= pooled.mean()
    random, size, count = np.random.default_rng(seed), len(sample), 0
    observed = pooled[len(baseline) :].sum()
    for draws in _parts(len(pooled)):
        chosen = np.argpartition(random.random((draws, len(pooled))), size - 1, axis=1)[:, :size]
        count += int((pooled[chosen].sum(axis=1) >= observed - _tolerance(pooled)).sum())
    return (count + 1) / (DRAWS + 1)


def lower_mean(differences: np.ndarray, bound: float = 0.0, seed: int = 0) -> float:
    """The p-value under the hypothesis that the mean of `differences` [n] of pairs is `bound` or more.

    Signs are flipped, so the p-value is exact if the differences are symmetric around `bound`.
    """
    shifted = differences.astype(np.float64) - bound
    random, count, observed = np.random.default_rng(seed), 0, shifted.sum()
    for draws in _parts(len(shifted)):
        signs = np.where(random.random((draws, len(shifted))) < 0.5, -1.0, 1.0)
        count += int((signs @ shifted <= observed + _tolerance(shifted)).sum())
    return (count + 1) / (DRAWS + 1)


def least_pairs(alpha: float) -> int:
    """The least number of pairs with which lower_mean() can return `alpha` or less. It is the least n with 2^-n <=
    alpha, and one more, because the random signs repeat the observation in about 2^-n of the draws."""
    return int(np.ceil(np.log2(1 / alpha))) + 1


def _parts(width: int) -> list[int]:
    """The sizes of parts of the DRAWS draws. A draw takes `width` numbers, and a part at most _CHUNK numbers."""
    rows = max(1, _CHUNK // width)
    return [min(rows, DRAWS - first) for first in range(0, DRAWS, rows)]


def _tolerance(numbers: np.ndarray) -> float:
    """The largest rounding difference between sums of the same numbers in two orders."""
    return float(np.abs(numbers).sum()) * 1e-12
