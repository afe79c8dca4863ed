"""What a user sees of `fxtune tune`: options, table, recipe, --json, and two real trials."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tuning import TINY, FakeTrials, tiny_config, tiny_context

from fxtune.cli import tune
from fxtune.cli.main import main
from fxtune.errors import StorageError
from fxtune.tuning import search, trial

EAGER = "techniques.attention.backend=eager"
RECIPE = Path("recipes/quickstart_tuned.yaml")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def trials(monkeypatch) -> FakeTrials:
    fake = FakeTrials()
    monkeypatch.setattr(trial, "measure", fake.measure)
    monkeypatch.setattr(search, "time", fake)
    monkeypatch.setattr(tune, "survey", lambda *_, **__: tiny_context())
    return fake


def fxtune_tune(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and the content of --json."""
    code = main(["tune", *TINY, "--json", "found.json", *words])
    file = Path("found.json")
    found = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return code, found


@pytest.mark.slow
def test_real_trials_give_a_recipe_that_trains(cwd, monkeypatch, capsys, tmp_path_factory, forks):
    """Trials are forked from a process that has imported everything, which saves seconds; tests/tuning has real
    starts."""

    def run_forked(command: list[str], limit: float) -> tuple[int, str, float]:
        folder = tmp_path_factory.mktemp("trial")
        code = forks.start(command[3:], folder).wait()
        return code, (folder / "log.txt").read_text(), 1.0

    monkeypatch.setattr(trial, "run_process", run_forked)
    monkeypatch.setattr(search, "REPEATS", 0)
    data = f"data.cache_dir={tmp_path_factory.mktemp('rows')}"
    words = [data, "train.micro_batch_size=2", "train.global_batch_size=2", "--axes", "micro_batch", "--steps", "2"]
    code, found = fxtune_tune(*words)
    assert code == 0, capsys.readouterr().err
    assert [row["deltas"] for row in found["rows"]] == [{}, {"train.micro_batch_size": 1}]
    for row in found["rows"]:
        (answer,) = row["answers"]
        assert answer["outcome"] == "measured"
        assert answer["tokens_per_second"] > 0
        assert answer["peak"] > 0
        assert len(answer["losses"]) == 2 + trial.WARM_UP
        assert row["loss_off"] < 1e-5, "the loss does not depend on how rows are split into micro-batches"
    recipe = yaml.safe_load(RECIPE.read_text())
    assert recipe["defaults"] == ["quickstart", "_self_"]
    assert set(recipe) == {"defaults", "model", "data", "train"}, "what was typed, and no defaults"
    assert set(recipe["train"]) == {"micro_batch_size", "global_batch_size"}

    monkeypatch.setattr(trial, "measure", lambda *_: pytest.fail("it is in the cache"))
    code, again = fxtune_tune(*words)
    assert code == 0
    assert [[{**answer, "cached": False} for answer in row["answers"]] for row in again["rows"]] == [
        row["answers"] for row in found["rows"]
    ]
    assert Path(f"{RECIPE}.old").exists()

    train = ["+recipe=quickstart_tuned", "train.max_steps=1", "data.questions.path=null", "tracking.display=none"]
    assert main(train) == 0
    assert json.loads(Path("runs/quickstart_tuned/result.json").read_text())["train/step"] == 1


def test_the_recipe_has_what_differs_and_the_measurements_on_top(cwd, trials, capsys):
    trials.rules = {EAGER: 1.3, "train.micro_batch_size=2": 1.2, "train.micro_batch_size=1": 0.7}
    code, found = fxtune_tune("--axes", "attention,micro_batch")
    assert code == 0
    assert found["winner"] == {"techniques.attention.backend": "eager", "train.micro_batch_size": 2}
    assert found["not_tried"] == []
    assert "+56.0% against the recipe" in capsys.readouterr().out
    text = RECIPE.read_text()
    recipe = yaml.safe_load(text)
    assert {key: recipe[key] for key in ("defaults", "train", "techniques")} == {
        "defaults": ["quickstart", "_self_"],
        "train": {"micro_batch_size": 2},
        "techniques": {"attention": {"backend": "eager"}},
    }
    for part in (
        "fxtune tune +recipe=quickstart",
        "python -m fxtune +recipe=quickstart_tuned",
        tiny_context().facts.device_name,
        "1,560 tokens/s",
        "peak 1.50 GiB",
        f"torch {metadata.version('torch')}",
        "# @package _global_",
        "within 0.001",
    ):
        assert part in text


