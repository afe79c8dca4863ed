"""The user's rows for which a recipe is written: their format, their number, and the lengths of their documents."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fxtune.config.root import Config
from fxtune.data.config import AUTO, DataConfig, SourceConfig
from fxtune.data.formats.chat_format import LIST_KEYS
from fxtune.data.formats.image_parts import columns_of, images_of
from fxtune.data.formats.labelled import LABELS as NUMBERED
from fxtune.data.formats.labelled import NUMBER
from fxtune.data.formats.registry import PAIRS, row_format, suggested_columns
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference, RowFormat
from fxtune.data.formats.shapes import FILE_NAME, with_mark
from fxtune.data.formats.values import RowError
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import bad_row_error, tokenize
from fxtune.errors import ConfigError, DataError
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.settle.images import image_processor

NO_LIMIT = 2**24
"""The sequence length, in tokens, with which lengths are counted. No document is cut at this length."""
AS_CHATS = {
    "prompt_completion": {"prompt": "instruction", "completion": "output"},
    "kto": {"prompt": "instruction", "completion": "output"},
    "preference": {"prompt": "instruction"},
}
"""{a format whose texts get no chat template: {a column of it: the column's name in a format of chats}}."""
OBJECTIVES = {"embedding": "embedding", "candidates": "ranking", "labelled": "classification"}
"""{a format of other rows than texts, chats and preferences: the objective that learns from them}."""
LABELS = ("label", "labels", "class", "category", "intent")
MOST_ROWS = 20_000
"""The lengths of this many rows are counted. They stand for all rows of a larger file."""


@dataclass(frozen=True)
class Rows:
    source: SourceConfig
    data: DataConfig
    """The settings with which rows are read."""
    format: RowFormat
    objective: str
    count: int
    """The number of rows in the file."""
    has_images: bool
    held_out: str
    """The split of a folder to evaluate on; empty if there is none."""

    @property
    def are_chats(self) -> bool:
        """Whether rows are questions and answers in text alone. Only such rows are copied into a file of questions:
        the path of an image would be wrong there, because it is relative to the file of its row."""
        is_asked = self.objective == "causal_lm" and self.format.is_question
        return is_asked and not self.has_images and self.format.name not in ("text", "tokens")

    def as_chats(self, tokenizer: Any) -> Rows:
        """The rows as chats in the model's template, in which `fxtune chat` and servers write prompts. Rows stay as
        they are if their texts are chats already or the tokenizer has no template."""
        names = AS_CHATS.get(self.format.name, {})
        source = open_source(replace(self.source, columns={}))
        first = next((row.value for row in replace(source, as_they_are=True).rows()), None) or {}
        pair = next((pair for pair in PAIRS if set(pair) <= first.keys()), ())
        found = {name: name for name in names if name in first}
        found = dict(zip(("prompt", "completion"), pair, strict=False)) | found
        found |= {new: old for old, new in self.source.columns.items() if new in names}
        are_texts = all(isinstance(first.get(found.get(name, "")), str) for name in names)
        has_template = tokenizer.chat_template or self.data.chat_template
        if not (names and are_texts and has_template and self.source.format == AUTO):
            return self
        columns = dict(self.source.columns) | {found[old]: new for old, new in names.items()}
        config = replace(self.source, columns=columns)
        return replace(self, source=config, format=open_source(config).format())

    def tokenized(self, model: ModelConfig, data: DataConfig | None = None) -> TokenTable:
        """The documents of the first MOST_ROWS rows. `data`: the settings that cut them; None: they are whole. Raises
        ConfigError if the model does not read the rows' images, DataError for a bad row, and the errors of
        load_tokenizer()."""
        tokenizer = load_tokenizer(model)
        data = data or replace(self.data, sources=[self.source], sequence_length=NO_LIMIT)
        images = image_processor(model, data, tokenizer) if self.has_images else None
        if self.has_images and images is None:
            raise ConfigError(f"{model.path} reads no images, and the rows have images. Name another one by --model.")
        return tokenize(replace(self.source, limit=min(self.count, MOST_ROWS)), data, tokenizer, None, False, images)


def read_rows(given: Config, objective: str) -> Rows:
    """The rows of the first source of `given`. `objective`: what the user has chosen; empty: the rows decide.

    Raises DataError if fxtune does not know the format of the rows, or if none can be read."""
    config = given.data.sources[0]
    columns = config.columns
    source = open_source(config)
    first = next((row.value for row in replace(source, as_they_are=True, keeps_images=True).rows()), None) or {}
    is_named = not columns_of(first) and with_mark(first) is not None
    source.keeps_images = not is_named or any(
        (folder / first[FILE_NAME]).is_file() for folder in source.folders.values()
    )
    if not (head := source.head()):
        bad = next(source.rows())
        raise bad_row_error(bad.where, bad.error, columns)
    names = list(dict.fromkeys(key for row in head for key in row))
    known = columns or any(row_format(row) for row in head)
    is_said = columns or objective or config.format != AUTO
    guess, form = ({}, config.format) if is_said else _labelled(head, names)
    guess = guess or ({} if known else suggested_columns(head, names))
    if guess or form != config.format:
        config = replace(config, columns=guess or columns, format=form)
        source = replace(source, config=config)
        head = source.head()
    count = len(source.dataset) if source.kind == "hub" else source.count(source.files)
    held_out = next((split for split in ("validation", "test") if split in source.splits), "")
    try:
        format = source.format()
    except DataError as error:
        if not known and any(head[0].get(name) is not None for name in LIST_KEYS):  # a column with a wrong value
            raise
        how = "Say which columns are the question and the answer: --columns COLUMN=instruction,OTHER=output"
        raise DataError(f"{error}\n{how}") from error
    own = OBJECTIVES.get(format.name) or {0: "causal_lm", 1: "kto"}.get(len(format.answers), "dpo")
    has_images = any(_has_image(row, format) for row in head)
    return Rows(config, given.data, format, objective or own, min(count, config.limit or count), has_images, held_out)


def _labelled(head: list[dict[str, Any]], names: list[str]) -> tuple[dict[str, str], str]:
    """({column: new name}, the source's `format`) for a text with a label. With a label in words the text becomes a
    question and the label its answer. Numbers and lists are for objective=classification. ({}, "auto") for other rows.
    """
    texts = [name for name in ("text", "sentence") if name in names]
    labels = [name for name in LABELS if name in names]
    values = [row[name] for name in labels[:1] for row in head if row.get(name) is not None]
    repeat = len({*map(str, values)}) <= max(1, len(values) // 2)
    if len(texts) != 1 or len(labels) != 1 or not values or not (repeat or labels[0] in NUMBERED):
        return {}, AUTO
    if not all(isinstance(value, str) and not NUMBER.fullmatch(value) and value[:1] != "[" for value in values):
        return {} if labels[0] in NUMBERED else {labels[0]: "label"}, "labelled"
    return {texts[0]: "instruction", labels[0]: "output"} if repeat else {}, AUTO


def _has_image(row: Mapping[str, Any], format: RowFormat) -> bool:
    with suppress(RowError):
        content = format.read(row, LearnConfig())
        chats = content.answers if isinstance(content, Preference) else [content]
        return any(next(images_of(chat), None) for chat in chats if isinstance(chat, Conversation))
    return False


def spread(rows: Rows, count: int, bad: Container[str]) -> list[Mapping[str, Any]]:
    """At most `count` rows without those at the places `bad`, drawn from the split to evaluate on, or else from the
    file. Each call draws the same rows."""
    source = open_source(replace(rows.source, split=rows.held_out or rows.source.split))
    total = source.count(source.files) if rows.held_out and source.kind != "hub" else rows.count
    drawn = set(random.Random(0).sample(range(total), min(count, total)))
    chosen = (row.value for number, row in enumerate(source.rows()) if number in drawn and row.where not in bad)
    return [row for row in chosen if row is not None]
