"""Runs whose rows grow: resumed bit for bit in a stage and at its border, the same on two ranks, and refused where they
cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bad_steps import interrupt_at
from support.cases import slow_but
from support.harness import write_texts
from support.runs import losses, same_export
from support.tuning import TINY

from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.data.config import SourceConfig
from fxtune.errors import ConfigError
from fxtune.optim.schedule import ScheduleName
from fxtune.training import trainer

GROWING = [[0.0, 32], [0.3, 64], [0.6, 128]]


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data") / "texts.jsonl", 60)


@pytest.fixture
def growing(narrow, texts, cwd) -> Config:
    """An epoch of texts in steps of 4 x 128 tokens, with rows of 32, 64 and 128 tokens."""
    narrow.data.sources, narrow.data.sequence_length = [SourceConfig(path=str(texts))], 128
    narrow.data.length_schedule = GROWING
    narrow.train.micro_batch_size, narrow.train.global_batch_size = 1, 2
    narrow.train.max_steps, narrow.train.epochs, narrow.run.dir = None, 1.0, "whole"
    return narrow


@pytest.mark.parametrize(("packing", "place"), slow_but([(True, "border"), (False, "inside")], (True, "border")))
def test_interrupted_run_ends_with_the_same_bits(growing, packing, place, monkeypatch, said):
    growing.data.packing = growing.techniques.attention.enabled = packing
    figures = trainer.run(growing)
    assert figures["train/epoch"] == 1
    planned = [text for text in said if " steps of 8 rows of 32 tokens, 4 rows of 64 tokens from step " in text]
    border = int(planned[0].split("2 rows of 128 tokens from step ")[1].split()[0]) - 1
    assert [text for text in said if f"From step {border + 1} on: 2 rows of 128 tokens." in text]
    growing.run.dir = "broken"
    interrupt_at(growing, border if place == "border" else border - 1, monkeypatch)
    trainer.run(growing)
    assert same_export("whole", "broken")


@pytest.mark.slow
def test_run_with_a_length_schedule_is_not_extended(growing):
    growing.schedule.name = ScheduleName.constant
    trainer.run(growing)
    growing.train.epochs = 2.0
    with pytest.raises(ConfigError, match=r"data\.length_schedule is laid out for a number of steps"):
        trainer.run(growing)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("max_minutes", 5.0, "leave one of them out"), ("noise_scale", True, "changes what a row is")],
)
def test_options_that_need_equal_rows_are_refused_with_it(growing, key, value, message):
    setattr(growing.train, key, value)
    assert [text for text in growing.refusals() if message in text]


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_does(ranks, cwd, texts):
    words = [
        *TINY,
        *(f"data.sources=[{{path: {texts}}}]", "data.questions.path=null", "data.packing=false"),
        *("data.sequence_length=128", "data.length_schedule=[[0.0,32],[0.5,128]]", "train.log_every=1"),
        *("train.micro_batch_size=1", "train.global_batch_size=2", "run.device=cpu", "tracking.display=none"),
        "optimizer.lr=1e-3",
    ]
    trainer.run(load([*words, "run.dir=alone"]))
    assert ranks.run([*words, "run.dir=both"], cwd) == [0, 0]
    assert losses(Path("both")) == pytest.approx(losses(Path("alone")), rel=1e-4)


@pytest.mark.slow
def test_compiled_run_compiles_each_length_as_often_as_the_others(growing):
    growing.data.packing = growing.techniques.attention.enabled = growing.techniques.compile.enabled = True
    growing.data.length_schedule, growing.model.architecture["num_hidden_layers"] = [[0.0, 64], [0.5, 128]], 1
    trainer.run(growing)
    lengths = json.loads(Path("whole/compile.json").read_text())["lengths"]
    assert lengths["2x64"] == lengths["1x128"], lengths
