"""`fxtune lr`: tests learning rates in one short run, and suggests one.

    fxtune lr +recipe=quickstart                          # a table of the curve, and a suggestion
    fxtune lr +recipe=quickstart --plot lr.svg            # also draw the curve
    fxtune lr +recipe=quickstart --lowest 1e-5 --highest 1e-1 --steps 100

The rate grows with each step until the loss diverges. It goes from a hundredth to a hundred times the rate that
optimizer.lr=auto would choose. The test uses the recipe's data, batch and seed. Only --plot and
--json write files. Several GPUs (run.gpus) share each step.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Optional

from fxtune.cli.answer import ANSWER
from fxtune.config.root import Config
from fxtune.distributed.files import require_writable, write_text
from fxtune.errors import ConfigError
from fxtune.reports.charts import Series
from fxtune.reports.charts import plot as svg
from fxtune.system.terminal.console import say, table, unicode
from fxtune.tuning.lr_finder import STEPS, RangeTest, range_test

ROWS = 16
"""Rows of the table."""
BAR = 40


def run(
    config: Config,
    steps: int = STEPS,
    lowest: Optional[float] = None,
    highest: Optional[float] = None,
    plot: Optional[Path] = None,
) -> None:
    """Test learning rates and print the curve. Raises ConfigError if the recipe cannot be tested or the plot cannot be
    drawn, StorageError for a file that cannot be written, and the errors of training."""
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot {plot}: the plot is an SVG file. Give a name that ends in .svg.")
    if plot is not None:
        require_writable(plot, "--plot")
    found = range_test(config, steps, lowest, highest)
    say(*config.techniques.ignored_options(), *found.decided, curve_table(found))
    if found.epochs > 1:
        say(f"The test saw the data {found.epochs:.1f} times, so a low loss may come from rows seen before.")
    say(verdict(found))
    if plot is not None:
        write_text(plot, draw(found, config.run.name, config.objective.unit), "--plot")
        say(f"The curve is in {plot}")
    ANSWER.put(dataclasses.asdict(found))


def verdict(found: RangeTest) -> str:
    """The suggestion in one line, beside the recipe's rate and the rate of optimizer.lr=auto."""
    others = f"The recipe has {found.present:g}"
    if found.auto is not None:
        others += "" if found.auto == found.present else f", optimizer.lr=auto would be {found.auto:g}"
    if found.suggestion is None:
        return f"No suggestion: {found.reason}. {others}."
    return f"Suggestion: optimizer.lr={found.suggestion:g} ({found.reason}). {others}."


def curve_table(found: RangeTest) -> Any:
    """The curve as a table of at most about ROWS rates, with a bar for the smoothed loss."""
    top = max(mean for mean in found.smoothed[:-1] or found.smoothed)
    every = max(1, math.ceil(len(found.rates) / ROWS))
    shown = sorted({*range(0, len(found.rates), every), len(found.rates) - 1})
    rows = [
        [
            f"{found.rates[at]:.2e}",
            f"{found.losses[at]:.4f}" if math.isfinite(found.losses[at]) else "not finite",
            f"{found.smoothed[at]:.4f}" if math.isfinite(found.smoothed[at]) else "",
            _bar(found.smoothed[at] / top),
        ]
        for at in shown
    ]
    title = f"{len(found.rates)} steps" + (", until the loss diverged" if found.diverged else "")
    return table(title, ["learning rate", "loss", "smoothed", ""], rows)


def _bar(share: float) -> str:
    return ("█" if unicode() else "#") * round(BAR * min(share, 1.0)) if math.isfinite(share) else ""


def draw(found: RangeTest, title: str, unit: str) -> str:
    """The curve as the text of an SVG file. `unit`: the unit of the loss."""
    smoothed = list(zip(found.rates, found.smoothed, strict=True))
    low = min((mean for mean in found.smoothed if math.isfinite(mean)), default=math.nan)
    marked = [("suggestion", found.suggestion), ("recipe", found.present)]
    series = [
        Series("loss of a step", list(zip(found.rates, found.losses, strict=True)), joined=False),
        Series("smoothed", smoothed, thick=True),
        *(Series(f"{name}: {rate:g}", [(rate, low), (rate, found.smoothed[0])]) for name, rate in marked if rate),
    ]
    return svg(title, series, "learning rate", unit)
