"""about.json of a run folder: its command, its versions, and its data in figures, for reports."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fxtune import __version__
from fxtune.checkpoint.run_folder import OBJECTIVE, TEMPLATE_TIME
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.formats.row_format import Content, Conversation, Labelled, LearnConfig, PlainText, Preference
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import UserError
from fxtune.objectives.base import Objective
from fxtune.system.terminal.redact import redact_arguments

ENDS = "end_tokens"
"""The key in about.json for the tokens with which answers of the data end."""
TEXTS = "prompts_are_texts"
"""The key in about.json that says whether all prompts of the data are plain texts, without a chat template."""
PAIRS = "rows_are_pairs"
"""The key in about.json that says whether all rows of the data are two texts with a label."""
CHATS = "rows_are_chats"
"""The key in about.json that says whether all rows of the data are chats with a label."""
BINS = 12
"""The number of ranges in the histogram of document lengths."""


def describe_run(
    data: PreparedData, ends: list[int], template_time: str | None, objective: Objective, contents: dict[str, bool]
) -> dict[str, Any]:
    """The values of about.json. Lengths are in tokens. `ends`: learned_ends() of the data. `template_time`: see
    DataConfig. `objective`: with what it takes from the data. `contents`: contents_of_rows() of the data."""
    return {
        "command": _command(),
        "fxtune": __version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        ENDS: ends,
        **contents,
        TEMPLATE_TIME: template_time,
        OBJECTIVE: objective.from_rows(),
        "training": _describe(data.training),
        "held_out": data.evaluation and _describe(data.evaluation),
    }


def contents_of_rows(tables: Sequence[TokenTable], data: DataConfig) -> dict[str, bool]:
    """The values of TEXTS, PAIRS and CHATS, as the first row of each source has them."""

    def first(source: SourceConfig, table: TokenTable) -> Content | None:
        row = None
        if table.format.needs_template or table.format.name in ("text", "tokens"):
            return None
        with suppress(UserError, OSError):  # the file may be gone, because the tokens are cached
            row = next(usable_rows(source, table, data), None)
        if row is None:
            return None
        content = table.format.read(row.value or {}, LearnConfig(), source.unused)
        return content.answers[0] if isinstance(content, Preference) else content

    contents = [first(source, table) for source, table in zip(data.sources, tables, strict=True)]
    return {
        TEXTS: all(isinstance(content, PlainText) for content in contents),
        PAIRS: all(isinstance(row, Labelled) and getattr(row.content, "second", None) for row in contents),
        CHATS: all(isinstance(row, Labelled) and isinstance(row.content, Conversation) for row in contents),
    }


def _describe(plan: Plan) -> dict[str, Any]:
    figures = plan.summary()
    return {**figures, "lengths": [_lengths(table) for table in plan.tables]}


def _lengths(table: TokenTable) -> dict[str, Any]:
    """The lengths of a source's documents. `counts[i]`: documents of at least `edges[i]` and fewer than `edges[i + 1]`
    tokens; the last edge is above the longest document."""
    lengths = np.diff(table.offsets)
    middle, high = np.percentile(lengths, (50, 95)) if len(lengths) else (0, 0)
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (1, 1)
    edges = np.unique(np.geomspace(max(shortest, 1), longest + 1, BINS + 1).round().astype(np.int64))
    return {
        "name": table.name,
        "documents": len(table),
        "tokens": int(lengths.sum()),
        "supervised_tokens": table.supervised_tokens,
        "bad_rows": table.bad_rows,
        "median": int(middle),
        "percentile_95": int(high),
        "longest": longest,
        "edges": edges.tolist(),
        "counts": np.histogram(lengths, edges)[0].tolist(),
    }


def _command() -> str | None:
    """The command line of this process, without secrets; None if a program of the user runs fxtune."""
    if Path(sys.argv[0]).name not in ("fxtune", "__main__.py"):
        return None
    return shlex.join(["fxtune", *redact_arguments(sys.argv[1:])])
