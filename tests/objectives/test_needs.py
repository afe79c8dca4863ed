"""Rows and ranks that an objective cannot learn from are refused in one message, with what to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.tables import grouped, table

from fxtune.cli.main import main
from fxtune.data.formats.registry import FORMATS
from fxtune.distributed.parallel import Degrees
from fxtune.objectives.needs import Needs, same_label_refusals

DOCUMENT = ([1, 2, 3], [False, True, True])
TEXT = table([DOCUMENT] * 4, "texts.jsonl")
PAIRS = grouped([[DOCUMENT] * 2] * 3, name="pairs.jsonl")
MIXED = grouped([[DOCUMENT] * 2, [DOCUMENT] * 3, [DOCUMENT] * 4], name="mixed.jsonl")
RANKED = grouped([[DOCUMENT] * 3] * 2, [1, None, 0, None, None, None], name="ranked.jsonl")
JUDGED = grouped([[DOCUMENT]] * 2, [1, 0], name="judged.jsonl")

PREFERENCES = replace(grouped([[DOCUMENT] * 2] * 2, [2, 0] * 2, name="pairs.jsonl"), format=FORMATS["preference"])
ANSWERS = replace(JUDGED, format=FORMATS["kto"])


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
        (Needs((2, 2)), TEXT, "learns from groups of 2 documents. Give rows with `prompt`, `chosen` and `rejected`"),
        (Needs(labels=True), TEXT, "Give rows with an answer and its `label`, true or false"),
        (
            Needs(),
            PREFERENCES,
            "(preference), and objective=mine would learn good and bad answers alike. Set objective=dpo.",
        ),
        (Needs(), ANSWERS, "(kto), and objective=mine would learn good and bad answers alike. Set objective=kto;"),
        (
            Needs((2, 2)),
            ANSWERS,
            "objective=mine needs rows with `prompt`, `chosen` and `rejected`. Set objective=kto",
        ),
        (Needs(labels=True), PREFERENCES, "needs rows with an answer and its `label`, true or false. Set objective=d"),
    ],
)
def test_table_that_does_not_fit_is_named_with_what_to_change(needs, given, message):
    (found,) = needs.row_refusals("mine", [given])
    assert message in found


@pytest.mark.parametrize(
    ("needs", "given"),
    [
        (Needs(), TEXT),
        (Needs((2, 2)), PAIRS),
        (Needs((2, None)), MIXED),
        (Needs(labels=True), JUDGED),
        (Needs((2, 2)), PREFERENCES),
        (Needs(labels=True), ANSWERS),
    ],
)
def test_table_that_fits_is_not_named(needs, given):
    assert list(needs.row_refusals("mine", [given])) == []


def test_judgments_of_one_kind_are_named():
    good = replace(grouped([[DOCUMENT]] * 2, [1, 1], name="good.jsonl"), format=FORMATS["kto"])
    bad = replace(grouped([[DOCUMENT]], [0], name="bad.jsonl"), format=FORMATS["kto"])
    assert list(same_label_refusals("kto", [good, bad])) == list(same_label_refusals("kto", [JUDGED, TEXT])) == []
    (message,) = same_label_refusals("kto", [good, TEXT])
    assert "good.jsonl: all answers are good by their `label`, and objective=kto" in message
    (message,) = same_label_refusals("kto", [bad, bad])
    assert "bad.jsonl, bad.jsonl: all answers are bad" in message


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


@pytest.mark.parametrize(
    ("row", "way"),
    [
        ({"prompt": "two and two? ", "chosen": "four", "rejected": "five"}, "(preference), and objective=causal_lm"),
        ({"prompt": "two and two? ", "completion": "four", "label": True}, "(kto), and objective=causal_lm"),
    ],
)
def test_preferences_are_refused_under_an_objective_for_text_with_the_way(groups, capsys, row, way):
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for _ in range(4)))
    assert main(["train", *groups]) == 2
    assert (
        f"rows.jsonl: its rows are preferences {way} would learn good and bad answers alike. Set objective="
        in " ".join(capsys.readouterr().err.split())
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data.sources.0.path=rows.jsonl"],
            "rows.jsonl: its rows have 1 document, and objective=dpo learns from groups",
        ),
        (["objective.beta=0"], "`objective.beta=0.0` must be above 0"),
        (["optimizer.lr=auto"], "optimizer.lr: auto has a rule for supervised text"),
    ],
)
def test_what_dpo_cannot_learn_from_is_refused_before_a_weight_is_read(cwd, capsys, monkeypatch, words, message):
    monkeypatch.setattr("fxtune.models.weights.read", lambda *_: pytest.fail("weights were read"))
    rows = [{"prompt": f"{number} and two? ", "completion": "four"} for number in range(40)]
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert main(["train", "+recipe=dpo_quickstart", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_preview_shows_groups_and_says_that_a_run_is_refused(groups, capsys):
    assert main(["preview", *groups]) == 0
    assert "A run is refused: rows.jsonl: its rows have 2 documents" in " ".join(capsys.readouterr().out.split())
