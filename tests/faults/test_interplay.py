"""Two faults at the same time, or a second fault while the first is handled: signals, memory, full disks, bad numbers,
resume.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command, small_disk
from support.runs import history

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState
from fxtune.cli.main import main
from fxtune.config.root import Config, Resume, Spikes
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError
from fxtune.facts.options import Policy
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.optimizer import Optimizer
from fxtune.system.process.oom import RowsPerPass
from fxtune.techniques.checkpointing.technique import Checkpointing
from fxtune.tracking.tracker import Tracker
from fxtune.training import builder, evaluation, trainer

ADAPTER = "adapter/adapter_model.safetensors"


def raises(error: BaseException) -> None:
    raise error


def send(how: signal.Signals = signal.SIGTERM) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), how)


@pytest.fixture(autouse=True)
def _answered():
    """Handle SIGINT, which a background job of a shell ignores."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture
def run_(narrow, cwd) -> Config:
    narrow.run.dir, narrow.checkpoint.every = "run", 0
    return narrow


def state(run: str = "run") -> dict:
    newest = stored.paths(Path(run) / "checkpoints")[-1]
    assert stored.damage_of(newest) is None
    return json.loads((newest / "state.json").read_text())


def short_of_memory(monkeypatch, rows: int, once=lambda: None) -> list[int]:
    """Make forward passes of more than `rows` rows fail.

    Calls `once` at the first failure. Returns the rows of each pass.
    """
    real, seen = LanguageModel.summed_loss, []

    def scarce(self, batch):
        seen.append(len(batch.input_ids))
        if len(batch.input_ids) > rows:
            if sum(count > rows for count in seen) == 1:
                once()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return real(self, batch)

    monkeypatch.setattr(LanguageModel, "summed_loss", scarce)
    return seen


def at_step(monkeypatch, step: int, what) -> None:
    """Call `what` once before step `number`, counted from 0."""
    taken, done = trainer.Steps.take, []

    def watched(self, given, lr):
        if given.index == step and not done:
            done.append(True)
            what()
        return taken(self, given, lr)

    monkeypatch.setattr(trainer.Steps, "take", watched)


@pytest.mark.vital
def test_signal_waits_for_the_current_save(run_, monkeypatch):
    """The signal's checkpoint is of the same step, so it is not written twice."""
    run_.checkpoint.every = 3
    real, written, signalled = stored.write, [], threading.Event()

    def slow(staging, *given):
        assert signalled.wait(600)
        written.append(staging.name)
        return real(staging, *given)

    monkeypatch.setattr(stored, "write", slow)
    at_step(monkeypatch, 3, lambda: (send(), signalled.set()))
    with pytest.raises(Stopped, match="saved after step 3 of 6"):
        trainer.run(run_)
    assert written == [".staging-step-00000003"]
    assert state()["step"] == 3


@pytest.mark.slow
def test_save_that_fails_during_a_signal_is_retried_once(run_, monkeypatch, said):
    run_.checkpoint.every = 3
    real, tries, signalled = stored.write, [], threading.Event()

    def failing(*given):
        tries.append(given[0].name)
        if len(tries) == 1:
            signalled.wait(600)
            raise OSError(28, "No space left on device")
        return real(*given)

    def send_and_fail() -> None:
        send()
        signalled.set()

    monkeypatch.setattr(stored, "write", failing)
    at_step(monkeypatch, 3, send_and_fail)
    with pytest.raises(Stopped, match="saved after step 3 of 6"):
        trainer.run(run_)
    assert tries == [".staging-step-00000003"] * 2
    assert state()["step"] == 3


def test_signal_on_a_full_disk_exits_with_6_and_keeps_the_earlier_checkpoint(run_, cwd, monkeypatch, said):
    run_.checkpoint.every, run_.run.dir = 2, str(cwd / "disk" / "run")
    folder = cwd / "disk" / "run" / "checkpoints"

    def fill_and_send() -> None:
        while not stored.paths(folder):
            time.sleep(0.01)
        disk = os.statvfs(folder)
        (cwd / "disk" / "ballast").write_bytes(bytes(disk.f_bavail * disk.f_frsize - 4096))
        send()

    with small_disk(cwd / "disk", "24m"):
        at_step(monkeypatch, 3, fill_and_send)
        with pytest.raises(
            StorageError, match=r"step 3 could not be written.*Earlier checkpoints are intact"
        ) as ended:
            trainer.run(run_)
        assert ended.value.exit_code == 6
        assert [path.name for path in stored.paths(folder)] == ["step-00000002"]
        assert not [note for note in said if "training goes on" in note]
        (cwd / "disk" / "ballast").unlink()
        assert trainer.run(run_)["train/step"] == 6


