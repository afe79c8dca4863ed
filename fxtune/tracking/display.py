"""Shows a run: live on a terminal, elsewhere as a line of `key=value` pairs for each log interval, or not at all."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fxtune.errors import ConfigError
from fxtune.system.terminal import progress
from fxtune.system.terminal.console import answers_table, console, is_live, plain, say, table, tick, unicode
from fxtune.techniques.base import Evidence

BEHIND = 0.05
"""The slowest rank is named if its passes take this share longer than the passes of the others."""
WINDOW = 50
""""Time left" is estimated from this many log intervals."""
BARS = "▁▂▃▄▅▆▇█"


def evidence_table(evidence: Iterable[Evidence], title: str = "Techniques, as observed on the built model") -> Table:
    """A table of what `Technique.verify` observed."""
    rows = [[seen.technique, seen.asked, seen.observed, tick(seen.acted)] for seen in evidence]
    return table(title, ["technique", "asked for", "observed", "acted"], rows)


class Display(AbstractContextManager["Display"]):
    """The interface that the trainer uses; this class shows nothing. As a context manager it calls finish()."""

    def start(self, total_steps: int, title: str, done_steps: int = 0) -> None:
        """Begin a run of `total_steps` steps; an earlier process did the first `done_steps`."""

    def ends_at(self, total_steps: int) -> None:
        """Set a new end of the run, after `total_steps` steps."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the `metrics` after `step` steps. They have the tracker's names."""

    def note(self, text: RenderableType) -> None:
        """Show a message or a table."""

    def evidence(self, seen: Iterable[Evidence]) -> None: ...

    def answers(self, rows: Iterable[tuple[str, str, str | None, str | None]]) -> None:
        """Show answers to questions; see `answers_table`."""

    def finish(self) -> None:
        """Restore the terminal. Safe to call twice."""

    def __exit__(self, *_: object) -> None:
        self.finish()


def display(kind: str = "auto", clock: Callable[[], float] = time.monotonic) -> Display:
    """The display of this `kind`: rich, plain, none, or auto (rich on a terminal, plain elsewhere).

    Raises ConfigError for rich without a terminal.
    """
    if kind == "none":
        return Display()
    able = is_live()
    if kind == "rich" and not able:
        raise ConfigError(
            "tracking.display=rich, but standard output is no terminal that can redraw a line: use auto or plain"
        )
    return LiveDisplay(clock) if able and kind != "plain" else PlainDisplay(clock)


class TimeLeft:
    """Estimates the time left. Only steps of this process count: an earlier process may have had another machine."""

    def __init__(self, total: int, done: int, clock: Callable[[], float]) -> None:
        self.total, self.done, self._clock = total, done, clock
        self._start: tuple[int, float] | None = (done, clock())
        self._seen: deque[tuple[int, float]] = deque([self._start], maxlen=WINDOW)

    def reached(self, step: int) -> None:
        if step <= self.done:
            return
        self._seen.append((step, self._clock()))
        self.done = step
        if len(self._seen) == 3 and self._seen[0] == self._start:
            self._seen.popleft()  # the first interval includes compilation and warm-up
            self._start = None

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

    def ends_at(self, total_steps: int) -> None:
        self._pace.total = total_steps

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.reached(step)
        words = {"step": f"{step}/{self._pace.total}"} | {shape.name: text for shape, text in figures(metrics).items()}
        if (left := self._pace.left()) is not None and "train/loss" in metrics:
            words["left"] = clock_time(left)
        say(" ".join(f"{name}={text}" for name, text in words.items()))

    def note(self, text: RenderableType) -> None:
        say(text)

    def evidence(self, seen: Iterable[Evidence]) -> None:
        say(evidence_table(seen))

    def answers(self, rows: Iterable[tuple[str, str, str | None, str | None]]) -> None:
        say(answers_table(rows))


