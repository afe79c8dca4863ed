"""Runs that are interrupted and resumed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.cases import slow_but
from support.runs import figures, losses, same_export

from fxtune.data.config import SourceConfig
from fxtune.errors import ConfigError
from fxtune.optim.config import OptimizerName
from fxtune.training import trainer as train


@pytest.mark.parametrize(("lora", "packing"), slow_but([(True, True), (False, False)], (True, True)))
def test_interrupted_run_ends_with_the_same_weights(narrow, cwd, monkeypatch, lora, packing):
    narrow.techniques.lora.enabled, narrow.data.packing = lora, packing
    narrow.techniques.lora.dropout = 0.1  # random numbers must continue as well
    narrow.checkpoint.every, narrow.run.dir = 2, "undisturbed"
    narrow.train.max_steps = 7
    train.run(narrow)
    narrow.run.dir = "interrupted"
    take_step, taken = train.Steps.take, []

    def interrupt(self, step, lr):
        taken.append(step.index)
        if len(taken) in (4, 7):  # after step 3 (its checkpoint is 2), then after 5 (its checkpoint is 4)
            raise KeyboardInterrupt
        return take_step(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train.run(narrow)
    train.run(narrow)
    assert taken == [0, 1, 2, 3, 2, 3, 4, 4, 5, 6]
    assert same_export("undisturbed", "interrupted")
    assert losses(Path("interrupted")) == losses(Path("undisturbed"))
    assert figures("interrupted", "step") == [(step,) for step in range(1, 8)]


@pytest.mark.slow
def test_resume_refuses_changed_data(small, cwd, chats, monkeypatch):
    own = cwd / "own.jsonl"
    own.write_text(chats.read_text())
    small.data.sources, small.checkpoint.every, small.run.dir = [SourceConfig(path=str(own))], 1, "run"
    monkeypatch.setattr(train.Trainer, "_finish", lambda self: {})
    train.run(small)
    own.write_text("\n".join(chats.read_text().splitlines()[1:]))
    with pytest.raises(ConfigError, match="data changed"):
        train.run(small)


@pytest.mark.slow
def test_run_killed_during_export_keeps_its_figures(small, cwd, monkeypatch):
    small.run.dir = "run"
    usual = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a job in a shell's background starts with it ignored
    with monkeypatch.context() as patch:
        patch.setattr("fxtune.training.run.export.save_model", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train.run(small)
    signal.signal(signal.SIGINT, usual)
    result = train.run(small)
    assert result == json.loads(Path("run/result.json").read_text())
    assert [result["train/step"], result["train/loss"]] == [6, losses(Path("run"))[-1]]


def test_copy_of_a_checkpoint_is_complete_before_what_it_holds_changes(narrow, build, monkeypatch):
    """Only a GPU copies beside the loop; the order of the calls is the same here."""
    narrow.optimizer.name, narrow.train.max_steps = OptimizerName.adamw_schedulefree, 2
    trainer, calls, doing = build(narrow), [], []

    def noted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: calls.append(name) or real(*given))

    step, saving = trainer.train_step, trainer.run_state.checkpoints
    for owner, name in (
        (saving, "wait_for_copy"),
        (step, "sum_over_ranks"),
        (step, "update"),
        (step.optimizer, "use_averages"),
    ):
        noted(owner, name)
    save = saving.save
    monkeypatch.setattr(
        saving, "save", lambda *given: doing.append(trainer.world.heartbeat.last.doing) or save(*given)
    )
    trainer.run()
    assert calls == [*["wait_for_copy", "sum_over_ranks", "update"] * 2, "wait_for_copy", "use_averages"]
    assert doing == ["saving"]  # not the step before it: the launcher ends a rank that stalls in a step
