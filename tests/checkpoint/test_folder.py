"""A checkpoint is a folder that is complete or not there."""

import pytest
from support.checkpoints import save

from fxtune.checkpoint.folder import damage_of
from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "no manifest"])
def test_damaged_checkpoint_is_skipped_for_the_newest_complete_one(tmp_path, harm):
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
    assert damage_of(path)
    assert checkpoints.load_newest().state.step == 1


def test_leftovers_of_killed_saves_are_ignored_and_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    for name in (".staging-step-00000002", ".removed-step-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.load_newest().state.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"], "nobody else would clear it away"
