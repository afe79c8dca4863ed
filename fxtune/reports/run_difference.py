"""How two runs differ: in their recipes, their data, the decisions of `auto`, their machines and packages, and their
curves. For each metric it finds the first step at which the curves part, and for rollouts the first step whose answers
differ.

The files in the folders of the runs are compared (config.yaml, setting.json, metrics.jsonl, rollouts/). A run that is
still training can be compared, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxtune.reports.rollouts import first_difference
from fxtune.reports.run_files import RunFiles

CURVES = (
    *("train/loss", "eval/loss", "train/grad_norm", "train/lr"),
    *("train/reward_accuracy", "train/reward_margin", "eval/reward_accuracy", "eval/reward_margin"),
    *("questions/exact_match", "rollout/reward", "eval/reward", "rollout/length", "rollout/gap"),
)
"""The metrics that are compared step by step."""
FIGURES = (
    *("train/tokens_per_second", "train/memory_gib", "eval/best_loss", "eval/loss", "train/loss"),
    *("eval/reward_accuracy", "questions/exact_match"),
    *("rollout/reward", "eval/reward", "rollout/length", "rollout/gap", "rollout/sampling_seconds"),
)
"""The metrics whose last values are shown."""
NAMES = ("run.name", "run.dir")
"""Keys that differ between any two runs."""
SECTIONS = {"machine": "machine and packages", "data": "data"}
"""The heading for the differences in a group of setting.json. All other groups are what was decided."""


@dataclass(frozen=True)
class Difference:
    key: str
    first: Any
    """The value in the first run; None if the run has no value."""
    second: Any


@dataclass(frozen=True)
class Parting:
    """The first step at which a metric differs between the two runs."""

    metric: str
    common: int
    """The number of steps at which both runs have the metric."""
    step: int | None
    """The first common step with different values; None if the values agree in every digit."""
    largest: float | None = 0.0
    """The largest difference at any step, relative to the first run's value. None for answers, which have no size."""


@dataclass
class RunDifference:
    recipe: list[Difference] = field(default_factory=list)
    sections: dict[str, list[Difference]] = field(default_factory=dict)
    """The differences under each heading, without the differences in `recipe`."""
    same: list[str] = field(default_factory=list)
    """The headings without a difference. The keys of the recipe that belong to these headings do not differ either."""
    partings: list[Parting] = field(default_factory=list)
    figures: list[Difference] = field(default_factory=list)
    """The last values of the metrics in FIGURES, equal or not."""
    answers: list[Difference] = field(default_factory=list)
    """Some answers of the first step whose stored answers differ, by the row of their prompt."""

    @property
    def equal(self) -> bool:
        """Whether the runs are equal, except for figures that depend on the clock."""
        return not (self.recipe or any(self.sections.values()) or any(part.step is not None for part in self.partings))


def compare_runs(first: Path, second: Path) -> RunDifference:
    """How the runs in two folders differ. Raises ConfigError if a folder has no run, StorageError if a file is
    unreadable."""
    difference = RunDifference()
    runs = [RunFiles(folder) for folder in (first, second)]
    configs = [flat(run.config) for run in runs]
    difference.recipe = [change for change in _differences(*configs) if change.key not in NAMES]
    differ = {"recipe": bool(difference.recipe)}
    settings = [run.setting for run in runs]
    for group in dict.fromkeys([*settings[0], *settings[1]]):
        heading = SECTIONS.get(group, "what was decided")
        pair = [flat({group: setting[group]}) if group in setting else {} for setting in settings]
        changes = list(_differences(*pair))
        in_recipe = any(change.key.startswith(f"{group}.") for change in difference.recipe)
        differ[heading] = differ.get(heading, False) or in_recipe or bool(changes)
        new = [change for change in changes if change not in difference.recipe]
        difference.sections.setdefault(heading, []).extend(new)
    difference.same = [heading for heading, differs in differ.items() if not differs]
    curves = [run.curves for run in runs]
    difference.partings = [part for name in CURVES if (part := _parting(name, *curves))]
    common, step, answers = first_difference(first, second)
    if common:
        difference.partings.append(Parting("answers", common, step, None))
        difference.answers = [Difference(*each) for each in answers]
    last = [{name: curve[max(curve)] for name, curve in of_run.items() if curve} for of_run in curves]
    difference.figures = [
        Difference(name, last[0].get(name), last[1].get(name))
        for name in FIGURES
        if name in last[0] or name in last[1]
    ]
    return difference


def _differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) != second.get(key):
            yield Difference(key, first.get(key), second.get(key))


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict with the keys that a user types."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        return {key: value} if key else {}
    keys: dict[str, Any] = {}
    for name, inner in items:
        keys |= flat(inner, f"{key}.{name}" if key else str(name))
    return keys


def _parting(metric: str, first: dict[str, dict[int, float]], second: dict[str, dict[int, float]]) -> Parting | None:
    left, right = first.get(metric, {}), second.get(metric, {})
    common = sorted(left.keys() & right.keys())
    if not common:
        return None
    apart = [step for step in common if not _same(left[step], right[step])]
    largest = max((abs(left[step] - right[step]) / max(abs(left[step]), 1e-12) for step in apart), default=0.0)
    return Parting(metric, len(common), apart[0] if apart else None, largest)


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
