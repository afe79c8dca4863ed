import errno
import shutil

import pytest
from support.checkpoints import save

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.errors import StorageError


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_best=True))
    for step in (10, 20, 30, 40):
        save(checkpoints, step, best_step=10 if step < 40 else 20)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]  # 10 went when 20 became the best
    for step in (50, 60, 70):
        save(checkpoints, step, best_step=50)
    assert names(tmp_path) == ["step-00000050", "step-00000060", "step-00000070"]


def test_best_checkpoint_is_kept_until_a_better_one_is_saved_also_after_resume(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2), note=lambda text: None)
    for step in (100, 200, 300):
        save(checkpoints, step, best_step=100)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stored, "write", full)
        with pytest.raises(StorageError, match="No space left"):
            save(checkpoints, 400, best_step=400)
    save(checkpoints, 500, best_step=400)
    assert names(tmp_path) == ["step-00000100", "step-00000300", "step-00000500"]
    again = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    assert again.load_newest().state.best_step == 400  # the state names it; its save failed
    save(again, 600, best_step=400)
    assert names(tmp_path) == ["step-00000100", "step-00000500", "step-00000600"]
    save(again, 700, best_step=700)
    assert names(tmp_path) == ["step-00000600", "step-00000700"]


def test_foreign_folders_are_never_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1, keep_best=False))
    for name in ("step-00000001-copy", "step-best", "notes"):
        (tmp_path / name).mkdir()
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert names(tmp_path) == ["notes", "step-00000001-copy", "step-00000003", "step-best"]


def test_disk_space_is_checked_before_a_run_begins(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)  # other processes change it meanwhile
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    free, notes = usage.free, []
    checkpoints = Checkpoints(tmp_path / "not" / "there", CheckpointConfig(keep=2), note=notes.append)
    for size, saves, evaluates in ((free // 10, 9, True), (free // 4, 9, False), (free // 3, 2, False)):
        checkpoints.check_room(size, free // 10, saves, evaluates)
        assert not notes, (size, saves, evaluates)
    for size, evaluates, fit, wanted, fails in (
        (free // 3, False, 2, 3, False),
        (free // 4, True, 3, 4, False),
        (free // 3, True, 2, 4, True),
    ):
        checkpoints.check_room(size, free // 10, 9, evaluates)
        (note,) = notes
        notes.clear()
        assert f"has room for {fit} checkpoints" in note
        assert f"and the one being written would be {wanted}," in note
        assert ("Saves fail" in note) is fails
        assert ("the best" in note) is evaluates
    checkpoints.check_room(free // 2, free // 10, 1, False)
    for saves, evaluates, change in ((2, False, "every=0."), (1, True, "every=0 checkpoint.keep_best=false.")):
        with pytest.raises(StorageError, match=f"has room for one checkpoint, .* at the end: checkpoint.{change}$"):
            checkpoints.check_room(free // 2, free // 10, saves, evaluates)
    with pytest.raises(
        StorageError, match=r"has no room for this run: a checkpoint takes [\d.,]+ [GM]iB and the export"
    ):
        checkpoints.check_room(free // 2, int(free * 0.6), 1, False)
