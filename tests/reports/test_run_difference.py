"""What differs between two runs."""

import json

import pytest
import yaml

from fxtune.reports.run_difference import Difference, Parting, compare_runs


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder and return it."""

    def make(name, config=None, setting=None, losses=(1.0, 0.5, 0.25)):
        folder = tmp_path / name
        folder.mkdir()
        values = {"run": {"name": name}, "optimizer": {"lr": 1e-3}, "data": {"sources": [{"path": "a.jsonl"}]}}
        (folder / "config.yaml").write_text(yaml.safe_dump({**values, **(config or {})}))
        known = {"machine": {"torch": "2.13"}, "data": {"0 a.jsonl": "8 documents, 1a2b"}}
        (folder / "setting.json").write_text(json.dumps({**known, **(setting or {})}))
        rows = [{"train/step": step, "train/loss": loss} for step, loss in enumerate(losses, 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def test_equal_runs_differ_in_nothing(make_run):
    found = compare_runs(make_run("a"), make_run("b"))
    assert found.equal
    assert found.partings == [Parting("train/loss", 3, None)]


def test_recipe_data_machine_and_decisions_are_told_apart(make_run):
    decided = {"techniques": {"attention": {"backend": "sdpa"}}}
    other = {"techniques": {"attention": {"backend": "flash4"}}, "machine": {"torch": "2.11"}}
    first = make_run("a", setting=decided)
    second = make_run("b", {"optimizer": {"lr": 2e-3}}, {**other, "data": {"0 a.jsonl": "9 documents, 3c4d"}})
    found = compare_runs(first, second)
    assert found.recipe == [Difference("optimizer.lr", 1e-3, 2e-3)]
    assert found.sections == {
        "machine and packages": [Difference("machine.torch", "2.13", "2.11")],
        "data": [Difference("data.0 a.jsonl", "8 documents, 1a2b", "9 documents, 3c4d")],
        "what was decided": [Difference("techniques.attention.backend", "sdpa", "flash4")],
    }
    assert not found.equal


def test_curves_part_at_the_first_step_with_another_digit(make_run):
    found = compare_runs(make_run("a"), make_run("b", losses=(1.0, 0.5000001, 0.5, 0.1)))
    (parting,) = found.partings
    assert (parting.step, parting.common) == (2, 3)
    assert parting.largest == pytest.approx(1.0)


def test_not_a_number_equals_itself(make_run):
    assert compare_runs(make_run("a", losses=[float("nan")]), make_run("b", losses=[float("nan")])).equal


def test_a_line_that_is_being_written_is_left_out(make_run):
    first, second = make_run("a"), make_run("b")
    with (second / "metrics.jsonl").open("a") as out:
        out.write('{"train/step": 4, "train/lo')
    assert compare_runs(first, second).equal
