"""The display of a run: a live one on a terminal, one line per log interval elsewhere, or none.

Without a terminal each line is `key=value` pairs in a fixed order, for grep. A display gets plain numbers at the log
interval, so it never waits for the device and never stops training.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fxtune.errors import ConfigError
from fxtune.system.console import answers_table, console, plain, say, table, tick, unicode
from fxtune.techniques.base import Evidence

WINDOW = 50  # log intervals that "time left" is estimated from
BARS = "▁▂▃▄▅▆▇█"


def evidence_table(evidence: Iterable[Evidence], title: str = "Techniques, as observed on the built model") -> Table:
    """A table of what `Technique.verify` observed."""
    return table(
        title,
        ["technique", "asked for", "observed", "acted"],
        [[each.technique, each.asked, each.observed, tick(each.acted)] for each in evidence],
    )


class Display:
    """The interface that the trainer uses; this class shows nothing. A context manager; finish() ends it, too."""

    def start(self, total_steps: int, title: str, done_steps: int = 0) -> None:
        """Begin a run of `total_steps` steps; an earlier process did the first `done_steps`."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the `metrics` after `step` steps, under the tracker's names. Never raises."""

    def note(self, text: str) -> None:
        """Show a message on its own lines."""

    def evidence(self, seen: Iterable[Evidence]) -> None:
        """Show the evidence of the techniques."""

    def answers(self, rows: Iterable[tuple[str, str, str | None, str | None]]) -> None:
        """Show answers to questions; see `answers_table`."""

    def finish(self) -> None:
        """Restore the terminal. Safe to call twice."""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


def display(kind: str = "auto", clock: Callable[[], float] = time.monotonic) -> Display:
    """The display of a kind: auto (rich on a terminal, plain elsewhere), rich, plain or none.

    Raises ConfigError for rich without a terminal.
    """
    if kind == "none":
        return Display()
    able = console().is_terminal and not console().is_dumb_terminal
    if kind == "rich" and not able:
        raise ConfigError(
            "tracking.display=rich, but standard output is no terminal that can redraw a line: use auto or plain"
        )
    return LiveDisplay(clock) if able and kind != "plain" else PlainDisplay(clock)


class TimeLeft:
    """Estimates the time left from the steps of this process only: an earlier one may have run on another machine."""

    def __init__(self, total: int, done: int, clock: Callable[[], float]) -> None:
        self.total, self.done = total, done
        self._clock = clock
        self._seen: deque[tuple[int, float]] = deque([(done, clock())], maxlen=WINDOW)
        self._begun = True

    def reached(self, step: int) -> None:
        if step <= self.done:
            return
        self._seen.append((step, self._clock()))
        self.done = step
        if self._begun and len(self._seen) > 2:
            self._seen.popleft()  # the first interval includes compilation and warm-up
            self._begun = False

    def left(self) -> float | None:
        """Seconds to the last step, or None before this process's first step is done."""
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        if last == first:
            return None
        return max(0.0, (self.total - last) * (ended - began) / (last - first) - (self._clock() - ended))