class LiveDisplay(PlainDisplay):
    """A progress bar and the latest figures at the bottom of the terminal, with notes above them. The most important
    figures come first, because a narrow terminal cuts the last ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._latest: dict[str, Any] = {}
        self._losses: list[float] = []
        self._title = ""
        self._began = 0.0
        self._live: Live | None = None
        self._phases_shown = False

    def start(self, total_steps: int, title: str, done_steps: int = 0) -> None:
        super().start(total_steps, title, done_steps)
        self.finish()
        self._title, self._began = title, self._clock()
        self._phases_shown = progress.hide()
        self._live = progress.live_region(self._render)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._pace.reached(step)
        # A new dict, because the refreshing thread may be reading the old one.
        self._latest = {**self._latest, **metrics}
        loss = _number(metrics.get("train/loss"))
        if loss is not None and math.isfinite(loss):
            self._losses.append(loss)

    def finish(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            progress.end_region(live)
            if self._phases_shown:
                progress.show()

    def _render(self) -> RenderableType:
        pace, width, left = self._pace, console().width, self._pace.left()
        training, step, work = progress.find(progress.STEPS), progress.find(progress.MICRO_BATCHES), progress.current()
        steps = max(pace.done, int(training.done) if training else 0)
        done, total = steps + (step.share if step else 0.0), max(pace.total, 1)
        head = [Text(f"{steps:,}/{pace.total:,}", "bold")]
        if left is not None and steps < pace.total:
            head.append(Text(f"{clock_time(left)} left", "cyan"))
        tail = [Text(clock_time(self._clock() - self._began), "dim"), plain(self._title)]
        row = Table.grid(padding=(0, 2, 0, 0))
        for parts in (head + tail, head + tail[:1], head):  # as many parts as leave room for a bar
            room = width - sum(part.cell_len + 2 for part in parts)
            if room >= 10:
                bar = ProgressBar(total, done, min(room, 60), complete_style="green", finished_style="green")
                row.add_row(*parts[: len(head)], bar, *parts[len(head) :])
                break
        else:
            row.add_row(*head)
        shown = work and work is not training and (work.announced or work.seconds >= 1)
        return Group(row, *_flow(self._parts(), width), *([progress.line()] if shown else []))

    def _parts(self) -> list[Text]:
        parts = [
            Text.assemble(
                ((shape.label or shape.name) + " ", "dim"),
                (_human(shape.name, text), "bold" if shape.name == "loss" else ""),
            )
            for shape, text in figures(self._latest, live=True).items()
            if (shape.name, text) != ("skipped", "0")
        ]
        if len(self._losses) > 2 and unicode():
            parts.insert(1, Text(sparkline(self._losses, 24), "green"))
        return parts


class Column(NamedTuple):
    name: str
    format: str
    """A format for format(), or `time`, which shows seconds since 1970 as the local time of day."""
    label: str = ""
    """The name in the live display, if it is not `name`."""
    live: bool = True
    """Whether the live display also shows it."""


COLUMNS = {
    "train/loss": Column("loss", ".4f"),
    "train/reward_accuracy": Column("reward_accuracy", ".3f", "preferred"),
    "train/reward_margin": Column("margin", ".3g"),
    "train/log_probs_chosen": Column("log_p_chosen", ".3f", live=False),
    "rollout/reward": Column("reward", ".3f"),
    "rollout/equal_groups": Column("equal_groups", ".2f", "equal groups"),
    "rollout/truncated": Column("cut_off", ".2f", "cut off"),
    "rollout/length": Column("length", ".1f"),
    "rollout/gap": Column("gap", ".2g"),
    "train/entropy": Column("entropy", ".3f"),
    "train/lr": Column("lr", ".2e"),
    "train/grad_norm": Column("grad_norm", ".3g", "grad"),
    "train/tokens_per_second": Column("tok/s", ".0f"),
    "train/tokens_per_second_per_rank": Column("tok/s/rank", ".0f"),
    "train/images_per_second": Column("img/s", ".1f"),
    "train/mfu": Column("mfu", ".3f", "MFU"),
    "train/memory_gib": Column("mem_gib", ".2f", "mem"),
    "train/memory_reserved_gib": Column("reserved_gib", ".2f", live=False),
    "train/data_wait": Column("data_wait", ".3f", "data wait"),
    "train/step_seconds": Column("step_s", ".3f", live=False),
    "train/ranks": Column("ranks", ".0f"),
    "train/slowest_rank": Column("slowest_rank", ".0f", "slowest rank"),
    "train/slowest_behind": Column("behind", ".3f"),
    "train/epoch": Column("epoch", ".2f"),
    "train/tokens": Column("tokens", ".0f", live=False),
    "train/supervised_tokens": Column("supervised_tokens", ".0f", live=False),
    "train/skipped_steps": Column("skipped", ".0f"),
    "train/noise_scale": Column("noise_scale", ".3g", "noise scale"),
    "train/end_time": Column("done_by", "time", "done by"),
    "energy/gpu_watts": Column("gpu_watts", ".0f", live=False),
    "energy/gpu_utilization": Column("gpu_used", ".3f", live=False),
    "energy/kwh": Column("kwh", ".4g", live=False),
    "cost/total": Column("cost", ".4g"),
    "eval/loss": Column("eval_loss", ".4f", "eval loss"),
    "eval/reward_accuracy": Column("eval_reward_accuracy", ".3f", "held-out preferred"),
    "eval/reward_margin": Column("eval_margin", ".3g", "held-out margin"),
    "eval/log_probs_chosen": Column("eval_log_p_chosen", ".3f", live=False),
    "eval/perplexity": Column("eval_perplexity", ".3f", "perplexity"),
    "eval/share_of_time": Column("eval_share", ".3f", "evaluation", live=False),
    "questions/exact_match": Column("exact_match", ".3f", "exact match"),
    "questions/reward": Column("questions_reward", ".3f", "reward of questions"),
}
"""The metrics of a line in their order. All other metrics follow under their own names."""
HIDDEN = (
    *("time/", "benchmarks/", "startup/", "train/forward_backward_seconds", "train/update_seconds"),
    *("train/gap", "train/clipped", "rollout/gap_p99", "rollout/left_out", "rollout/idle"),
    *("rollout/reward/", "rollout/reward_", "rollout/sampl", "rollout/tokens", "rollout/metric/"),
    *(
        f"{part}/{name}"
        for part in ("train", "eval", "before")
        for name in ("reward_chosen", "reward_rejected", "log_probs_rejected", "length_", "confusion/", "threshold/")
    ),
)
"""The beginnings of the names of metrics that only reports and trackers show."""


def figures(metrics: Mapping[str, Any], live: bool = False) -> dict[Column, str]:
    """The metrics as texts without spaces, in the order of COLUMNS. `live`: only the metrics of the live display."""
    shown = {}
    for metric in [*(name for name in COLUMNS if name in metrics), *(name for name in metrics if name not in COLUMNS)]:
        other = Column("_".join(metric.replace("/", " ").split()), ".4g", live=not metric.startswith("checkpoint/"))
        shape = COLUMNS.get(metric, other)
        number = math.nan if metrics[metric] is None else _number(metrics[metric])
        alone = metric == "train/ranks" and number == 1
        in_step = metric.startswith("train/slowest_") and not metrics["train/slowest_behind"] >= BEHIND
        hidden = metric == "train/step" or metric.startswith(HIDDEN)
        if hidden or alone or in_step or (live and not shape.live):
            continue
        if number is None:
            text = str(plain(metrics[metric]))
        elif shape.format == "time":
            text = time.strftime("%H:%M", time.localtime(number))
        else:
            text = format(number, shape.format)
        shown[shape] = "_".join(text.split())
    return shown


def sparkline(values: Sequence[float], width: int) -> str:
    """A chart of `values` in at most `width` characters. Neighbours are averaged if there are more values."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(at * len(values) / width) for at in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[int((mean - low) / span * (len(BARS) - 1) + 0.5)] for mean in means)


def clock_time(seconds: float) -> str:
    """A duration as 1:02:03 or 2d1:02:03."""
    return str(timedelta(seconds=round(seconds))).replace(" days, ", "d").replace(" day, ", "d")


def _human(name: str, text: str) -> str:
    if name in ("mfu", "data_wait", "exact_match", "behind", "reward_accuracy", "eval_reward_accuracy"):
        return f"{float(text):.1%}"
    if name in ("tok/s", "tok/s/rank"):
        return f"{float(text):,.0f}"
    return f"{text} GiB" if name == "mem_gib" else text


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _flow(parts: Iterable[Text], width: int) -> list[Text]:
    """The parts on as few lines as possible. A part is never split. A part that is wider than a line is truncated."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", part)
        else:
            part.truncate(width)
            lines.append(part)
    return lines
