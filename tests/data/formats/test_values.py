"""Values of rows: depth, repeated keys, and texts that are no Unicode."""

from __future__ import annotations

import json

import pytest

from fxtune.data.formats.values import MAX_DEPTH, RowError, is_too_deep, parse_json, require_text, without_nulls


def test_depth_is_that_of_the_value_and_not_the_number_of_brackets():
    deep: object = 1
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    wide = [[]] * (2 * MAX_DEPTH)
    assert is_too_deep(json.dumps(deep), deep)
    assert not is_too_deep(json.dumps(deep[0]), deep[0])
    assert not is_too_deep(json.dumps(wide), wide)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "tools: an object has the key 'a' twice"),
        ("{", "tools is not valid JSON"),
        ("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "tools: lists and objects are nested more than 100 deep"),
    ],
)
def test_json_in_a_column_that_cannot_be_used_is_named(text, reason):
    with pytest.raises(RowError, match=reason):
        parse_json(text, "tools")
    assert parse_json('{"a": [1]}', "tools") == {"a": [1]}


def test_half_a_surrogate_pair_is_no_text():
    assert require_text("\U0001f600", "text") == "\U0001f600"
    with pytest.raises(RowError, match=r"text holds the lone surrogate .* at character 1"):
        require_text("a\ud83d", "text")
    with pytest.raises(RowError, match="text is a number, not a string"):
        require_text(3, "text")


def test_nulls_of_objects_are_left_out_and_nulls_of_lists_stay():
    assert without_nulls({"a": None, "b": {"c": None, "d": 1}, "e": ["x", None]}) == {"b": {"d": 1}, "e": ["x", None]}
