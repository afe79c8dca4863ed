"""Permutation tests: exact against all permutations, their rate of false alarms, and what they find."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from fxtune.outputs.significance import higher_mean, least_pairs, lower_mean


def test_p_values_are_those_of_all_permutations_and_all_signs():
    draw = np.random.default_rng(0)
    one, other = draw.normal(size=6), draw.normal(0.7, size=5)
    pooled = np.concatenate([one, other])
    sums = [pooled[list(chosen)].sum() for chosen in combinations(range(11), 5)]
    assert higher_mean(one, other) == pytest.approx(np.mean(np.array(sums) >= other.sum() - 1e-9), abs=0.015)
    differences = draw.normal(-0.3, size=10)
    flipped = [(np.array(signs) * (differences - 0.1)).sum() for signs in product((-1, 1), repeat=10)]
    exact = np.mean(np.array(flipped) <= (differences - 0.1).sum() + 1e-9)
    assert lower_mean(differences, 0.1) == pytest.approx(exact, abs=0.015)


def test_equal_numbers_are_no_evidence():
    assert higher_mean(np.ones(20), np.ones(9)) == 1
    assert lower_mean(np.zeros(20)) == 1
    assert lower_mean(np.full(20, -1e-9), 0.0) < 0.01  # however small, if every pair agrees


@pytest.mark.slow
def test_rate_of_false_alarms_with_heavy_tails():
    draw = np.random.default_rng(1)
    alarms = sum(higher_mean(draw.lognormal(0, 2, 40), draw.lognormal(0, 2, 25), seed) <= 0.1 for seed in range(60))
    assert 1 <= alarms <= 14  # 6 expected; beyond these in 1 of 300 such tests
    alarms = sum(lower_mean(draw.standard_t(2, 25), 0.0, seed) <= 0.1 for seed in range(60))
    assert 1 <= alarms <= 14


@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.05, 0.3])
def test_least_pairs_can_pass(alpha):
    pairs = least_pairs(alpha)
    assert lower_mean(-np.ones(pairs)) <= alpha
    assert lower_mean(-np.ones(pairs - 2)) > alpha
