"""`fxtune diff RUN RUN`: what differs between two runs, and from which step on their curves part.

    fxtune diff quickstart quickstart-2         # names of runs, or their folders
    fxtune diff runs/a runs/b --json diff.json

It compares the recipes, the data by its content, what `auto` decided, the machine and its packages, and each metric
step by step. Exit code 0 also where they differ.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from fxtune.cli.options import write_json
from fxtune.cli.run_output import run_folder
from fxtune.reports.run_difference import Change, Parting, compare_runs
from fxtune.system.console import say, table


def run(first: str, second: str, *, json: Optional[Path] = None) -> None:
    """Print the difference of two runs. Raises ConfigError if one of them is no run, StorageError if it cannot be
    read."""
    folders = run_folder(first), run_folder(second)
    found = compare_runs(*folders)
    names = [str(folder) for folder in folders]
    sections = {"recipe": found.recipe, **found.sections}
    for heading, changes in sections.items():
        if changes:
            say(_changes_table(heading.capitalize(), changes, names))
    if found.partings:
        say(table("Curves", ["metric", "steps of both", ""], [_parting_row(one) for one in found.partings]))
    if found.figures:
        say(_changes_table("Last values", found.figures, names))
    if found.same:
        say(f"Equal: {', '.join(found.same)}.")
    if json is not None:
        write_json(json, {"runs": names, **asdict(found), "equal": found.equal})


def _changes_table(title: str, changes: list[Change], names: list[str]) -> Any:
    rows = [(one.key, _text(one.first), _text(one.second)) for one in changes]
    return table(title, ["", *names], rows)


def _parting_row(part: Parting) -> tuple[str, str, str]:
    if part.step is None:
        return part.metric, f"{part.common:,}", "equal in every digit"
    return (
        part.metric,
        f"{part.common:,}",
        f"differ from step {part.step:,} on, by up to {part.largest:.2g} of the value",
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.6g}" if isinstance(value, float) else str(value)
