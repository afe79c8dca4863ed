"""The `data` group of a recipe: sources, rows, packing, held-out data and questions."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from fxtune.data.read.formats import RowFormat


class TextUnit(str, Enum):
    document = "document"
    paragraph = "paragraph"
    line = "line"


class OnLong(str, Enum):
    split = "split"  # type: ignore[assignment]  # str has a method of that name
    truncate = "truncate"
    drop = "drop"
    error = "error"


class OnBadRow(str, Enum):
    error = "error"
    quarantine = "quarantine"


@dataclass
class SourceConfig:
    path: str = "???"
    """A file, a folder, a glob (`**` works), a hub id, or `builtin:NAME` for data that ships with fxtune."""
    format: RowFormat = RowFormat.auto
    """The rows' format; `auto` detects it from the first rows and prints it."""
    weight: Optional[float] = field(default=None, metadata={"above": 0})
    """Share of the supervised tokens, relative to the other sources' weights. Null in all sources: every row once an epoch."""
    split: str = "train"
    """Split of a hub dataset."""
    subset: Optional[str] = None
    """Configuration name of a hub dataset."""
    revision: Optional[str] = None
    columns: dict[str, str] = field(default_factory=dict)
    """Rename columns before the format is detected: {their name: ours}."""
    text_unit: TextUnit = TextUnit.document
    """For .txt and .md files: what one row is."""
    limit: Optional[int] = field(default=None, metadata={"min": 1})
    """Use only the first so many rows; a blank line in JSONL is no row."""


@dataclass
class QuestionsConfig:
    path: Optional[str] = None
    """Held-out chat rows (any chat format that data.sources takes): all but the last assistant turn is the question, that
    turn is the right answer. Asked before and after training; null: not asked."""
    limit: int = field(default=100, metadata={"min": 1})
    """How many of the rows are asked, from the first on."""
    show: int = field(default=3, metadata={"min": 0})
    """How many are printed with both answers."""
    max_new_tokens: int = field(default=64, metadata={"min": 1})
    batch_size: int = field(default=32, metadata={"min": 1})


@dataclass
class MixConfig:
    """Short and long documents together in every step, so that a model that learns long ones keeps what it can do with short
    ones. What counts is a document's length after on_long has cut it."""

    long_share: Optional[float] = field(default=None, metadata={"above": 0, "below": 1})
    """Share of each optimizer step's tokens that long documents have, give or take one row; null: whatever the data has."""
    threshold: int = field(default=8192, metadata={"min": 1})
    """Documents of more tokens than this are long. Take the context that the model had before."""


@dataclass
class DataConfig:
    sources: list[SourceConfig] = field(default_factory=list)
    eval_sources: list[SourceConfig] = field(default_factory=list)
    """Held-out sources for evaluation."""
    eval_fraction: float = field(default=0.0, metadata={"min": 0, "below": 1})
    """Instead of eval_sources: hold out this share of the documents, chosen by their content, so that it never changes."""
    questions: QuestionsConfig = field(default_factory=QuestionsConfig)
    sequence_length: int = field(default=2048, metadata={"min": 1})
    """Tokens a row holds."""
    packing: bool = True
    """Fill rows with several documents that cannot see each other. Off: one document a row, padded."""
    buckets: list[int] = field(default_factory=list, metadata={"min": 1})
    """Without packing: the lengths to pad to, ascending; empty: the longest document of the micro-batch."""
    on_long: OnLong = OnLong.split
    """What happens to a document longer than sequence_length."""
    mix: MixConfig = field(default_factory=MixConfig)
    on_bad_row: OnBadRow = OnBadRow.error
    """What happens to a row that cannot be used. `quarantine` writes it to quarantine.jsonl in the run folder and goes on."""
    chat_template: Optional[str] = None
    """A Jinja file that replaces the tokenizer's chat template."""
    workers: int = field(default=0, metadata={"min": 0})
    """Processes that tokenise; 0: one a core."""
    cache_dir: Optional[str] = None
    """Where tokenised sources are kept; null: $XDG_CACHE_HOME/fxtune, or ~/.cache/fxtune."""
    cache_days: Optional[int] = field(default=30, metadata={"min": 1})
    """When new tokens are kept, those that no run used for so many days are removed, which is said; null: never."""
