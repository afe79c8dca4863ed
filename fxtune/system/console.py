"""The one console, and text and tables for it.

Everything goes to standard output: what a command says is its output, whether it is looked at, piped to `tee` or kept by
Slurm. Standard error is for errors. NO_COLOR and COLUMNS are respected, as is a reader that went away: a run does not die
because `tee` did.

Text from outside (answers, names, paths) is never read as rich's markup, and its control characters are shown, not obeyed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process here. A training run goes on unseen; metrics.jsonl has its figures."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@lru_cache(maxsize=1)
def console() -> Console:
    """The console of this process, on standard output. Without a terminal it is 120 columns wide (COLUMNS overrides)."""
    made = _Console(highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120  # rich's 80 would fold tables that a log file has room for
    return made


def plain(text: object) -> Text:
    """Text that is shown as it is: no markup, control characters as symbols (a data set must not drive the terminal)."""
    return Text(
        "".join(
            chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else "�" if 127 <= ord(c) < 160 else c
            for c in str(text)
        )
    )


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for `console().print`. Cells are plain text, or rich renderables as they are; numbers stand to the right."""
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
    """Rows of (question, right answer, answer before training, answer after); an answer that was not asked for is None."""
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
    """A green tick or a red cross; words where the terminal has no Unicode."""
    if not unicode():
        return Text("yes" if good else "NO", "green" if good else "red")
    return Text("✓" if good else "✗", "green" if good else "red")


def unicode() -> bool:
    """Whether standard output takes more than ASCII."""
    return console().encoding.lower().startswith("utf")


def say(what: RenderableType) -> None:
    """Print a line of text as one line whatever the width, or anything that rich renders. Never raises for a dead output."""
    try:
        if isinstance(what, (str, Text)):
            console().print(plain(what) if isinstance(what, str) else what, soft_wrap=True)
        else:
            console().print(what)
    except OSError:
        console().quiet = True  # a full disk, a closed terminal; training goes on
