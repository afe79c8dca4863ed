"""Texts whose vectors are compared: a query, a text that answers it, and optionally texts that do not."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from fxtune.data.formats.row_format import Content, LearnConfig, PlainText, RowFormat, TextGroup
from fxtune.data.formats.values import RowError, require_text, require_words, type_name

QUERY = ("query", "question", "anchor")
POSITIVE = ("positive", "pos", "positives", "positive_passages")
NEGATIVE = ("negative", "neg", "negatives", "negative_passages")
NUMBERED = re.compile(r"negative_\d+")
"""Further columns with a negative: negative_1, negative_2, ... (sentence-transformers)."""


class EmbeddingFormat(RowFormat):
    """The positive and the negative may be a text or a list of texts, and a text may be an object with `text` and
    `title` (Tevatron). The documents of a row: the query, its positives (label 1), its negatives (label 0)."""

    name = "embedding"
    columns: ClassVar[tuple[str, ...]] = ("query", "positive")
    known_columns = frozenset((*QUERY, *POSITIVE, *NEGATIVE, "pos_scores", "neg_scores", *("prompt", "text")))
    is_group = True
    is_question = False
    is_compared = True
    as_tokenized = True
    nothing_learned = "no text has two tokens"

    def fits(self, row: Mapping[str, Any]) -> bool:
        found = [next((row[name] for name in names if row.get(name)), None) for names in (QUERY, POSITIVE)]
        return isinstance(found[0], str) and isinstance(found[1], (str, list, tuple))

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        used = {name: value for name, value in row.items() if name not in unused and value is not None}
        query = _texts(used, QUERY)
        if len(query) != 1:
            raise RowError(f"there is no query: expected one text in {' or '.join(map(repr, QUERY))}")
        positives = _texts(used, POSITIVE)
        if not positives:
            raise RowError("the query has no positive: expected a text, or a list of texts, in 'positive' or 'pos'")
        numbered = (name for name in used if NUMBERED.fullmatch(name))
        negatives = _texts(used, (*NEGATIVE, *numbered))
        ((query_place, asked),) = query.items()
        for place, text in negatives.items():
            if text == asked:
                raise RowError(f"{place} is equal to {query_place}: a query cannot be a wrong answer to itself")
            if text in positives.values():
                raise RowError(f"{place} is also a positive of this query. Keep it as a positive or as a negative")
        labels = [math.nan, *[1.0] * len(positives), *[0.0] * len(negatives)]
        texts = {place: PlainText(text, as_tokenized=True) for place, text in (query | positives | negatives).items()}
        return TextGroup(texts, labels)


def _texts(row: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """{place in the row: text} of all texts in the columns `names`. Raises RowError."""
    found = {}
    for name in names:
        values = row.get(name, ())
        is_list = isinstance(values, (list, tuple))
        for index, value in enumerate(values if is_list else [values]):
            place = f"{name}[{index}]" if is_list else name
            if isinstance(value, Mapping):
                if "text" not in value:
                    raise RowError(f"{place} is an object without 'text'")
                parts = [value[key] for key in ("title", "text") if value.get(key)]
                value = " ".join(require_text(part, place) for part in parts)
            elif not isinstance(value, str):
                raise RowError(f"{place} is {type_name(value)}, not a text")
            found[place] = require_words(value, place)
    return found
