"""scripts/make/model_table.py: the table of docs/models.md (tests/models/test_types.py has what is tried of a type)."""

from __future__ import annotations

import random

import transformers
from support.model_table import model_table as script


def test_the_page_has_one_row_for_each_type_and_only_known_ones():
    page = script.PAGE.read_text()
    rows = script.rows_of(page)
    assert rows
    assert all(row.count(" | ") == script.HEAD.count(" | ") for row in rows.values())
    if f"transformers {transformers.__version__} are" in page:
        assert not {*rows} - {*script.kinds()}
        assert script.merged(page, []) == page


def test_the_page_has_every_type_and_none_fails():
    rows = script.rows_of(script.PAGE.read_text())
    assert {*script.kinds()} <= {*rows} or f"transformers {transformers.__version__}." not in script.PAGE.read_text()
    assert [kind for kind, row in rows.items() if "fails: " in row] == []


def test_types_tried_in_processes_resume_after_a_kill(tmp_path):
    rows = {row.kind: row for row in script.try_all(["llama", "gpt2"], 2, 300.0, tmp_path / "rows")}
    assert {kind: (row.result, row.checks["resume"]) for kind, row in rows.items()} == dict.fromkeys(
        rows, ("acts", "")
    )
    (late,) = script.try_all(["llama"], 1, 0.5, tmp_path / "rows")
    assert late.result.startswith("fails: no end")


def test_a_part_of_all_types_trains_or_is_refused_as_the_page_says(tmp_path):
    """Sixteen types, others with each version of transformers: all of them take an hour."""
    page = script.PAGE.read_text()
    rows, known = script.rows_of(page), f"transformers {transformers.__version__}" in page
    kinds = random.Random(transformers.__version__).sample(script.kinds(), 16)
    for row in script.try_all(kinds, 2, 600.0, tmp_path / "rows"):
        assert not row.result.startswith("fails"), row
        assert not known or str(row) == rows[row.kind]
