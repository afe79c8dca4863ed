"""Pre-tokenized rows: which ids are learned, and what is wrong with a row."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.row_format import LearnConfig, TokenIds
from fxtune.data.formats.tokens import TokensFormat
from fxtune.data.formats.values import RowError


@pytest.mark.parametrize(
    ("row", "supervised"),
    [
        ({"input_ids": [5, 6, 7]}, [True, True, True]),
        ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, [False, True, True]),
        ({"input_ids": [5, 6, 7], "assistant_masks": [1, 0, 1], "attention_mask": [1, 1, 1]}, [True, False, True]),
        ({"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, [False, True, True]),
        ({"input_ids": [5, 6, 7], "loss_mask": [False, True, True], "labels": [5, 6, -100]}, [False, True, False]),
    ],
)
def test_labels_and_masks_say_which_ids_are_learned(row: dict[str, Any], supervised: list[bool]) -> None:
    assert TokensFormat().fits(row)
    assert TokensFormat().read(row, LearnConfig()) == TokenIds([5, 6, 7], supervised)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": None}, "input_ids is null"),
        ({"input_ids": [1, "x"]}, r"input_ids\[1\] is a string, not an integer"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 entries and input_ids has 2"),
        (
            {"input_ids": [1, 2], "labels": [2, -100]},
            r"labels\[0\] is 2; it must be -100 or input_ids\[0\], which is 1",
        ),
        ({"input_ids": [1, 2], "assistant_masks": [0, 2]}, r"assistant_masks\[1\] is 2; use 0 or 1"),
        ({"input_ids": [1, 2], "attention_mask": [0, 1]}, "attention_mask has zeros"),
    ],
)
def test_rows_that_cannot_be_used_have_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        TokensFormat().read(row, LearnConfig())