def test_signal_during_a_halving_is_handled_after_it_and_the_halving_is_kept(run_, monkeypatch, said):
    """The checkpoint is of the step that did not fit, with the smaller micro-batch."""
    run_.checkpoint.every = 2
    at_step(monkeypatch, 2, lambda: short_of_memory(monkeypatch, 2))
    made = RowsPerPass.free_memory
    monkeypatch.setattr(RowsPerPass, "free_memory", lambda self: (send(), made(self))[1])
    with pytest.raises(Stopped, match="saved after step 2 of 6"):
        trainer.run(run_)
    assert state()["rows"] == {"training": 2}
    said.clear()
    assert trainer.run(run_)["train/step"] == 6
    assert not [note for note in said if "ran out of memory" in note], (
        "the resumed run starts with the smaller micro-batch"
    )


@pytest.mark.slow
def test_out_of_memory_during_a_signal_is_not_a_halving(run_, monkeypatch):
    """A library may turn a signal into another error. The run still handles the signal."""
    at_step(monkeypatch, 2, lambda: short_of_memory(monkeypatch, 2, once=send))
    with pytest.raises(Stopped, match="saved after step 2 of 6"):
        trainer.run(run_)
    assert state()["rows"] == {}


@pytest.mark.slow
def test_halved_evaluation_stays_halved_after_resume(run_, monkeypatch, said):
    run_.data.eval_fraction, run_.data.general, run_.train.eval_every = 0.2, [], 2
    seen = short_of_memory(monkeypatch, 99)  # no halving yet
    real, rows = evaluation.evaluate, []

    def scarce(model, objective, loader, precision, world):
        rows.append(loader.plan.sizes.micro_batch_size)
        if rows[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(model, objective, loader, precision, world)

    monkeypatch.setattr(evaluation, "evaluate", scarce)
    at_step(monkeypatch, 3, send)
    with pytest.raises(Stopped, match="saved after step 3 of 6"):
        trainer.run(run_)
    assert rows == [4, 2, 1]
    assert state()["rows"] == {"evaluation": 1}
    trainer.run(run_)
    assert rows == [4, 2, 1, 1, 1], "the evaluations of steps 4 and 6, with one row from the start"
    assert seen[0] == 4, "training keeps its micro-batch"
    assert [line["train/step"] for line in history(Path("run")) if "eval/loss" in line] == [2, 4, 6]


@pytest.mark.slow
def test_failed_evaluation_is_saved_and_repeated_by_the_next_run(run_, monkeypatch):
    """A signal arrives while the state is saved. The run finishes the save first."""
    run_.data.eval_fraction, run_.data.general, run_.train.eval_every = 0.2, [], 2
    saved = Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", lambda *_: raises(torch.OutOfMemoryError("CUDA out of memory.")))
        patch.setattr(Checkpoints, "save", lambda *given: (send(), saved(*given))[1])
        with pytest.raises((HardwareError, Stopped)):
            trainer.run(run_)
    assert state()["step"] == 2
    assert state()["evaluation_due"]
    trainer.run(run_)
    assert [line["train/step"] for line in history(Path("run")) if "eval/loss" in line] == [2, 4, 6]


def test_out_of_memory_and_full_disk_are_both_reported(run_, monkeypatch):
    at_step(monkeypatch, 2, lambda: short_of_memory(monkeypatch, 0))
    monkeypatch.setattr(stored, "write", lambda *_: raises(OSError(28, "No space left on device")))
    with pytest.raises(
        HardwareError,
        match=r"(?s)Training ran out of memory with 1 row.*step 2 could not be written.*"
        r"What would help most",
    ):
        trainer.run(run_)


@pytest.mark.slow
def test_resumed_run_keeps_auto_decisions_and_the_halving(run_, monkeypatch, said):
    """checkpointing=auto was `none` for the recipe's rows at the start. A new decision would be different."""
    run_.techniques.checkpointing = Checkpointing(enabled=True, policy=Policy.auto)
    at_step(monkeypatch, 1, lambda: short_of_memory(monkeypatch, 2))
    at_step(monkeypatch, 3, send)
    with pytest.raises(Stopped):
        trainer.run(run_)
    file = Path("run/setting.json")
    setting = json.loads(file.read_text())
    was = setting["techniques"]["checkpointing"]
    assert was["policy"] != "auto"
    was["policy"] = "none" if was["policy"] != "none" else "full"
    file.write_text(json.dumps(setting))
    assert trainer.run(run_)["train/step"] == 6
    assert [note for note in said if f"as when the run was started, policy={was['policy']}" in note]
    assert state()["rows"] == {"training": 2}
    assert sum("ran out of memory" in note for note in said) == 1


@pytest.mark.slow
def test_saved_bad_batches_of_a_resumed_run_use_its_micro_batches(run_, monkeypatch):
    """With the micro-batches after the halving, not with those of the recipe."""
    at_step(monkeypatch, 1, lambda: short_of_memory(monkeypatch, 2))
    at_step(monkeypatch, 3, send)
    with pytest.raises(Stopped):
        trainer.run(run_)
    real = LanguageModel.summed_loss
    at_step(
        monkeypatch,
        4,
        lambda: monkeypatch.setattr(LanguageModel, "summed_loss", lambda *given: real(*given) * math.nan),
    )
    at_step(monkeypatch, 5, lambda: monkeypatch.setattr(LanguageModel, "summed_loss", real))
    trainer.run(run_)
    place = Path("run/skipped/step-00000005")
    assert len(load_file(place / "batch-0.safetensors")["input_ids"]) == 2
    assert len(list(place.glob("batch-*"))) == 4


@pytest.mark.slow
def test_loss_window_without_finite_losses_skips_no_finite_step(run_, monkeypatch):
    """The same holds for a window from a checkpoint."""
    monkeypatch.setattr("fxtune.training.step.WINDOW", 4)
    run_.train.spikes, run_.train.max_skipped_steps = Spikes.skip, 5
    real, index = LanguageModel.summed_loss, [0]
    monkeypatch.setattr(
        LanguageModel, "summed_loss", lambda *given: real(*given) * (math.nan if index[0] < 2 else 1.0)
    )
    taken = trainer.Steps.take
    monkeypatch.setattr(
        trainer.Steps, "take", lambda self, step, lr: taken(self, step, index.__setitem__(0, step.index) or lr)
    )
    moved: list[bool] = []
    update = Optimizer.step
    monkeypatch.setattr(
        Optimizer, "step", lambda self, lr, sound, seed: (moved.append(bool(sound)), update(self, lr, sound, seed))[1]
    )
    at_step(monkeypatch, 2, send)
    with pytest.raises(Stopped, match="after step 2"):
        trainer.run(run_)
    assert trainer.run(run_)["train/skipped_steps"] == 2
    assert moved == [False, False, True, True, True, True]


@pytest.mark.slow
def test_kill_during_replacement_keeps_the_only_checkpoint(tmp_path):
    """The kill comes between the removal of the old checkpoint and the move of the new one, before each file
    operation.
    """
    program = """
import os, sys
from pathlib import Path
import torch
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState
def save(tokens):
    made = Checkpoints(Path("checkpoints"), CheckpointConfig(keep=1), note=print)
    made.save(TrainState(step=4, tokens=tokens), {"w": torch.zeros(4)}, {})
    made.wait()
save(1)
count = 0
def hook(event, given):
    global count
    if event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
        count += 1
        if count == last:
            os.kill(os.getpid(), 9)
for last in range(1, 99):
    count = 0
    child = os.fork()
    if child == 0:
        sys.addaudithook(hook)
        save(last + 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = Checkpoints(Path("checkpoints"), CheckpointConfig(), note=print).load_newest()
    print(last, found.state.tokens, flush=True)
    if status == 0:
        break
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(trainer.__file__).parents[2])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(lines) > 3
    assert lines[-1][1] == lines[-1][0] + 1
    there = 1
    for last, found in lines:
        assert found in (there, last + 1), lines
        there = found


def test_failing_background_writer_does_not_end_the_run(tmp_path, monkeypatch):
    notes: list[str] = []
    made = Checkpoints(tmp_path, CheckpointConfig(), note=notes.append)
    weights = {"w": torch.zeros(4)}
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: raises(RuntimeError("can't start new thread")))
        made.save(TrainState(step=1), weights, {})
        made.wait()
    assert made.load_newest().state.step == 1
    with monkeypatch.context() as patch:
        patch.setattr(stored, "write", lambda *_: raises(MemoryError()))
        made.save(TrainState(step=2), weights, {})
        assert made.settle()
    assert "training goes on" in notes[0]
    made.save(TrainState(step=3), weights, {})
    made.wait()
    assert made.load_newest().state.step == 3


def test_killed_export_is_repeated(run_, monkeypatch):
    """The folder holds a partial export and an older export."""
    with monkeypatch.context() as patch:
        patch.setattr("fxtune.export.save.write_card", lambda *_: send())
        with pytest.raises(
            Stopped, match=r"all 6 steps are done and saved in run\. The same command finishes the run"
        ):
            trainer.run(run_)
    assert not Path("run/adapter").exists()
    Path("run/.adapter.partial").mkdir(exist_ok=True)
    Path("run/.adapter.old").mkdir()
    Path("run/.adapter.partial/junk").write_text("half")
    trainer.run(run_)
    assert load_file(f"run/{ADAPTER}")
    assert not list(Path("run").glob(".adapter*"))
    assert not Path("run/adapter/junk").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_wrote_its_page_gets_the_page(run_, said):
    run_.run.report = True
    result = trainer.run(run_)
    Path("run/report.html").rename("run/.report.html")
    assert trainer.run(run_) == result
    assert Path("run/report.html").read_text().startswith("<!")
    assert not Path("run/.report.html").exists()


def test_finished_run_stays_unchanged(run_, monkeypatch, said):
    result = trainer.run(run_)
    before = {
        path: path.stat().st_mtime_ns for path in Path("run").rglob("*") if path.is_file() and path.name != ".lock"
    }
    monkeypatch.setattr(trainer, "Trainer", pytest.fail)
    for resume in (Resume.auto, Resume.must):
        run_.run.resume = resume
        assert trainer.run(run_) == result
        assert "run holds this run, finished: nothing to do" in said[-2]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    run_.run.resume = Resume.never
    with pytest.raises(ConfigError, match=r"run already holds a run.*Set run\.dir to a new folder"):
        trainer.run(run_)


def test_finished_run_with_a_damaged_export_says_so_and_exports_again(run_, said):
    trainer.run(run_)
    weights = Path(f"run/{ADAPTER}")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(StorageError, match=r"100 bytes.*result\.json"):
        trainer.run(run_)
    Path("run/result.json").unlink()
    trainer.run(run_)
    assert weights.read_bytes() == whole


@pytest.mark.slow
def test_signal_while_trackers_close_does_not_undo_the_end(run_, monkeypatch, said):
    """The last action is an upload of up to half a minute. The run has already finished."""
    waited: list[float | None] = []

    class Slow:
        title = "W&B"

        def end(self, exit_code: int, summary: dict) -> None:
            pass

        def wait(self, patience: float | None = None) -> bool:
            waited.append(patience)
            if patience is None:
                send()
                time.sleep(600)  # the signal ends it
            return False

    made = Tracker.__init__
    monkeypatch.setattr(
        Tracker,
        "__init__",
        lambda self, *given, **named: (made(self, *given, **named), setattr(self, "_clients", [Slow()]))[0],
    )
    assert trainer.run(run_)["train/step"] == 6
    assert Path("run/result.json").exists()
    assert waited == [None, 3.0]
    assert said[-1] == "W&B was left behind. To send the missing steps: fxtune sync run"


@pytest.mark.vital
@pytest.mark.parametrize("resume", list(Resume))
def test_stopped_run_prints_a_command_that_resumes_it(narrow, cwd, monkeypatch, said, resume):
    """In a numbered run folder each of three commands starts a new run, and resume=must continues one."""
    at_step(monkeypatch, 2, send)
    narrow.run.resume = Resume.auto if resume is Resume.must else resume
    with pytest.raises(Stopped):
        trainer.run(narrow)
    narrow.run.resume = Resume.auto if resume is Resume.never else resume
    at_step(monkeypatch, 4, send)
    with pytest.raises(Stopped) as stop:
        trainer.run(narrow)
    assert str(stop.value) == "SIGTERM: saved after step 4 of 6 in runs/run. The same command goes on from there."
    assert [
        note
        for note in said
        if note.endswith("after step 2 (run.resume=never, or another run.dir where that is set, starts anew).")
    ]
    narrow.run.resume = Resume.never
    at_step(monkeypatch, 1, send)
    with pytest.raises(Stopped) as stop:
        trainer.run(narrow)
    assert str(stop.value).endswith("in runs/run-2. The same command with run.resume=auto goes on from there.")
    narrow.run.dir = "runs/run"
    with pytest.raises(ConfigError, match=r"Set run\.dir to a new folder, or use run\.resume=auto"):
        trainer.run(narrow)


def test_refused_start_leaves_no_folder(small, cwd, monkeypatch):
    monkeypatch.setattr(builder, "Optimizer", lambda *_: raises(HardwareError("no room")))
    with pytest.raises(HardwareError):
        trainer.run(small)
    assert not Path("runs").exists()


def test_failed_verify_exits_with_1(cwd, capsys):
    """A learning rate of zero leaves the adapters at zero."""
    assert main(["verify", *command(cwd, "optimizer.lr=1e-45")]) == 1
    message = capsys.readouterr()
    assert "are not as asked for" in message.out + message.err
    assert "Traceback" not in message.out + message.err
