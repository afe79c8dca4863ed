import shutil

import pytest
import torch

from fxtune.checkpoint import CheckpointConfig, Checkpoints, TrainState, damaged
from fxtune.errors import StorageError


def save(checkpoints, step, **state):
    return checkpoints.save(TrainState(step=step, **state), {"w": torch.full((4,), float(step))}, {"w/exp_avg": torch.ones(4)})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 3, tokens=7, best_loss=1.5, best_step=3, wandb_id="abc", optimizer={"w/step": 3})
    got = checkpoints.newest()
    assert got.state == TrainState(step=3, tokens=7, best_loss=1.5, best_step=3, wandb_id="abc", optimizer={"w/step": 3})
    assert torch.equal(got.weights["w"], torch.full((4,), 3.0))
    assert torch.equal(got.moments["w/exp_avg"], torch.ones(4))


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2, keep_best=True))
    for step in (10, 20, 30, 40):
        save(checkpoints, step, best_step=10 if step < 40 else 20)
    assert names(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]  # 10 went when 20 became the best
    for step in (50, 60, 70):
        save(checkpoints, step, best_step=50)
    assert names(tmp_path) == ["step-00000050", "step-00000060", "step-00000070"]


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    path = save(checkpoints, 2)
    victim = path / ("manifest.json" if harm == "no manifest" else "weights.safetensors")
    if harm == "truncate":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif harm == "flip":
        data = bytearray(victim.read_bytes())
        data[-1] ^= 1
        victim.write_bytes(data)
    else:
        victim.unlink()
    assert damaged(path)
    assert checkpoints.newest().state.step == 1


def test_a_damaged_checkpoint_never_outlives_a_whole_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    save(checkpoints, 8)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "step-00000008", kept)
    (save(checkpoints, 10) / "weights.safetensors").unlink()
    kept.rename(tmp_path / "step-00000008")
    assert checkpoints.newest().state.step == 8
    save(checkpoints, 9)
    assert checkpoints.newest().state.step == 9
    assert names(tmp_path) == ["step-00000009"]


def test_nothing_whole_is_an_error_that_says_so_and_nothing_at_all_is_not(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    assert checkpoints.newest() is None
    (save(checkpoints, 1) / "state.json").unlink()
    with pytest.raises(StorageError, match=r"step-00000001.*state\.json"):
        checkpoints.newest()


def test_a_leftover_of_a_killed_save_is_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    leftover = tmp_path / ".staging-step-00000002"
    leftover.mkdir()
    (leftover / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.newest().state.step == 1
    save(checkpoints, 2)
    assert checkpoints.newest().state.step == 2
    assert not leftover.exists()


def test_a_disk_that_refuses_leaves_the_earlier_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "runs", CheckpointConfig())
    save(checkpoints, 1)
    (tmp_path / "runs" / ".staging-step-00000002").write_text("a file where the folder must go")
    with pytest.raises(StorageError, match="step 2 could not be written"):
        save(checkpoints, 2)
    assert checkpoints.newest().state.step == 1
