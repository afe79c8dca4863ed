"""The held-out figures that an objective gives, for reports and commands: measures (before/accuracy, eval/accuracy), a
classifier's confusion matrix (eval/confusion/TRUE/PREDICTED) and its thresholds (eval/threshold/CLASS). Also the
scores of benchmarks (benchmarks/TASK/METRIC/base, tuned, gain)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

BENCHMARKS = "benchmarks/"
IN_TABLES = "eval/confusion/", "eval/threshold/", BENCHMARKS
"""The beginnings of the names of figures that figure_tables() shows."""


def measures(runs: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the measures, such as `accuracy`, that were taken before training. `runs`: figures of each run."""
    names = (name.removeprefix("before/") for figures in runs for name in figures if name.startswith("before/"))
    return list(dict.fromkeys(name for name in names if "/" not in name and name != "loss"))


def figure_tables(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (title, columns, rows) of the confusion matrix and of the thresholds of a classifier's last evaluation,
    and of the benchmarks."""
    counts, thresholds = (
        {name.removeprefix(part): value for name, value in figures.items() if name.startswith(part)}
        for part in IN_TABLES[:2]
    )
    halves = ((pair[: len(pair) // 2], pair) for pair in counts)  # a name may have a slash, too
    classes = [name for name, pair in halves if pair == f"{name}/{name}"]
    if classes:
        rows = [[true, *(f"{counts[f'{true}/{one}']:.0f}" for one in classes)] for true in classes]
        yield "Held-out documents of each class", ["true \\ predicted", *classes], rows
    if thresholds:
        rows = [[name, f"{share:.3f}"] for name, share in thresholds.items()]
        yield "Thresholds with the best held-out F1", ["class", "share"], rows
    scores = dict.fromkeys(name.rpartition("/")[0] for name in figures if name.startswith(BENCHMARKS))
    if scores:
        parts = ("base", "tuned", "gain")
        rows = [
            [*name.removeprefix(BENCHMARKS).rsplit("/", 1), *(_interval(figures, f"{name}/{part}") for part in parts)]
            for name in scores
        ]
        yield "Benchmarks, with 95 % intervals", ["task", "metric", *parts], rows


def _interval(figures: Mapping[str, Any], name: str) -> str:
    """A score with 1.96 of its standard errors; empty if it was not measured."""
    if name not in figures:
        return ""
    sign, error = "+" * name.endswith("/gain"), figures.get(f"{name}_error")
    return f"{figures[name]:{sign}.4f}" + (f" ± {1.96 * error:.4f}" if error is not None else "")
