"""What differs between two runs: their recipes, their data, what `auto` decided, machine and packages, and the
curves, from the first step at which they part.

It reads what a run leaves in its folder (config.yaml, setting.json, metrics.jsonl), also of a run that still trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxtune.reports.run_files import RunFiles

CURVES = ("train/loss", "eval/loss", "train/grad_norm", "train/lr", "questions/exact_match")
"""The metrics that are compared step by step."""
FIGURES = (
    "train/tokens_per_second",
    "train/memory_gib",
    "eval/best_loss",
    "eval/loss",
    "train/loss",
    "questions/exact_match",
)
"""The metrics whose last values are shown."""
NAMES = ("run.name", "run.dir")
"""Keys that differ between any two runs."""
SECTIONS = {
    "machine": "machine and packages",
    "data": "data",
    "techniques": "what was decided",
    "rows": "what was decided",
    "model": "what was decided",
    "built": "what was decided",
    "parallel": "what was decided",
}
"""Group of setting.json -> the heading under which its differences stand."""


@dataclass(frozen=True)
class Change:
    key: str
    first: Any
    """The value in the first run; None: it has none."""
    second: Any


@dataclass(frozen=True)
class Parting:
    """Where a metric of the two runs differs first."""

    metric: str
    common: int
    """At how many steps both runs have it."""
    step: int | None
    """The first of these at which they differ; None: they agree in every digit."""
    largest: float = 0.0
    """The largest difference at any step, relative to the first run's value."""


@dataclass
class RunDifference:
    recipe: list[Change] = field(default_factory=list)
    sections: dict[str, list[Change]] = field(default_factory=dict)
    """By heading, without what the recipes' differences say already."""
    same: list[str] = field(default_factory=list)
    """The headings under which nothing differs, nor a key of the recipe that belongs there."""
    partings: list[Parting] = field(default_factory=list)
    figures: list[Change] = field(default_factory=list)
    """The last value of each metric in FIGURES that a run has, equal or not."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs but figures that depend on the clock."""
        return not self.recipe and not any(self.sections.values()) and all(one.step is None for one in self.partings)


def compare_runs(first: Path, second: Path) -> RunDifference:
    """What the runs in these two folders differ in. Raises ConfigError for a folder that is no run, StorageError for a
    file that cannot be read."""
    found = RunDifference()
    runs = [RunFiles(folder) for folder in (first, second)]
    configs = [flat(run.config) for run in runs]
    found.recipe = [one for one in _changes(*configs) if one.key not in NAMES]
    differ = {"recipe": bool(found.recipe)}
    settings = [run.setting for run in runs]
    for group in dict.fromkeys([*settings[0], *settings[1]]):
        heading = SECTIONS.get(group, "what was decided")
        pair = [flat({group: setting.get(group, {})}) for setting in settings]
        changes = list(_changes(*pair))
        asked = any(one.key.startswith(f"{group}.") for one in found.recipe)
        differ[heading] = differ.get(heading, False) or asked or bool(changes)
        unsaid = [one for one in changes if not _in_recipe(one, found.recipe)]
        found.sections.setdefault(heading, []).extend(unsaid)
    found.same = [heading for heading, is_other in differ.items() if not is_other]
    curves = [run.curves for run in runs]
    found.partings = [part for name in CURVES if (part := _parting(name, *curves))]
    last = [{name: curve[max(curve)] for name, curve in one.items() if curve} for one in curves]
    found.figures = [
        Change(name, last[0].get(name), last[1].get(name)) for name in FIGURES if name in last[0] or name in last[1]
    ]
    return found


def _in_recipe(change: Change, recipe: list[Change]) -> bool:
    """Whether the recipe's own difference says the same."""
    return any(change.key == one.key and (change.first, change.second) == (one.first, one.second) for one in recipe)


def _changes(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*first, *second]):
        if first.get(key) != second.get(key):
            yield Change(key, first.get(key), second.get(key))


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict with the keys that a user types."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        return {key: value} if key else {}
    found: dict[str, Any] = {}
    for name, inner in items:
        found |= flat(inner, f"{key}.{name}" if key else str(name))
    return found


def _parting(metric: str, first: dict[str, dict[int, float]], second: dict[str, dict[int, float]]) -> Parting | None:
    one, other = first.get(metric, {}), second.get(metric, {})
    common = sorted(one.keys() & other.keys())
    if not common:
        return None
    apart = [step for step in common if not _same(one[step], other[step])]
    largest = max((abs(one[step] - other[step]) / max(abs(one[step]), 1e-12) for step in apart), default=0.0)
    return Parting(metric, len(common), apart[0] if apart else None, largest)


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))
