"""Checkpoints of a model that several processes hold in parts."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import sharded
from support.sharded import run_ranks

from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints

pytestmark = pytest.mark.slow
FILES = [
    *("manifest.json", "optimizer-1-of-2.safetensors", "optimizer-2-of-2.safetensors", "state.json"),
    *("weights-1-of-2.safetensors", "weights-2-of-2.safetensors"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Checkpoint 2 of two ranks, and the whole tensors beside it."""
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(2, sharded.save, folder, 1) == [FILES, FILES]
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_loads_what_two_have_saved(saved, ranks):
    assert run_ranks(ranks, sharded.load, saved) == [2] * ranks


def test_one_process_without_ranks_loads_whole_tensors(saved):
    whole, found = load_file(saved / "whole.safetensors"), Checkpoints(saved / "checkpoints", CheckpointConfig())
    checkpoint = found.load_newest()
    tensors = {**checkpoint.weights, **checkpoint.moments}
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())


def test_torch_reads_the_weights_with_its_own_reader(saved):
    from torch.distributed import checkpoint

    whole, path = load_file(saved / "whole.safetensors"), saved / "checkpoints" / "step-00000002"
    read = {name: torch.zeros_like(tensor) for name, tensor in whole.items() if "/" not in name}
    checkpoint.load(read, storage_reader=checkpoint.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in read.items())


def test_replicas_write_each_part_once(tmp_path):
    """Four ranks in two replicas of two shards; two ranks load it."""
    assert run_ranks(4, sharded.save, tmp_path, 2) == [FILES] * 4
    assert run_ranks(2, sharded.load, tmp_path) == [2, 2]


@pytest.mark.parametrize("dying", [0, 1])
def test_killed_rank_between_its_part_and_the_manifest_leaves_the_older_checkpoint(tmp_path, dying):
    results = run_ranks(2, sharded.save_and_die, tmp_path, dying)
    assert results[dying] == -signal.SIGKILL
    words, names = results[1 - dying]
    assert "lost another rank while" in words
    assert "step-00000003" not in names
    assert {name for name in names if not name.startswith(".")} == {"step-00000002"}
    found = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    assert found.load_newest().state.step == 2
    assert sharded.names(tmp_path) == ["step-00000002"], "nothing half is left"


@pytest.mark.parametrize("failing", [0, 1])
def test_fault_of_one_rank_has_the_same_outcome_on_all(tmp_path, failing):
    one, other = run_ranks(2, sharded.meet_faults, tmp_path, failing)
    assert one["first"] == other["first"] == (None, ["step-00000001"])
    assert one["full"] == other["full"]
    words, names = one["full"]
    assert f"step 2 could not be written to {tmp_path}" in words
    assert f": rank {failing} (" in words
    assert "No space left on device" in words
    assert names == ["step-00000001"], "and no half one"
    for seen in (one, other):
        assert seen["short"] == (None, ["step-00000001", "step-00000002"])
        assert seen["again"] == (None, True), "an unchanged state is not written twice"
    assert any("memory has no room for a copy" in note for note in one["notes"]), "rank 0 says it, whose ever it is"


def test_damaged_part_is_passed_over_by_all_ranks(saved, tmp_path):
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    newer = tmp_path / "checkpoints" / "step-00000003"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000002", newer)
    part = newer / "weights-2-of-2.safetensors"
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    results = run_ranks(2, sharded.pass_over_damage, tmp_path)
    for step, notes, again in results:
        assert (step, again) == (2, 3)
        assert len(notes) == 1
        assert "weights-2-of-2.safetensors is not the file that was saved" in notes[0]
    assert sharded.names(tmp_path) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda entry: entry["tensors"]["first.weight"].update(offset=[4, 0]), "do not make a whole"),
        (lambda entry: entry["tensors"]["first.weight"].update(offset=[-1, 0]), "do not make a whole"),
        (lambda entry: entry["tensors"]["first.weight"].update(shape=[9, 6]), "do not make a whole"),
        (lambda entry: entry["tensors"]["first.weight"].update(offset=["a", "b"]), "does not describe a checkpoint"),
        (lambda entry: entry["tensors"].pop("first.weight"), "does not hold the tensors of the manifest"),
        (lambda entry: entry.pop("tensors"), "does not describe a checkpoint"),
    ],
)
def test_manifest_that_does_not_fit_its_parts_is_refused(saved, tmp_path, change, why):
    shutil.copytree(saved / "checkpoints", tmp_path / "checkpoints")
    file = tmp_path / "checkpoints" / "step-00000002" / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest["files"]["weights-2-of-2.safetensors"])
    file.write_text(json.dumps(manifest))
    with pytest.raises(sharded.StorageError, match=why):
        Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).load_newest()


def test_rank_that_does_not_see_the_folder_is_one_error(tmp_path):
    one, other = run_ranks(2, sharded.look_for_folder, tmp_path)
    for words in (one, other):
        assert words.startswith("rank 1 (")
        assert "Put run.dir on a disk that all hosts share" in words
