"""The samples and batches of bad steps, written to the run folder."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from support.bad_steps import disturb


def test_samples_and_batches_of_a_non_finite_step_are_written(narrow, build, monkeypatch):
    disturb(monkeypatch, {2: math.nan})
    notes = []
    trainer = build(narrow, notes.append)
    trainer.run()
    folder = trainer.folder.path / "skipped"
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    samples = json.loads((folder / "step-00000003" / "samples.json").read_text())
    assert [samples["step"], samples["loss"]] == [3, None]
    for micro in range(2):
        batch, kept = trainer.plan.batch(2, micro), load_file(folder / "step-00000003" / f"batch-{micro}.safetensors")
        assert all(torch.equal(tensor, getattr(batch, name)) for name, tensor in kept.items())
        assert {"input_ids", "targets", "position_ids"} <= kept.keys()
        rows = samples["micro_batches"][micro]
        assert [(0, piece["document"] - 1) for row in rows for piece in row] == trainer.plan.documents(2, micro)
        assert "assistant" in rows[0][0]["text"]
    message = next(note for note in notes if note.startswith("step 3: its loss or gradient was not finite"))
    assert f"documents {rows_of(trainer, 2)[0] + 1}, " in message
    assert str(folder / "step-00000003") in message


def rows_of(trainer, step) -> list[int]:
    return [
        document
        for micro in range(trainer.plan.micro_batches(step))
        for _, document in trainer.plan.documents(step, micro)
    ]


@pytest.mark.slow
def test_number_of_kept_bad_batches_is_limited(narrow, build, monkeypatch):
    disturb(monkeypatch, dict.fromkeys(range(1, 40, 3), math.nan))
    narrow.train.max_steps = 40
    trainer = build(narrow)
    assert trainer.run()["train/skipped_steps"] == 13
    assert len(list((trainer.folder.path / "skipped").glob("step-*"))) == 8