def test_if_the_recipe_is_the_fastest_it_is_written_as_it_was(cwd, trials, capsys):
    code, found = fxtune_tune("--axes", "attention")
    assert (code, found["winner"]) == (0, {})
    assert "as it was" in RECIPE.read_text().splitlines()[0]


def test_if_nothing_runs_the_error_has_the_reason(cwd, trials, capsys):
    trials.rules = {"all": trial.Outcome.crashed}
    code, _ = fxtune_tune("--axes", "attention")
    assert code == 4
    err = capsys.readouterr().err
    assert "No setting of these axes (attention) runs here" in err
    assert "illegal instruction" in err
    assert not RECIPE.exists()


def test_when_the_minutes_are_over_the_rest_is_listed(cwd, trials, capsys):
    trials.rules = {EAGER: trial.Outcome.hung}
    code, found = fxtune_tune("--axes", "attention,micro_batch", "--minutes", "0.1")
    assert code == 0
    assert "attention.backend=eager" in found["not_tried"]
    assert any("micro_batch_size" in text for text in found["not_tried"])
    out = capsys.readouterr().out
    assert "The 0.1 minutes are over. Not tried: " in out
    assert "more --minutes" in out
    trials.rules = {EAGER: 2.0}
    assert fxtune_tune("--axes", "attention,micro_batch")[1]["winner"] == {"techniques.attention.backend": "eager"}, (
        "the time limit is no result"
    )


def test_ctrl_c_loses_no_finished_trial(cwd, trials, capsys):
    trials.rules = {"train.micro_batch_size=2": KeyboardInterrupt}
    code, found = fxtune_tune("--axes", "attention,micro_batch")
    assert code == 130
    assert found["winner"] is None
    assert sum(row["tokens_per_second"] > 0 for row in found["rows"]) == 2
    out = capsys.readouterr().out
    assert "the same command continues from them" in out
    assert "attention.backend=eager" in out
    assert not RECIPE.exists()
    before, trials.rules = len(trials.calls), {"train.micro_batch_size=2": 2.0}
    code, found = fxtune_tune("--axes", "attention,micro_batch")
    assert (code, found["winner"]) == (0, {"train.micro_batch_size": 2})
    assert EAGER not in trials.calls[before], "it was measured before Ctrl-C"


@pytest.mark.slow
def test_again_ignores_the_cache(cwd, trials):
    fxtune_tune("--axes", "attention")
    before = len(trials.calls)
    fxtune_tune("--axes", "attention")
    assert len(trials.calls) == before
    fxtune_tune("--axes", "attention", "--again", "--output", "other.yaml")
    assert len(trials.calls) == 2 * before
    assert Path("other.yaml").exists()


def test_a_dry_run_lists_candidates_and_runs_nothing(cwd, trials, capsys):
    assert main(["tune", *TINY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert trials.calls == []
    assert list(cwd.iterdir()) == []
    for part in (
        "the recipe as it is",
        "attention.backend=eager",
        "checkpointing.policy=selective",
        "micro_batch_size=2",
        "GiB",
        "attention.backend=flash4",
        "refused: attention.backend:",
        "Nothing was run",
    ):
        assert part in out


@pytest.mark.slow
def test_the_gpu_is_examined_by_another_process(cwd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "_survey_here", lambda *_: pytest.fail("in this process"))
    context = tune.survey(TINY, tiny_config(), with_data=False)
    assert context.facts.device == "cpu", "nothing is patched in the other process"
    assert context.precision == "float32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--axes", "micro_bach"], "there is no axis `micro_bach`; did you mean `micro_batch`?"),
        (["--axes", ","], "The axes: attention, compile"),
        (["--output", "fast.txt"], "a recipe is a file NAME.yaml"),
        (["-m", "train.micro_batch_size=1,2"], "leave -m out"),
    ],
)
def test_a_bad_option_is_refused_before_any_trial(cwd, trials, capsys, words, message):
    assert main(["tune", *TINY, *words]) == 2
    assert message in capsys.readouterr().err
    assert trials.calls == []


def test_a_file_of_the_user_is_not_touched(cwd, trials, capsys):
    RECIPE.parent.mkdir()
    RECIPE.write_text("# mine\n")
    assert main(["tune", *TINY]) == StorageError.exit_code
    assert "fxtune did not write it" in capsys.readouterr().err
    assert trials.calls == []
    assert RECIPE.read_text() == "# mine\n"
