"""The held-out figures that an objective gives, for reports and commands: measures (before/accuracy, eval/accuracy), a
classifier's confusion matrix (eval/confusion/TRUE/PREDICTED) and its thresholds (eval/threshold/CLASS)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

CLASSES = "eval/confusion/", "eval/threshold/"


def measures(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the measures, such as `accuracy`, that were taken before training. `runs`: figures of each run."""
    names = (name.removeprefix("before/") for figures in runs for name in figures if name.startswith("before/"))
    return list(dict.fromkeys(name for name in names if "/" not in name and name != "loss"))


def class_tables(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (title, columns, rows) of the confusion matrix and of the thresholds of a classifier's last evaluation."""
    counts, thresholds = (
        {name.removeprefix(part): value for name, value in figures.items() if name.startswith(part)}
        for part in CLASSES
    )
    halves = ((pair[: len(pair) // 2], pair) for pair in counts)  # a name may have a slash, too
    classes = [name for name, pair in halves if pair == f"{name}/{name}"]
    if classes:
        rows = [[true, *(f"{counts[f'{true}/{one}']:.0f}" for one in classes)] for true in classes]
        yield "Held-out documents of each class", ["true \\ predicted", *classes], rows
    if thresholds:
        rows = [[name, f"{share:.3f}"] for name, share in thresholds.items()]
        yield "Thresholds with the best held-out F1", ["class", "share"], rows
