"""The console on standard output, and functions that make text and tables for it.

Messages go to standard output, whether it is a terminal, a pipe to `tee` or a file of Slurm; errors go to standard
error. NO_COLOR and COLUMNS are respected. A run goes on if the reader of its output dies.

External text (answers, names, paths) is never parsed as rich's markup, and its control characters are shown as
symbols.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fxtune.system.terminal.redact import redact_text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process here. Training goes on without output; metrics.jsonl has the figures."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@lru_cache(maxsize=1)
def console() -> Console:
    """The console of this process. Without a terminal it is 120 columns wide (COLUMNS overrides)."""
    made = _Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120  # rich's 80 would fold tables in log files
    return made


def plain(text: object) -> Text:
    """Text without markup, with symbols for control characters, so that data cannot control the terminal."""
    return Text(
        "".join(
            chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "�" if 127 <= ord(c) < 160 else c
            for c in str(text)
        )
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for `console().print`. Cells are plain text or rich renderables. Numbers are right-aligned."""
    made = Table(
        title=plain(title), title_justify="left", title_style="bold", header_style="bold", show_header=any(columns)
    )
    kept = [list(row) for row in rows]
    for at, name in enumerate(columns):
        number = bool(kept) and all(isinstance(row[at], (int, float)) for row in kept)
        made.add_column(plain(name), justify="right" if number else "left", overflow="fold")
    for row in kept:
        made.add_row(*(cell if isinstance(cell, (Text, Table)) else plain(cell) for cell in row))
    return made


def answers_table(rows: Iterable[tuple[str, str, str | None, str | None]], title: str = "Held-out questions") -> Table:
    """A table of (question, right answer, answer before training, answer after); a missing answer is None."""
    kept = list(rows)
    both = any(before is not None for _, _, before, _ in kept)
    lines = []
    for question, right, before, after in kept:
        shown = [_marked(before, right), _marked(after, right)] if both else [_marked(after, right)]
        lines.append([question, right, *shown])
    return table(title, ["question", "right answer", *(["before", "after"] if both else ["answer"])], lines)


def _marked(answer: str | None, right: str) -> Text:
    if answer is None:
        return Text("-", "dim")
    return Text.assemble(tick(answer.strip() == right.strip()), " ", plain(answer.strip()))


def tick(good: bool) -> Text:
    """A green tick or a red cross; words on a terminal without Unicode."""
    if not unicode():
        return Text("yes" if good else "NO", "green" if good else "red")
    return Text("✓" if good else "✗", "green" if good else "red")


def unicode() -> bool:
    """Whether standard output can show Unicode."""
    return console().encoding.lower().startswith("utf")


def is_live() -> bool:
    """Whether standard output is a terminal that can redraw a line."""
    return console().is_terminal and not console().is_dumb_terminal


_last_said = [time.monotonic()]


def last_said() -> float:
    """The time.monotonic() of the last say()."""
    return _last_said[0]


def say(*parts: RenderableType) -> None:
    """Print each part on separate lines: a text without folding it, or any object that rich renders. Does not raise if
    the output is gone."""
    _last_said[0] = time.monotonic()
    try:
        for part in parts:
            console().print(plain(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, (str, Text)))
    except OSError:
        console().quiet = True  # the disk is full or the terminal is closed; training goes on


def show_error(error: Exception) -> None:
    """Print an error to stderr. The error may quote a stranger's file, so markup is not read, and control characters
    are shown."""
    text = Text.assemble(("fxtune: ", "bold red"), plain(redact_text(str(error))))
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)
