"""The exports of a run, and what their proofs found: RUN/exports.json as a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.system.files.atomic_files import read_json

EXPORTS = "exports.json"
"""{"TARGET/FILE": the figures of compare() (outputs/targets/served.py), or {"not_proven": reason}}."""
FIGURES = {
    "equal": "equal answers",
    "equal_20": "first 20 tokens",
    "prompts": "equal prompts",
    "ended": "ended",
    "kl": "KL, nats",
    "right": "right",
    "perplexity": "perplexity",
}
COLUMNS = ["export", *FIGURES.values()]


def read_exports(run: Path) -> dict[str, dict[str, Any]]:
    """The content of exports.json; empty without the file, or if it cannot be read."""
    try:
        return read_json(run / EXPORTS) if (run / EXPORTS).exists() else {}
    except ValueError:
        return {}


def export_rows(run: Path) -> Iterator[list[str]]:
    """A row of COLUMNS for each export of the run."""
    for name, found in read_exports(run).items():
        yield export_row(name, found)


def export_row(name: str, found: dict[str, Any]) -> list[str]:
    """A row of COLUMNS. `found`: figures, or {"not_proven": reason}."""
    cells = [_cell(figure, found.get(figure)) for figure in FIGURES]
    return [name, *cells] if "not_proven" not in found else [name, f"not proven: {found['not_proven']}", *cells[1:]]


def _cell(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if figure == "kl" else f"{value:.4f}" if figure == "perplexity" else f"{value:.1%}"
