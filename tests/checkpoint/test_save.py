import threading

import pytest
import torch

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_changes_after_a_save_are_not_in_it(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=pytest.fail)
    state, weight, moment = TrainState(step=1, figures={"a": 1}), torch.zeros(10**6), torch.zeros(10**6)
    checkpoints.save(state, {"w": weight}, {"w/exp_avg": moment})
    state.step, state.figures["a"] = 2, 2
    weight += 1
    moment += 1
    saved = checkpoints.load_newest()
    assert (saved.state.step, saved.state.figures) == (1, {"a": 1})
    assert not saved.weights["w"].any()
    assert not saved.moments["w/exp_avg"].any()


@pytest.fixture
def slow(monkeypatch):
    """A disk that writes a checkpoint for each release()."""
    go, real = threading.Semaphore(0), stored.write
    monkeypatch.setattr(stored, "write", lambda *given: go.acquire(timeout=600) and real(*given))
    yield go
    go.release(2)


def test_loop_continues_during_a_save_and_at_most_one_is_in_flight(tmp_path, slow):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(TrainState(step=1), {"w": torch.zeros(4)}, {})
    assert checkpoints.save_timings() == {}  # it has not ended
    assert not stored.paths(tmp_path)
    threading.Timer(0.1, slow.release).start()
    checkpoints.save(TrainState(step=2), {"w": torch.zeros(4)}, {})  # waits for the first
    assert [path.name for path in stored.paths(tmp_path)] == ["step-00000001"]
    assert checkpoints.save_timings().keys() == {"checkpoint/stall_seconds", "checkpoint/seconds"}
    slow.release()
    with checkpoints:
        pass  # waits, too
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    timings = checkpoints.save_timings()
    assert 0 < timings["checkpoint/stall_seconds"] < 600
    assert 0 < timings["checkpoint/seconds"] < 600
    assert checkpoints.save_timings() == {}  # reported once


def test_all_stalls_since_the_last_log_line_are_counted(tmp_path):
    checkpoints, stalls = Checkpoints(tmp_path, CheckpointConfig()), []
    for step in (1, 2, 3):
        checkpoints.save(TrainState(step=step), {"w": torch.zeros(4)}, {})
        stalls.append(checkpoints._save)
    checkpoints.wait()
    assert checkpoints.save_timings()["checkpoint/stall_seconds"] == sum(save.stall for save in stalls)


def test_unexpected_error_in_the_save_thread_is_raised_in_the_loop(tmp_path, monkeypatch):
    def broken(*_):
        raise AssertionError("ours")

    monkeypatch.setattr(stored, "write", broken)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(TrainState(step=1), {}, {})
    with pytest.raises(AssertionError, match="ours"):
        checkpoints.wait()


def test_without_memory_for_a_copy_the_save_is_synchronous_with_one_note(tmp_path, monkeypatch):
    monkeypatch.setattr("fxtune.checkpoint.host_copy.memory", lambda: (0, 0))
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=notes.append)
    for step in (1, 2):
        checkpoints.save(TrainState(step=step), {"w": torch.full((4,), float(step))}, {})
        assert names(tmp_path)[-1] == f"step-{step:08d}"  # by now
    assert len(notes) == 1
    assert "stands still while one is written" in notes[0]
    assert checkpoints.load_newest().weights["w"].tolist() == [2.0] * 4
