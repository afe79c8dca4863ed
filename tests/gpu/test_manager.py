"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints
from fxtune.checkpoint.train_state import TrainState


@pytest.mark.parametrize("background", [True, False])
def test_checkpoint_of_gpu_tensors_round_trips(tmp_path: Path, monkeypatch, background):
    if not background:
        monkeypatch.setattr("fxtune.checkpoint.host_copy.memory", lambda: (0, 0))
    notes: list[str] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), note=notes.append)
    weight = torch.randn(1000, 100, device="cuda", dtype=torch.bfloat16)
    moments = {"w/exp_avg": torch.randn(1000, 100, device="cuda"), "w/step": torch.tensor(3.0, device="cuda")}
    before = weight.cpu()
    checkpoints.save(TrainState(step=1), {"w": weight}, moments)
    checkpoints.wait_for_copy()
    weight.zero_()
    checkpoints.wait()
    saved = checkpoints.load_newest({"w": weight})
    assert torch.equal(saved.weights["w"], before)
    assert all(torch.equal(saved.moments[name], moment.cpu()) for name, moment in moments.items())
    assert len(notes) == (not background)
