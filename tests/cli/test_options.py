"""Options of the commands: numbers, and the file of --json."""

from __future__ import annotations

import json

import pytest

from fxtune.cli.options import parse_int, parse_positive, require_writable, write_json
from fxtune.errors import ConfigError, StorageError


def test_numbers_are_parsed_or_refused_with_the_option_s_name():
    assert parse_int("--steps", None, 8) == 8
    assert parse_int("--steps", "3", 8) == 3
    assert parse_positive("--price", None, "a price") is None
    assert parse_positive("--price", "2.5", "a price") == 2.5
    for text in ("0", "-1", "2.5", "many", "1"):
        with pytest.raises(ConfigError, match=f"--warm-up {text}: give a whole number, 2 or more"):
            parse_int("--warm-up", text, 3, least=2)
    for text in ("0", "-1", "nan", "inf", "free"):
        with pytest.raises(ConfigError, match=f"--price {text}: give a price, a number above 0"):
            parse_positive("--price", text, "a price")


def test_a_file_is_tried_without_changing_it(tmp_path):
    file = tmp_path / "a.json"
    require_writable(file)
    assert not file.exists()
    write_json(file, {"a": 1})
    require_writable(file)
    assert json.loads(file.read_text()) == {"a": 1}
    for function in (require_writable, lambda path: write_json(path, {})):
        with pytest.raises(StorageError, match=r"--json .*b\.json cannot be written: .*Give a file in a folder"):
            function(tmp_path / "nowhere" / "b.json")
