"""Rows of several documents: their labels, and what is wrong with a row."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fxtune.data.formats.group import GroupFormat
from fxtune.data.formats.row_format import LearnConfig, RowGroup
from fxtune.data.formats.values import RowError

TEXTS = [{"text": "two"}, {"text": "four"}]


def test_labels_are_numbers_or_null() -> None:
    found = GroupFormat().read({"documents": TEXTS, "labels": [1, None]}, LearnConfig())
    assert isinstance(found, RowGroup)
    assert found.rows == TEXTS
    assert found.labels[0] == 1
    assert math.isnan(found.labels[1])
    unlabelled = GroupFormat().read({"documents": TEXTS}, LearnConfig())
    assert isinstance(unlabelled, RowGroup)
    assert all(map(math.isnan, unlabelled.labels))


def test_a_row_with_other_columns_is_no_group() -> None:
    assert GroupFormat().fits({"documents": TEXTS, "labels": [1, 0]})
    assert not GroupFormat().fits({"documents": TEXTS, "question": "a", "answer": "b"})
    assert not GroupFormat().fits({"documents": ["two", "four"]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"documents": []}, "documents is empty"),
        ({"documents": {"text": "two"}}, "documents is an object, not a list of rows"),
        ({"documents": [*TEXTS, "two"]}, r"documents\[2\] is a string, not an object"),
        ({"documents": TEXTS, "labels": [1]}, "labels is 1 entries; it must be a list of 2 numbers"),
        ({"documents": TEXTS, "labels": 1}, "labels is a number"),
        ({"documents": TEXTS, "labels": ["good", 1]}, r"labels\[0\] is a string"),
        ({"documents": TEXTS, "labels": [0, math.inf]}, r"labels\[1\] is inf"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        GroupFormat().read(row, LearnConfig())
