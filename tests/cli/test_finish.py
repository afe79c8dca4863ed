"""`fxtune finish RUN` on runs that are stopped, finished, alive or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from filelock import FileLock

from fxtune.cli.main import main
from fxtune.optim.schedule import ScheduleName
from fxtune.training import trainer as train


def test_stopped_run_is_finished_by_its_name(narrow, cwd, monkeypatch, capsys):
    narrow.schedule.name, narrow.schedule.decay_steps = ScheduleName.wsd, 0.25
    narrow.train.max_steps, narrow.checkpoint.every, narrow.run.dir = 20, 1, "runs/mine"
    step_of = train.Steps.take

    def kill(self, step, lr):
        if step.index == 6:
            raise KeyboardInterrupt
        return step_of(self, step, lr)

    with monkeypatch.context() as patch:
        patch.setattr(train.Steps, "take", kill)
        with pytest.raises(KeyboardInterrupt):
            train.run(narrow)
    assert main(["finish", "mine"]) == 0
    result = json.loads(Path("runs/mine/result.json").read_text())
    assert [result[name] for name in ("train/step", "train/ended_early")] == [8, "finish"]
    capsys.readouterr()
    assert main(["finish", "mine"]) == 0
    assert "is finished already" in capsys.readouterr().out
    assert main(["finish", "mime"]) == 2
    assert "there is no run `mime`" in capsys.readouterr().err


def test_live_run_gets_the_file_and_one_without_a_checkpoint_does_not(cwd, capsys):
    folder = Path("runs/mine")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {path: 'builtin:tiny'}\n")
    assert main(["finish", "mine"]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert not (folder / "finish").exists()
    with FileLock(folder / ".lock"):
        assert main(["finish", "runs/mine"]) == 0
    assert "is running and will end" in capsys.readouterr().out
    assert (folder / "finish").exists()


def test_stopped_run_whose_ranks_do_not_fit_its_steps_gets_no_finish_file(cwd, capsys):
    folder = Path("runs/mine")
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {path: 'builtin:tiny'}\nrun: {gpus: '4', device: cpu}\nparallel: {context: '2'}\n"
        "train: {micro_batch_size: 1, global_batch_size: 3}\n"
    )
    assert main(["finish", "mine"]) == 2
    assert "A step has 3 micro-batches" in capsys.readouterr().err
    assert not (folder / "finish").exists()
