"""Options of the commands: numbers, and the file of --json."""

from __future__ import annotations

import json

import pytest
from support.recipes import QUICK

from fxtune.cli.commands import positive_number, whole_number
from fxtune.cli.main import main
from fxtune.distributed.files import require_writable, write_json
from fxtune.errors import StorageError


def test_numbers_are_parsed_or_refused_with_the_option_s_name(cwd, capsys):
    assert whole_number(2)("3") == 3
    assert positive_number("a price")("2.5") == 2.5
    for text in ("0", "-1", "2.5", "many"):
        assert main(["bench", QUICK, f"--warm-up={text}"]) == 2
        assert f"--warm-up {text}: give a whole number, 1 or more" in capsys.readouterr().err
    for text in ("0", "-1", "nan", "inf", "free"):
        assert main(["bench", QUICK, f"--price={text}"]) == 2
        assert f"--price {text}: give what this machine costs per hour, a number above 0" in capsys.readouterr().err


def test_a_file_is_tried_without_changing_it(tmp_path):
    file = tmp_path / "a.json"
    require_writable(file)
    assert not file.exists()
    write_json(file, {"a": 1})
    require_writable(file)
    assert json.loads(file.read_text()) == {"a": 1}
    for function in (require_writable, lambda path: write_json(path, {})):
        with pytest.raises(StorageError, match=r"b\.json cannot be written"):
            function(tmp_path / "nowhere" / "b.json")
