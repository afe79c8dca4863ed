"""Runs whose global batch grows: resumed bit for bit, the same on two ranks, and refused where they cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.bad_steps import interrupt_at
from support.runs import losses, same_export
from support.tuning import TINY

from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.optim.schedule import ScheduleName
from fxtune.training import trainer


@pytest.fixture
def growing(narrow, cwd) -> Config:
    """48 chats in micro-batches of two, four rows a step, and eight from half of the steps on."""
    narrow.train.micro_batch_size, narrow.train.global_batch_size, narrow.train.batch_ramp = 2, 4, [[0.5, 8]]
    narrow.train.max_steps, narrow.train.epochs, narrow.run.dir = None, 1.0, "whole"
    return narrow


def test_interrupted_run_ends_with_the_same_bits(growing, monkeypatch, said):
    figures = trainer.run(growing)
    assert (figures["train/step"], figures["train/epoch"]) == (8, 1)
    assert [text for text in said if "8 steps of 4 rows, 8 from step 5 on, 1.00 epochs" in text]
    growing.run.dir, growing.checkpoint.every = "broken", 2
    interrupt_at(growing, 6, monkeypatch)
    trainer.run(growing)
    assert same_export("whole", "broken")


@pytest.mark.slow
def test_run_with_a_ramp_is_not_extended(growing):
    growing.schedule.name = ScheduleName.constant
    trainer.run(growing)
    growing.train.epochs = 2.0
    with pytest.raises(ConfigError, match=r"train\.batch_ramp is laid out for a number of steps"):
        trainer.run(growing)


def test_deadline_and_ramp_are_refused_together(growing):
    growing.train.max_minutes = 5.0
    assert [text for text in growing.refusals() if "leave one of them out" in text]


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_does(ranks, cwd, chats):
    words = [
        *TINY,
        *(f"data.sources=[{{path: {chats}}}]", "data.questions.path=null", "data.packing=false"),
        *("train.micro_batch_size=2", "train.global_batch_size=4", "train.batch_ramp=[[0.5,8]]", "train.log_every=1"),
        *("run.device=cpu", "tracking.display=none", "optimizer.lr=1e-3"),
    ]
    trainer.run(load([*words, "run.dir=alone"]))
    assert ranks.run([*words, "run.dir=both"], cwd) == [0, 0]
    assert losses(Path("both")) == pytest.approx(losses(Path("alone")), rel=1e-4)
    assert json.loads(Path("both/result.json").read_text())["train/step"] == 8
