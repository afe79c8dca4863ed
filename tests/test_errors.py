"""Messages of errors: one line, shortened, with the nearest known word."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from fxtune.errors import did_you_mean, first_line, kind_of, nearest, shortened


@settings(max_examples=30)
@given(st.text())
def test_nearest_proposes_only_known_names(word):
    assert nearest(word, ["optimizer", "train"]) in (None, "optimizer", "train")


def test_end_of_a_message_proposes_or_lists():
    assert did_you_mean("optimiser", ["optimizer", "train"]) == "; did you mean `optimizer`?"
    assert did_you_mean("xyz", ["optimizer", "train"]) == ". There are: optimizer, train."
    assert did_you_mean("xyz", [f"word{number}" for number in range(13)]) == "."


def test_errors_and_values_are_shown_in_one_line():
    assert first_line(ValueError("in this file:\n  line 3\nmore")) == "ValueError: in this file: line 3"
    assert first_line(OSError()) == "OSError: (no message)"
    text = shortened("a" * 100 + "\n" + "b" * 100)
    assert (text[:3], text[-3:], len(text)) == ("aaa", "bbb", 65)
    assert shortened([1, 2]) == "[1, 2]"


def test_pipes_and_names_that_no_file_can_have_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    kinds = [kind_of(tmp_path / name) for name in ("file", "", "pipe", "nothing", "\0")]
    assert kinds == ["a file", "a folder", "a pipe, a socket or a device", None, None]
