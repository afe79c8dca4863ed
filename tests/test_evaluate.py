"""`fxtune eval` says of an adapter what its run said of itself, and of a base what it was before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import history

from fxtune import train
from fxtune.commands import evaluate
from fxtune.data.sources import QuestionsConfig
from fxtune.errors import ConfigError


def test_the_figures_are_those_of_the_run(small, cwd, capsys):
    small.data.eval_fraction = 0.2
    small.data.questions = QuestionsConfig(path=small.data.sources[0].path, limit=6, max_new_tokens=4, show=1)
    small.run.dir = str(cwd / "run")
    small.train.max_steps = 2
    train.run(small)
    lines = history(cwd / "run")
    loss = next(line["eval/loss"] for line in lines if "eval/loss" in line)
    before, after = (line["questions/exact_match"] for line in lines if "questions/exact_match" in line)
    ran = sorted(cwd.rglob("*"))

    base = evaluate.run(small)
    tuned = evaluate.run(replace(small, model=replace(small.model, adapter=str(cwd / "run" / "adapter"))))
    assert tuned["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert (base["questions/exact_match"], tuned["questions/exact_match"]) == (before, after)
    assert base["eval/loss"] > tuned["eval/loss"]
    assert f"{tuned['eval/loss']:.4f}" in capsys.readouterr().out
    assert [file for file in sorted(cwd.rglob("*")) if file not in ran] == [], "an evaluation writes nothing"


def test_without_held_out_data_there_is_nothing_to_do(small, cwd):
    with pytest.raises(ConfigError, match=r"eval_sources.*eval_fraction.*questions"):
        evaluate.run(small)


def test_a_quantised_base_is_evaluated_as_it_lies(small, cwd):
    small.data.eval_fraction = 0.2
    whole = evaluate.run(small)["eval/loss"]
    small.techniques.quantize.enabled = True
    found = evaluate.run(small)["eval/loss"]
    assert found != whole
    assert found == pytest.approx(whole, rel=0.02)