class PlainDisplay(Display):
    """Lines for grep: `step=12/400 loss=1.2345 lr=1.00e-04 ... left=0:02:10`, in a fixed order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pace = TimeLeft(0, 0, clock)

    def start(self, total_steps: int, title: str, done_steps: int = 0) -> None:
        self._pace = TimeLeft(total_steps, done_steps, self._clock)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.reached(step)
        words = [
            f"step={step}/{self._pace.total}",
            *(f"{shape.name}={text}" for shape, text in figures(metrics).items()),
        ]
        left = self._pace.left()
        if left is not None and "train/loss" in metrics:
            words.append(f"left={clock_time(left)}")
        say(" ".join(words))

    def note(self, text: str) -> None:
        say(text)

    def evidence(self, seen: Iterable[Evidence]) -> None:
        say(evidence_table(seen))

    def answers(self, rows: Iterable[tuple[str, str, str | None, str | None]]) -> None:
        say(answers_table(rows))


class LiveDisplay(PlainDisplay):
    """A progress bar and the latest figures at the bottom of the terminal, notes above them.

    It neither hides the cursor nor switches the screen, so that even kill -9 leaves a working terminal.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._latest: dict[str, Any] = {}
        self._losses = DownsampledSeries()
        self._title = ""
        self._began = 0.0
        self._live: Live | None = None

    def start(self, total_steps: int, title: str, done_steps: int = 0) -> None:
        super().start(total_steps, title, done_steps)
        self.finish()
        self._title, self._began = title, self._clock()
        self._live = Live(
            console=console(), get_renderable=self._render, refresh_per_second=4, vertical_overflow="crop"
        )
        try:
            self._live.start()
            console().show_cursor(True)
        except OSError:
            self._live = None  # the terminal is gone

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.reached(step)
        # A new dict, because the refreshing thread may be reading the old one.
        self._latest = {**self._latest, **metrics}
        loss = _number(metrics.get("train/loss"))
        if loss is not None and math.isfinite(loss):
            self._losses.add(loss)

    def finish(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            try:
                live.stop()
            except OSError:
                console().quiet = True  # the terminal is gone; there is nothing to restore

    def _render(self) -> RenderableType:
        pace, width = self._pace, console().width
        left = pace.left()
        passed = self._clock() - self._began
        times = f"{clock_time(passed)}" + (
            f", {clock_time(left)} left" if left is not None and pace.done < pace.total else ""
        )
        head = [plain(self._title), Text(f"{pace.done:,}/{pace.total:,}", "bold"), Text(times, "cyan")]
        room = width - sum(part.cell_len + 2 for part in head)
        bar = ProgressBar(
            total=max(pace.total, 1),
            completed=pace.done,
            width=min(room, 60),
            complete_style="green",
            finished_style="green",
        )
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_row(*((head[0], bar, *head[1:]) if room >= 10 else head[1:]))
        return Group(row, *_flow(self._parts(), width))

    def _parts(self) -> list[Text]:
        parts = []
        for shape, text in figures(self._latest, live=True).items():
            name = shape.name
            if name == "skipped" and text == "0":
                continue
            style = "bold" if name == "loss" else ""
            parts.append(Text.assemble(((shape.label or name) + " ", "dim"), (_human(name, text), style)))
        if len(self._losses.values) > 2 and unicode():
            spark = Text(sparkline(self._losses.values, 24), "green")
            parts.insert(1, spark)
        return parts


class Column(NamedTuple):
    name: str
    format: str
    label: str = ""
    """The name in the live display; empty: `name`."""
    live: bool = True
    """Whether the live display also shows it."""


COLUMNS = {
    "train/loss": Column("loss", ".4f"),
    "train/lr": Column("lr", ".2e"),
    "train/grad_norm": Column("grad_norm", ".3g", "grad"),
    "train/tokens_per_second": Column("tok/s", ".0f"),
    "train/mfu": Column("mfu", ".3f", "MFU"),
    "train/memory_gib": Column("mem_gib", ".2f", "mem"),
    "train/memory_reserved_gib": Column("reserved_gib", ".2f", live=False),
    "train/data_wait": Column("data_wait", ".3f", "data wait"),
    "train/step_seconds": Column("step_s", ".3f", live=False),
    "train/epoch": Column("epoch", ".2f"),
    "train/tokens": Column("tokens", ".0f", live=False),
    "train/supervised_tokens": Column("supervised_tokens", ".0f", live=False),
    "train/skipped_steps": Column("skipped", ".0f"),
    "eval/loss": Column("eval_loss", ".4f", "eval loss"),
    "eval/perplexity": Column("eval_perplexity", ".3f", "perplexity"),
    "questions/exact_match": Column("exact_match", ".3f", "exact match"),
}
"""Metrics in their order in a line. All others follow under their own names."""


def column(metric: str) -> Column:
    default = Column("_".join(metric.replace("/", " ").split()), ".4g", live=not metric.startswith("checkpoint/"))
    return COLUMNS.get(metric, default)


def figures(metrics: Mapping[str, Any], live: bool = False) -> dict[Column, str]:
    """The metrics as texts without spaces, in the order of COLUMNS. `live`: only those for the live display."""
    shown = {}
    for metric in [*(name for name in COLUMNS if name in metrics), *(name for name in metrics if name not in COLUMNS)]:
        shape = column(metric)
        if metric == "train/step" or (live and not shape.live):
            continue
        number = math.nan if metrics[metric] is None else _number(metrics[metric])
        text = str(plain(metrics[metric])) if number is None else format(number, shape.format)
        shown[shape] = "_".join(text.split())
    return shown


def sparkline(values: Sequence[float], width: int) -> str:
    """A chart of `values` in at most `width` characters, from lowest to highest; neighbours are averaged to fit."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(at * len(values) / width) for at in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5)] for mean in means)


class DownsampledSeries:
    """A metric's history in bounded memory: when it is full, pairs of neighbours are averaged into one entry."""

    def __init__(self, capacity: int = 512) -> None:
        self.values: list[float] = []
        self._capacity, self._each = capacity, 1
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._each:
            self.values.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.values) == self._capacity:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._each *= 2


def clock_time(seconds: float) -> str:
    """A duration as 1:02:03 or 2d1:02:03."""
    total = round(seconds)
    days, hours, minutes = total // 86400, total // 3600 % 24, total // 60 % 60
    return (f"{days}d" if days else "") + f"{hours}:{minutes:02}:{total % 60:02}"


def _human(name: str, text: str) -> str:
    number = _number(text)
    if number is None or not math.isfinite(number):
        return text
    if name in ("mfu", "data_wait", "exact_match"):
        return f"{number:.1%}"
    if name == "tok/s":
        return f"{number:,.0f}"
    return f"{text} GiB" if name == "mem_gib" else text


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _flow(parts: Iterable[Text], width: int) -> list[Text]:
    """The parts on as few lines as possible. A part is never split; one wider than a line is truncated."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", part)
        else:
            part.truncate(width)
            lines.append(part)
    return lines
