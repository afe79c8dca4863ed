"""Pre-tokenized rows: `input_ids`, optionally `labels` (-100: not supervised) or `assistant_masks` (0 or 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.row_format import Content, LearnConfig, RowFormat, TokenIds
from fxtune.data.formats.values import RowError, short, type_name

IGNORE_INDEX = -100
"""The label of tokens that are not targets, as in PyTorch."""


class TokensFormat(RowFormat):
    name = "tokens"
    columns = ("input_ids",)
    known_columns = frozenset(
        ("input_ids", "labels", "assistant_masks", "attention_mask", "token_type_ids", "position_ids", "text")
    ) | {"special_tokens_mask"}
    nothing_learned = "its labels are all -100, or its assistant_masks all 0"

    def fits(self, row: Mapping[str, Any]) -> bool:
        ids = row.get("input_ids")
        return isinstance(ids, list) and bool(ids) and isinstance(ids[0], int)

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        ids = _integers(row.get("input_ids"), "input_ids")
        if not ids:
            raise RowError("input_ids is empty")
        if 0 in (row.get("attention_mask") or ()):
            raise RowError("attention_mask has zeros: remove the padding from input_ids, fxtune pads rows itself")
        if row.get("labels") is not None:
            labels = _integers(row["labels"], "labels", len(ids))
            for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
                if label not in (IGNORE_INDEX, token):
                    raise RowError(
                        f"labels[{index}] is {short(label)}; it must be {IGNORE_INDEX} or input_ids[{index}], which "
                        f"is {token}"
                    )
            return TokenIds(ids, [label != IGNORE_INDEX for label in labels])
        if row.get("assistant_masks") is not None:
            masks = _integers(row["assistant_masks"], "assistant_masks", len(ids))
            for index, mask in enumerate(masks):
                if mask not in (0, 1):
                    raise RowError(f"assistant_masks[{index}] is {short(mask)}; use 0 or 1")
            return TokenIds(ids, [mask == 1 for mask in masks])
        return TokenIds(ids, [True] * len(ids))


def _integers(values: Any, where: str, length: int | None = None) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise RowError(f"{where} is {type_name(values)}" + ("" if values is None else ", not a list of integers"))
    if length is not None and len(values) != length:
        raise RowError(f"{where} has {len(values)} entries and input_ids has {length}")
    for index, value in enumerate(values):
        if not isinstance(value, int):
            raise RowError(f"{where}[{index}] is {type_name(value)}, not an integer")
    return [int(value) for value in values]
