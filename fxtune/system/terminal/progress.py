"""Says what this process does and how far it is, so that a run is never silent for long.

`with phase("tokenizing", total, "rows") as work` names a piece of work before it starts, and `work.advance(n)` counts
what is done. Phases nest, and the innermost phase is shown. On a terminal it is shown in the last line, with its
seconds. Elsewhere each phase prints a line when it starts, and a thread prints its progress after QUIET seconds of
silence.

Nothing is shown before show(): code that is imported by another program prints nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from fxtune.system.terminal import console
from fxtune.system.terminal.startup import STARTUP

Item = TypeVar("Item")

QUIET = 4.0
"""Seconds of silence after which a log gets a line on the current phase."""
STEPS, MICRO_BATCHES = "steps", "micro-batches"
"""The unit of the training phase, and the unit of the phase of one step."""


class Phase:
    """A piece of work. `total`: its size in `unit`s; 0 if the size is not known."""

    def __init__(self, name: str, total: float = 0, unit: str = "") -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done: float = 0
        self.announced = False
        self._began = time.monotonic()

    def advance(self, by: float = 1) -> None:
        self.done += by

    def over(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items`. An item counts as done when the caller asks for the next item."""
        for item in items:
            yield item
            self.advance()

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __str__(self) -> str:
        done, total = (format(value, ",.1f" if isinstance(value, float) else ",") for value in (self.done, self.total))
        far = f" {self.share:.0%}, {done} of {total} {self.unit}," if self.total and self.total != 1 else ""
        return f"{self.name}:{far} {self.seconds:.0f} s"


class _Progress:
    """The phases of this process, and how they are shown."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.live: Live | None = None
        """The line of a terminal that shows the current phase."""
        self.region: Live | None = None
        """What is drawn at the bottom of the terminal: `live`, or a run's display, which also shows the phases."""
        self.log: threading.Event | None = None
        """The event that ends the thread of a log; None if phases are not printed."""


_progress = _Progress()


def current() -> Phase | None:
    """The innermost phase; None outside of all phases."""
    return _progress.phases[-1] if _progress.phases else None


def find(unit: str) -> Phase | None:
    """The innermost phase that counts in `unit`."""
    return next((work for work in reversed(_progress.phases) if work.unit == unit), None)


def line() -> Text:
    """The current phase in one line, cut at the width of the terminal."""
    return Text(str(current() or ""), "dim", no_wrap=True, overflow="crop")


@contextmanager
def phase(
    name: str, total: float = 0, unit: str = "", announce: bool = True, part: str | None = None
) -> Iterator[Phase]:
    """Show `name` while the body runs. `announce`: whether a log gets a line before the work starts. `part`: the part
    of a run's start to which the seconds belong (startup.py); None: the part of the phase around this phase."""
    work = Phase(name, total, unit)
    _progress.phases.append(work)
    try:
        work.announced = announce
        if announce and _progress.log:
            console.say(f"{name} ...")
        elif announce and _progress.region:
            with contextlib.suppress(OSError):  # the terminal is gone
                _progress.region.refresh()
        with STARTUP.part(part) if part else contextlib.nullcontext():
            yield work
    finally:
        _progress.phases.remove(work)


def show(kind: str = "auto") -> None:
    """Show phases from now on: as a line of a terminal (`auto`, `rich`), as lines of a log (`plain`, or `auto` without
    a terminal), or not at all (`none`)."""
    hide()
    if kind == "none":
        return
    if kind == "plain" or not console.is_live():
        _progress.log = threading.Event()
        threading.Thread(target=_repeat, args=(_progress.log,), name="fxtune-progress", daemon=True).start()
        return
    _progress.live = live_region(line, transient=True)


def hide() -> bool:
    """Stop showing phases. Safe to call twice. Returns whether they were shown."""
    live, log, _progress.live, _progress.log = _progress.live, _progress.log, None, None
    end_region(live)
    if log:
        log.set()
    return bool(live or log)


@contextmanager
def shown(kind: str = "auto") -> Iterator[None]:
    """A context manager that shows phases in its body; see show()."""
    show(kind)
    try:
        yield
    finally:
        hide()


def live_region(render: Callable[[], RenderableType], transient: bool = False) -> Live | None:
    """Draw render() at the bottom of the terminal, four times a second. Returns None if the terminal is gone. The
    cursor stays visible and the screen is not switched, so that even kill -9 leaves a working terminal."""
    terminal = console.console()
    live = Live(
        console=terminal, get_renderable=render, refresh_per_second=4, transient=transient, vertical_overflow="crop"
    )
    try:
        live.start()
        terminal.show_cursor(True)
    except OSError:
        return None
    _progress.region = live
    return live


def end_region(live: Live | None) -> None:
    if live is not None:
        _progress.region = None
        try:
            live.stop()
        except OSError:
            console.console().quiet = True  # the terminal is gone; there is nothing to restore


def _repeat(ended: threading.Event) -> None:
    """Run by a thread: after each QUIET seconds without output, print the innermost phase that has lasted a second; if
    no phase has, the outermost phase."""
    while not ended.wait(max(console.last_said() + QUIET - time.monotonic(), 0.1)):
        if time.monotonic() >= console.last_said() + QUIET and (phases := _progress.phases):
            console.say(str(next((work for work in reversed(phases) if work.seconds >= 1), phases[0])))
