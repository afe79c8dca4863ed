"""The held-out figures that an objective gives, as reports and commands show them.

    before/accuracy, eval/accuracy   a measure, before and after training
    eval/confusion/TRUE/PREDICTED    how many documents of a class the model puts into a class
    eval/threshold/CLASS             with several labels: the share from which on a document has the class

The metrics of an objective are documented in its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

CLASSES = "eval/confusion/", "eval/threshold/"


def measures(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the measures, such as `accuracy`, that were taken before training. `runs`: figures of each run."""
    names = (name.removeprefix("before/") for figures in runs for name in figures if name.startswith("before/"))
    return list(dict.fromkeys(name for name in names if "/" not in name and name != "loss"))


def class_tables(figures: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, columns, rows) of the confusion matrix, and of the thresholds, of a classifier's last evaluation."""
    counts, thresholds = (
        {name.removeprefix(part): value for name, value in figures.items() if name.startswith(part)}
        for part in CLASSES
    )
    halves = ((pair[: len(pair) // 2], pair) for pair in counts)  # a name may have a slash, too
    classes = [name for name, pair in halves if pair == f"{name}/{name}"]
    matrix = [[true, *(f"{counts[f'{true}/{one}']:.0f}" for one in classes)] for true in classes]
    shares = [[name, f"{share:.3f}"] for name, share in thresholds.items()]
    tables = (
        ("Held-out documents of each class", ["true \\ predicted", *classes], matrix),
        ("Thresholds with the best held-out F1", ["class", "share"], shares),
    )
    return [table for table in tables if table[2]]
