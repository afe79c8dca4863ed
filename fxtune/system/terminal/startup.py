"""Counts the seconds from the command to the first steps, for each part of the work.

A phase (progress.py) names the part that its seconds belong to. A phase inside that phase may name another part.
Together the parts take the time since the process was started; the start of Python and the imports are parts, too.

While libraries are imported and while torch.compile traces the model, Python's garbage collector walks the libraries'
objects again and again. This takes a fifth of the imports' time. So before the first step the collector runs less
often.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

OTHER = "other"
"""The part for seconds outside of all phases that name a part."""
FIRST_STEPS = "first steps"
"""The last part. The training loop belongs to it."""
SHOWN = 0.5
"""A part that took fewer seconds is not printed."""
YOUNG_OBJECTS = 100_000
"""Before the first step, a garbage collection begins after this many new objects that were not freed. Python's default
is 700, in some versions 2,000."""


class StartupTimer:
    """Counts the seconds of one thread by part."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._parts, self._run_counts_on = clock, [OTHER], False
        self._restart({})

    def begin(self, before: Mapping[str, float]) -> None:
        """Begin to count a command. `before`: the seconds of each part before this call."""
        self._restart(before)
        self._run_counts_on = True

    def begin_run(self) -> None:
        """Begin to count a run. The first run of a command counts on from the command; any other run starts at 0."""
        if not self._run_counts_on:
            self._restart({})
        self._run_counts_on = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of the body for `name`. Only the thread that began the command or run counts."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._count()
        self._parts.append(name)
        young, *older = gc.get_threshold()
        gc.set_threshold(young if name == FIRST_STEPS else max(young, YOUNG_OBJECTS), *older)
        try:
            yield
        finally:
            gc.set_threshold(young, *older)
            self._count()
            self._parts.pop()

    def read(self) -> dict[str, float]:
        """The seconds of each part so far, in the order in which the parts began."""
        self._count()
        return dict(self._seconds)

    def summary(self) -> str:
        """One line: the total time, and each part that took half a second or more."""
        found = self.read()
        parts = ", ".join(f"{part} {round(seconds)}" for part, seconds in found.items() if seconds >= SHOWN)
        return f"from the start to here: {sum(found.values()):.0f} s" + (f" ({parts})" if parts else "")

    def _restart(self, seconds: Mapping[str, float]) -> None:
        self._seconds, self._last, self._thread = dict(seconds), self._clock(), threading.get_ident()

    def _count(self) -> None:
        now = self._clock()
        self._seconds[self._parts[-1]] = self._seconds.get(self._parts[-1], 0.0) + now - self._last
        self._last = now


STARTUP = StartupTimer()
"""The timer of this process. Its phases count with it."""
