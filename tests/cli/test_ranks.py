"""Commands on two ranks: those that share their work, and those that one process does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.harness import command, run
from support.killing import tail

from fxtune.config.compose import load
from fxtune.tuning.lr_finder import range_test

pytestmark = pytest.mark.slow


@pytest.fixture
def words(tmp_path):
    return command(tmp_path, "data.eval_fraction=0.2", "train.eval_every=12")


@pytest.fixture
def says(ranks, tmp_path, words):
    """A function that runs a command on both ranks, as torchrun starts them, and returns its output."""

    def output(name: str, *options: str, codes: tuple[int, int] = (0, 0)) -> str:
        found = ranks.run([name, *words, *options], tmp_path)
        said = tail(tmp_path, 10**6)
        assert tuple(found) == codes, said
        return said

    return output


def test_loss_of_two_ranks_is_that_of_plain_transformers(says, tmp_path):
    said = says("verify", "--loss", "--json", "verify.json")
    found = json.loads((tmp_path / "verify.json").read_text())
    names = [row["name"] for row in found["loss"]]
    assert names[0] == "plain transformers, float32"
    assert "fxtune on 2 ranks, 2 x 2 as configured" in names
    assert found["acted"]
    assert all(row["gradient_off"] < 1e-5 for row in found["loss"])
    assert next(row for row in found["evidence"] if row["technique"] == "ranks")["acted"]
    assert said.count("as asked for.") == 1


def test_learning_rates_are_tested_by_both_ranks_as_by_one(says, tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = says("lr", "--steps", "20", "--json", "lr.json")
    found = json.loads((tmp_path / "lr.json").read_text())
    assert said.count("uggestion: ") == 1
    alone = range_test(load(words), steps=20)
    assert found["losses"] == pytest.approx(alone.losses, rel=1e-3)


def test_speed_is_that_of_both_ranks(says, tmp_path):
    said = says("bench", "--steps", "3", "--warm-up", "2", "--json", "bench.json")
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["ranks"] == 2
    assert found["slowest_rank"] in (0, 1)
    assert len(found["losses"]) == 5
    assert said.count("of documents on each of 2 ranks") == 1


def test_two_ranks_evaluate_as_one_process_does(says, tmp_path, words):
    alone = run(["eval", *words], tmp_path, timeout=1200)
    assert alone.code == 0, alone.text
    both = says("eval")

    def losses(text: str) -> list[str]:
        return [line.split("│")[2].strip() for line in text.splitlines() if "eval/loss" in line]

    assert losses(both) == losses(alone.text)
    assert len(losses(both)) == 1


def test_one_process_shows_the_samples_and_the_forecast_of_a_rank(says):
    said = says("preview", "run.gpus=2", "run.device=cpu")
    assert said.count("The first epoch") == 1
    assert said.count("Forecast for each rank") == 1
    assert "2 (replicate 2)" in said


def test_one_process_merges(ranks, tmp_path, words):
    kept = [word for word in words if not word.startswith("model.")]
    assert ranks.run([*kept, "model.path=builtin:tiny", "train.max_steps=2"], tmp_path) == [0, 0], tail(tmp_path)
    assert ranks.run(["merge", "run/adapter", "merged"], tmp_path) == [0, 0], tail(tmp_path)
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_mistake_of_a_command_of_one_process_is_one_message(ranks, tmp_path):
    assert ranks.run(["chat", "nothing-here"], tmp_path) == [2, 0]
    said = [line for line in tail(tmp_path, 10**6).splitlines() if line.startswith("fxtune:")]
    assert len(said) == 1, said


def test_commands_start_their_ranks_themselves(tmp_path, words):
    both = ["run.gpus=2", "run.device=cpu"]
    done = run(
        ["bench", *words, *both, "--steps", "2", "--warm-up", "2", "--json", "bench.json"], tmp_path, timeout=1200
    )
    assert done.code == 0, done.text
    assert json.loads((tmp_path / "bench.json").read_text())["ranks"] == 2
    assert done.text.count("of documents on each of 2 ranks") == 1


def test_trials_of_a_search_run_on_both_ranks(tmp_path, words):
    both = ["run.gpus=2", "run.device=cpu", "train.micro_batch_size=1", "train.global_batch_size=2"]
    options = ["--axes", "micro_batch", "--steps", "2", "--minutes", "20", "--output", "tuned.yaml", "--again"]
    done = run(["tune", *words, *both, *options], tmp_path, timeout=1200)
    assert done.code == 0, done.text
    assert "refused: A step has 1 micro-batch" in done.text
    assert "# Hardware: 2 x " in Path(tmp_path / "tuned.yaml").read_text()


def test_doctor_tests_the_ranks_of_a_recipe(tmp_path, words):
    done = run(["doctor", *words, "run.gpus=2", "run.device=cpu", "--json", "doctor.json"], tmp_path, timeout=1200)
    found = {row["what"]: row["seen"] for row in json.loads((tmp_path / "doctor.json").read_text())}
    assert "2 ranks, 4 MiB in" in found["all-reduce"], done.text
    assert "can run on 2 ranks (replicate 2) on " in found["run"]
