"""Pre-tokenized rows: `input_ids`, optionally `labels` (-100: not supervised) and masks (0: not supervised)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fxtune.data.formats.row_format import Content, LearnConfig, RowFormat, TokenIds
from fxtune.data.formats.values import RowError, short, type_name

IGNORE_INDEX = -100
"""The label of tokens that are not targets, as in PyTorch."""
MASKS = ("assistant_masks", "completion_mask", "loss_mask")
"""Columns with 0 or 1 for each token. A token is supervised if `labels` and all masks of its row say so."""


class TokensFormat(RowFormat):
    name = "tokens"
    columns = ("input_ids",)
    known_columns = frozenset(
        ("input_ids", "labels", *MASKS, "attention_mask", "token_type_ids", "position_ids", "text")
    ) | {"special_tokens_mask"}
    nothing_learned = f"its labels are all -100, or a mask is all 0 ({', '.join(MASKS)})"

    def fits(self, row: Mapping[str, Any]) -> bool:
        ids = row.get("input_ids")
        return isinstance(ids, list) and bool(ids) and isinstance(ids[0], int)

    def read(self, row: Mapping[str, Any], learn: LearnConfig, unused: Collection[str] = ()) -> Content:
        ids = _integers(row.get("input_ids"), "input_ids")
        if not ids:
            raise RowError("input_ids is empty")
        if 0 in (row.get("attention_mask") or ()):
            raise RowError("attention_mask has zeros: remove the padding from input_ids, fxtune pads rows itself")
        supervised = [True] * len(ids)
        if row.get("labels") is not None:
            labels = _integers(row["labels"], "labels", len(ids))
            for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
                if label not in (IGNORE_INDEX, token):
                    raise RowError(
                        f"labels[{index}] is {short(label)}; it must be {IGNORE_INDEX} or input_ids[{index}], which "
                        f"is {token}"
                    )
            supervised = [label != IGNORE_INDEX for label in labels]
        for name in MASKS:
            if row.get(name) is None or name in unused:
                continue
            masks = _integers(row[name], name, len(ids))
            for index, mask in enumerate(masks):
                if mask not in (0, 1):
                    raise RowError(f"{name}[{index}] is {short(mask)}; use 0 or 1")
            supervised = [mask == 1 and learned for mask, learned in zip(masks, supervised, strict=True)]
        return TokenIds(ids, supervised)


def _integers(values: Any, where: str, length: int | None = None) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise RowError(f"{where} is {type_name(values)}" + ("" if values is None else ", not a list of integers"))
    if length is not None and len(values) != length:
        raise RowError(f"{where} has {len(values)} entries and input_ids has {length}")
    for index, value in enumerate(values):
        if not isinstance(value, int):
            raise RowError(f"{where}[{index}] is {type_name(value)}, not an integer")
    return [int(value) for value in values]
