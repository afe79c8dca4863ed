"""The exports of a run, and what their proofs found: `exports` in result.json, as a table."""

from __future__ import annotations

from typing import Any

EXPORTS = "exports"
"""The key in result.json. Its value is {"TARGET/FILE": the figures of compare() (outputs/targets/served.py), or
{"not_proven": reason}}."""
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
Exports = dict[str, dict[str, Any]]


def export_rows(exports: Exports) -> list[list[str]]:
    rows = [[name, *(_cell(figure, found.get(figure)) for figure in FIGURES)] for name, found in exports.items()]
    for row, found in zip(rows, exports.values(), strict=True):
        row[1] = f"not proven: {found['not_proven']}" if "not_proven" in found else row[1]
    return rows


def _cell(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if figure == "kl" else f"{value:.4f}" if figure == "perplexity" else f"{value:.1%}"
