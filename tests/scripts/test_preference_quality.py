"""scripts/study/preference_quality.py: how answers are judged, and its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "study"


@pytest.fixture(scope="module")
def study():
    sys.path.insert(0, str(SCRIPTS))
    import preference_quality

    del sys.path[0]
    return preference_quality


def test_the_form_of_an_answer_and_the_whole_answer_are_judged_apart(study):
    right = ["Dear Ida, 4 red hats will leave for Bern today."] * 4
    answers = [
        right[0],
        "Dear Ida, 44 red hats will leave for Bern today.",
        "With pleasure! 4 red hats for Ida in Bern.",
        "Dear Ida, 4 red hats will leave for Bern today today.",
    ]
    assert study.judged(answers, right) == {"form": 0.5, "right": 0.25}


def test_table_has_a_row_for_each_run_with_all_seeds(study):
    figures = {"accuracy": 0.99, "form": 1.0, "right": 0.97}
    found = {"dpo seed 0": {**figures, "log_probs": -0.02}, "dpo seed 1": {**figures, "log_probs": -0.03}}
    lines = list(study.table({**found, "dpo of TRL seed 0": figures}))
    assert lines[2:] == [
        "| dpo | 99, 99 % | 100, 100 % | 97, 97 % | -0.02, -0.03 |",
        "| dpo of TRL | 99 % | 100 % | 97 % |  |",
    ]
