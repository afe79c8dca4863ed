"""Draws the configurations of a sweep.

Without results to learn from, evenly spread points beat independent draws. They come from a scrambled Sobol sequence;
a point that it had before is skipped. With results, Optuna's tree-structured Parzen estimator (TPE) draws where losses
are low; it also learns from configurations that were stopped.

A configuration depends on the seed, its number and the results so far. So a sweep that is killed draws it again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from optuna import Study, Trial
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial

from fxtune.tuning.sweep_space import Dimension

MOST_DRAWS = 1000
"""The most points that are drawn to find a point that no configuration had before."""


class Sampler(str, Enum):
    spread = "spread"
    tpe = "tpe"


def suggest(trial: Trial, space: Sequence[Dimension]) -> dict[str, Any]:
    """The values of `trial`. Values that the trial lacks are drawn."""
    values: dict[str, Any] = {}
    for dimension in space:
        key, low, high, log = dimension.key, dimension.low, dimension.high, dimension.log
        if dimension.choices:
            values[key] = trial.suggest_categorical(key, [value for value, _ in dimension.choices])
        elif dimension.whole:
            values[key] = trial.suggest_int(key, int(low), int(high), log=log)
        else:
            values[key] = trial.suggest_float(key, low, high, log=log)
    return values


def combinations(space: Sequence[Dimension]) -> float:
    """How many configurations the space has."""
    return math.prod(dimension.size for dimension in space)


def sampler_for(kind: Sampler, number: int, first: int, space: Sequence[Dimension], seed: int) -> BaseSampler:
    """The sampler of configuration `number`. `first`: how many are spread evenly before TPE takes over."""
    if kind is Sampler.spread or number < first:
        return SpreadSampler(space, seed)
    # A seed for each number: with one seed, the sampler of a restarted sweep would repeat its first draws.
    return TPESampler(seed=(seed * 1_000_003 + number) % 2**32, n_startup_trials=1)


class SpreadSampler(BaseSampler):
    """Configuration n is the n-th different point of an even spread over `space`."""

    def __init__(self, space: Sequence[Dimension], seed: int) -> None:
        self.space, self.seed = space, seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self.point(trial.number)[param_name]

    def point(self, number: int) -> Mapping[str, Any]:
        return next(itertools.islice(self._different(), number, None))

    def _different(self) -> Iterator[dict[str, Any]]:
        """Points that none before was equal to, as long as there are some."""
        seen, repeated = set[tuple[str, ...]](), 0
        for point in self._points():
            key = tuple(map(repr, point.values()))
            repeated = repeated + 1 if key in seen else 0
            if not repeated or repeated > MOST_DRAWS:
                yield point
            seen.add(key)

    def _points(self) -> Iterator[dict[str, Any]]:
        engine = torch.quasirandom.SobolEngine(len(self.space), scramble=True, seed=self.seed)
        while True:
            for row in engine.draw(64, dtype=torch.float64).tolist():
                yield {dimension.key: dimension.at(share) for dimension, share in zip(self.space, row, strict=True)}
