"""Rows and ranks that an objective cannot learn from are refused in one message, with what to change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.tables import grouped, table

from fxtune.cli.main import main
from fxtune.distributed.parallel import Degrees
from fxtune.objectives.needs import Needs

DOCUMENT = ([1, 2, 3], [False, True, True])
TEXT = table([DOCUMENT] * 4, "texts.jsonl")
PAIRS = grouped([[DOCUMENT] * 2] * 3, name="pairs.jsonl")
MIXED = grouped([[DOCUMENT] * 2, [DOCUMENT] * 3, [DOCUMENT] * 4], name="mixed.jsonl")
RANKED = grouped([[DOCUMENT] * 3] * 2, [1, None, 0, None, None, None], name="ranked.jsonl")
JUDGED = grouped([[DOCUMENT]] * 2, [1, 0], name="judged.jsonl")


@pytest.mark.parametrize(
    ("needs", "given", "message"),
    [
        (Needs(), PAIRS, "pairs.jsonl: its rows have 2 documents, and objective=mine learns from one document a row"),
        (Needs(), JUDGED, "judged.jsonl: its rows have `labels`, which objective=mine does not read"),
        (Needs((3, 3)), TEXT, "texts.jsonl: its rows have 1 document, and objective=mine learns from groups of 3 doc"),
        (Needs((3, 3)), MIXED, "mixed.jsonl: 2 of its 3 rows have 2 to 4 documents, and objective=mine learns from"),
        (
            Needs((3, None)),
            MIXED,
            "1 of its 3 rows have 2 documents, and objective=mine learns from groups of 3 or more",
        ),
        (Needs((3, 3), labels=True), RANKED, "1 of its 2 rows have no label, and objective=mine learns from labels"),
        (Needs(labels=True), TEXT, "texts.jsonl: its rows have no label"),
    ],
)
def test_table_that_does_not_fit_is_named_with_what_to_change(needs, given, message):
    (found,) = needs.misfits("mine", [given])
    assert message in found


@pytest.mark.parametrize(
    ("needs", "given"),
    [(Needs(), TEXT), (Needs((2, 2)), PAIRS), (Needs((2, None)), MIXED), (Needs(labels=True), JUDGED)],
)
def test_table_that_fits_is_not_named(needs, given):
    assert list(needs.misfits("mine", [given])) == []


def test_rows_are_divided_over_ranks_only_for_sums_over_tokens():
    divided = Degrees(context=2)
    assert list(Needs().refusals("mine", divided)) == []
    for needs in (Needs(whole_documents=True), Needs((2, 2)), Needs(labels=True)):
        (reason,) = needs.refusals("mine", divided)
        assert "parallel.context: objective=mine reads whole documents, and 2 ranks" in reason
        assert list(needs.refusals("mine", Degrees(replicate=2))) == []


@pytest.fixture
def groups(cwd):
    """The words of a command line with rows of two documents."""
    row = {"documents": [{"text": "two and two"}, {"text": "is four"}], "labels": [None, 1]}
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for _ in range(4)))
    words = ["data.sources=[{path: rows.jsonl}]", "data.questions.path=null", "data.packing=true", "run.device=cpu"]
    return ["+recipe=quickstart", *words]


@pytest.mark.parametrize("command", ["train", "verify"])
def test_groups_are_refused_under_an_objective_for_text_before_a_weight_is_read(groups, capsys, command, monkeypatch):
    monkeypatch.setattr("fxtune.models.weights.read", lambda *_: pytest.fail("weights were read"))
    assert main([command, *groups]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "rows.jsonl: its rows have 2 documents, and objective=causal_lm learns from one document a row" in said
    assert "`fxtune help objective`" in said


def test_preview_shows_groups_and_says_that_a_run_is_refused(groups, capsys):
    assert main(["preview", *groups]) == 0
    assert "A run is refused: rows.jsonl: its rows have 2 documents" in " ".join(capsys.readouterr().out.split())
