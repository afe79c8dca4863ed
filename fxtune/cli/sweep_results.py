"""Shows the results of a sweep (`fxtune -m`): a table of its runs, lowest held-out loss first, and sweep.json."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import ABOUT, write_json
from fxtune.reports.held_out import measures
from fxtune.system.files.atomic_files import read_json
from fxtune.system.terminal import console

FILE = "sweep.json"
COLUMNS = {
    "held-out loss": ("eval/best_loss", "eval/loss"),
    "at step": ("eval/best_step", "train/step"),
    "reward accuracy": ("eval/reward_accuracy",),
    "exact match": ("questions/exact_match",),
    "KL from the base": ("general/kl",),
    "training loss": ("train/loss",),
}
"""The figures that each column may show. A column shows the first figure that a run has. The measures of the objective
follow under their own names."""


@dataclass
class SweepRun:
    changes: str
    """The keys that the run changes, also the name of its folder: `optimizer.lr=0.001`."""
    folder: str
    error: str | None = None
    """Why the run failed."""
    figures: dict[str, Any] = field(default_factory=dict)

    def value(self, column: str) -> float | None:
        found = (self.figures.get(name) for name in COLUMNS.get(column, (f"eval/{column}",)))
        return next((value for value in found if isinstance(value, (int, float))), None)

    def order(self) -> tuple[float, ...]:
        values = (self.value(column) for column in ("held-out loss", "training loss"))
        return tuple(math.inf if value is None or math.isnan(value) else value for value in values)


def show_results(runs: list[SweepRun], folder: Path) -> None:
    """Print the table and write sweep.json to `folder`. Runs without a held-out loss follow the others, in the order
    of their training loss. Failed runs are last. Raises StorageError."""
    runs = sorted(runs, key=lambda run: (run.error is not None, *run.order()))
    columns = *COLUMNS, *measures(run.figures for run in runs)
    shown = [column for column in columns if any(run.value(column) is not None for run in runs)]
    failed = ["failed", *[""] * (len(shown) - 1)]
    rows = [
        [run.changes, *([_text(run.value(column)) for column in shown] if run.error is None else failed), run.folder]
        for run in runs
    ]
    console.say(console.table(f"Sweep of {len(runs)} runs", ["run", *shown, "folder"], rows))
    for differ, what in (
        (any(re.search(r"\bobjective[.=]", run.changes) for run in runs), "objectives"),
        (len(set(map(_held_out, runs)) - {None}) > 1, "held-out documents or tokens"),
    ):
        if differ:
            console.say(f"Their {what} differ, so their held-out losses cannot be compared.")
    write_json(folder / FILE, {"runs": [asdict(run) for run in runs]})


def _held_out(run: SweepRun) -> tuple[int, int] | None:
    """The run's held-out documents and their supervised tokens; None: it has no held-out loss."""
    file = Path(run.folder) / ABOUT
    held_out = read_json(file).get("held_out") if run.value("held-out loss") is not None and file.is_file() else None
    return held_out and (held_out["documents"], held_out["supervised_tokens"])


def _text(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"
