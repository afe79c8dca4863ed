"""Documents that stay together: `documents`, a list of rows in other formats, and optionally a list of `labels`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.chat_format import is_chat
from fxtune.data.formats.row_format import Content, LearnConfig, RowFormat, RowGroup
from fxtune.data.formats.values import RowError, short, type_name


class GroupFormat(RowFormat):
    name = "group"
    columns = ("documents",)
    known_columns = frozenset(("documents", "labels"))
    is_group = True
    is_question = False
    nothing_learned = "none of its documents has an answer or a label"

    def fits(self, row: Mapping[str, Any]) -> bool:
        """False if the row has other columns: `documents` may then be the results of a search, for example."""
        return row.keys() <= self.known_columns and is_chat(row.get("documents"))

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        rows = row.get("documents")
        if not isinstance(rows, (list, tuple)):
            raise RowError(f"documents is {type_name(rows)}, not a list of rows")
        if not rows:
            raise RowError("documents is empty")
        for index, document in enumerate(rows):
            if not isinstance(document, Mapping):
                raise RowError(f"documents[{index}] is {type_name(document)}, not an object")
        return RowGroup(list(rows), _labels(row.get("labels"), len(rows)))


def _labels(labels: Any, documents: int) -> list[float]:
    """The label of each document, NaN for null. Raises RowError."""
    if labels is None:
        return [math.nan] * documents
    if not isinstance(labels, (list, tuple)) or len(labels) != documents:
        found = f"{len(labels)} entries" if isinstance(labels, (list, tuple)) else type_name(labels)
        raise RowError(f"labels is {found}; it must be a list of {documents} numbers, one for each of `documents`")
    for index, label in enumerate(labels):
        if label is not None and (not isinstance(label, (int, float)) or math.isinf(label)):
            named = short(label) if isinstance(label, float) else type_name(label)
            raise RowError(f"labels[{index}] is {named}, not a number or null")
    return [math.nan if label is None else float(label) for label in labels]
