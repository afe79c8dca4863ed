"""What a user sees of `fxtune lr`: the table, the suggestion, --plot and --json."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from support.tuning import TINY

from fxtune.cli import lr
from fxtune.cli.main import main
from fxtune.tuning.lr_finder import RangeTest


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def test_the_command_prints_a_table_and_writes_the_requested_file(cwd, capsys):
    (cwd / "runs" / "quickstart").mkdir(parents=True)
    assert main(["lr", *TINY, "--steps", "20", "--lowest", "1e-3", "--highest", "1e3", "--json", "lr.json"]) == 0
    out = capsys.readouterr().out
    found = json.loads((cwd / "lr.json").read_text())
    assert {path.name for path in cwd.iterdir()} == {"lr.json", "runs"}
    assert not list((cwd / "runs" / "quickstart").iterdir())
    assert "1.00e-03" in out
    assert "uggestion: " in out
    assert "The recipe has 0.004, optimizer.lr=auto would be" in out
    assert found["present"] == 4e-3
    assert found["auto"] == pytest.approx(1.26e-2, rel=0.01)


FOUND = RangeTest([1e-3, 1e-2, 1e-1], [2.0, 1.0, 9.0], [2.0, 1.5, 3.0], True, 0.5, 5e-3, "a reason", 4e-3, None, [])


def test_the_curve_is_drawn(cwd):
    root = ElementTree.fromstring(lr.draw(FOUND, "quickstart", "nats per supervised token"))
    words = [text.strip() for text in root.itertext()]
    assert {"quickstart", "smoothed", "suggestion: 0.005", "recipe: 0.004"} <= set(words)


def test_verdict_names_the_rates_that_compete():
    assert lr.verdict(FOUND) == "Suggestion: optimizer.lr=0.005 (a reason). The recipe has 0.004."


def test_rates_of_preferences_are_not_tested_by_their_loss(cwd, capsys, monkeypatch):
    monkeypatch.setattr("fxtune.models.weights.read", lambda *_: pytest.fail("weights were read"))
    assert main(["lr", "+recipe=dpo_quickstart"]) == 2
    assert "objective=dpo" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["--steps", "5"], "--steps 5: give a whole number, 20 or more", 2),
        (["--lowest", "0"], "--lowest 0: give the rate of the first step", 2),
        (["--plot", "curve.gif"], "--plot curve.gif: the plot is an SVG file", 2),
        (["--json", "nowhere/b.json"], "--json nowhere/b.json cannot be written", 6),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_built(cwd, capsys, monkeypatch, words, message, code):
    monkeypatch.setattr(lr, "range_test", None)
    assert main(["lr", *TINY, *words]) == code
    assert message in capsys.readouterr().err.replace("\n", " ")
