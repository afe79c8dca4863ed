"""`fxtune diff RUN RUN`: shows how two runs differ, and the step at which their curves part.

    fxtune diff quickstart quickstart-2         # names of runs, or their folders
    fxtune diff runs/a runs/b --json diff.json

The command compares the recipes, the content of the data, the decisions of `auto`, the machine and its packages, each
metric step by step, and the answers that runs with rollouts learned from. The exit code is 0 even if the runs differ.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fxtune.cli.answer import ANSWER
from fxtune.outputs.run_output import run_folder
from fxtune.reports.run_difference import Difference, Parting, compare_runs
from fxtune.system.terminal.console import say, table


def run(first: str, second: str) -> None:
    """Print the difference of two runs. Raises ConfigError if a name means no run, StorageError if a run cannot be
    read."""
    folders = run_folder(first), run_folder(second)
    difference = compare_runs(*folders)
    names = [str(folder) for folder in folders]
    sections = {"recipe": difference.recipe, **difference.sections}
    for heading, changes in sections.items():
        if changes:
            say(_changes_table(heading.capitalize(), changes, names))
    if difference.partings:
        say(table("Curves", ["metric", "steps of both", ""], [_parting_row(part) for part in difference.partings]))
    if difference.answers:
        say(_changes_table("First answers that differ", difference.answers, names))
    if difference.figures:
        say(_changes_table("Last values", difference.figures, names))
    if difference.same:
        say(f"Equal: {', '.join(difference.same)}.")
    ANSWER.put({"runs": names, **asdict(difference), "equal": difference.equal})


def _changes_table(title: str, changes: list[Difference], names: list[str]) -> Any:
    rows = [(change.key, _text(change.first), _text(change.second)) for change in changes]
    return table(title, ["", *names], rows)


def _parting_row(part: Parting) -> tuple[str, str, str]:
    if part.step is None:
        return part.metric, f"{part.common:,}", "equal in every digit"
    size = "" if part.largest is None else f", by up to {part.largest:.2g} of the value"
    return part.metric, f"{part.common:,}", f"differ from step {part.step:,} on{size}"


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
