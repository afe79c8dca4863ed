"""A feature answers for itself: what it refuses, what it changes in the forecasts, and how it is observed. So a new one
needs no line in the planner or in the refusals, and fails here until it answers."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fxtune.models.kinds.known import KINDS
from fxtune.objectives.registry import OBJECTIVES
from fxtune.optim.config import TRAITS, OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import state_of
from fxtune.techniques.pipeline import Pipeline

ROOT = Path(__file__).parents[2] / "fxtune"
TECHNIQUES = [entry.name for entry in fields(Pipeline)]
SILENT = {
    ("rope", "describe"): "other frequencies, as many numbers",
    ("precision", "describe"): "the dtype of products is a fact of the run (Facts.compute_dtype)",
    ("apex", "describe"): "its norms keep what torch's keep",
    ("router", "describe"): "a loss of a few numbers",
    ("plugins", "describe"): "fxtune does not know what a plugin's technique keeps",
}
"""(technique, answer) -> why it has none."""


@pytest.mark.parametrize("name", TECHNIQUES)
def test_each_technique_answers_for_itself(name):
    kind = type(getattr(Pipeline(), name))
    for answer in ("check", "describe", "verify"):
        assert (answer in vars(kind)) != ((name, answer) in SILENT), answer


@pytest.mark.parametrize("name", OptimizerName)
def test_each_optimizer_says_what_it_keeps(name):
    assert state_of(OptimizerConfig(name=name)).moments == TRAITS[name].moments


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_each_objective_says_what_it_needs_and_counts(name):
    objective = OBJECTIVES[name]
    assert objective.needs.head in {kind.head for kind in KINDS}
    for answer in ("loss", "normalizer"):
        assert any(answer in vars(base) for base in objective.__mro__ if base.__name__ != "Objective"), answer


def test_planner_and_refusals_know_no_feature_by_name():
    """Nor do they import one: what they need of it is in facts/execution.py."""
    files = [ROOT / "estimate" / name for name in ("memory.py", "step_time.py", "traffic.py")]
    names, others = "|".join(TECHNIQUES), "|".join([*OptimizerName.__members__, *OBJECTIVES])
    for file in [*files, ROOT / "settle/refusals.py", ROOT / "cli/plan.py"]:
        # `experts`: what ranks divide, `context`: what they exchange; with or without the technique beside it.
        known = rf"techniques\.(?:{names})\b(?!\.experts|\.context)|[\"'](?:{others})[\"']"
        assert not re.findall(known, file.read_text()), file.name
