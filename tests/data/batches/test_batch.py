"""A batch whose number of targets is rounded up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import natural, training

from fxtune.data.batches.batch import IGNORE_INDEX, MIN_TARGETS, TARGET_COUNTS, Batch, BatchSpec, build_batch


@settings(max_examples=25)
@given(rows=st.integers(1, 4), length=st.integers(2, 700), share=st.floats(0, 1))
def test_rounded_targets_have_few_sizes_and_keep_the_targets(rows, length, share):
    draw = np.random.default_rng(rows * 1000 + length)
    table = SimpleNamespace(
        ids=draw.integers(1, 99, rows * length),
        supervised=draw.random(rows * length) < share,
        stored=None,
        images=None,
    )
    pieces = BatchSpec(
        np.zeros(rows, np.int64),
        np.arange(rows) * length,
        np.full(rows, length),
        np.arange(rows + 1),
        length,
        False,
        0,
        rows,
    )
    batch = build_batch([table], pieces)
    filled = batch.with_rounded_targets()
    count, positions = batch.supervised, rows * length
    step = max(-(-positions // TARGET_COUNTS), MIN_TARGETS)
    assert len(filled.labels) in {min(step * times, positions) for times in range(1, TARGET_COUNTS + 1)}
    assert count <= len(filled.labels) < max(count, 1) + step
    assert torch.equal(filled.supervised_at[:count], batch.supervised_at)
    assert torch.equal(filled.labels[:count], batch.labels)
    assert len(filled.supervised_at.unique()) == len(filled.supervised_at) == len(filled.labels)
    assert torch.equal(filled.targets.flatten()[filled.supervised_at], filled.labels), "what was added has no target"


@settings(max_examples=15, deadline=None)
@given(
    pieces=st.integers(1, 5),
    length=st.integers(5, 90),
    rows=st.integers(1, 3),
    packing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pieces_together_are_the_rows(pieces, length, rows, packing, seed):
    plan = training([natural(12, 20, seed)], micro=rows, step=rows, sequence_length=length, packing=packing)
    for step in range(plan.steps):
        whole, parts = (
            plan.batch(step, 0),
            [plan.with_row_piece(piece, pieces).batch(step, 0) for piece in range(pieces)],
        )
        ids, targets, positions = (
            torch.cat([getattr(part, name) for part in parts], 1) for name in ("input_ids", "targets", "position_ids")
        )
        width = whole.input_ids.shape[1]
        assert ids.shape[1] == -(-width // pieces) * pieces
        assert torch.equal(ids[:, :width], whole.input_ids)
        assert torch.equal(targets[:, :width], whole.targets)
        assert (targets[:, width:] == IGNORE_INDEX).all()
        # Every rank has the bounds of all documents, and positions restart there and nowhere else.
        starts = parts[0].cu_seqlens
        assert all(torch.equal(part.cu_seqlens, starts) for part in parts)
        begins = starts[starts < ids.numel()].long()
        assert torch.equal((positions.flatten() == 0).nonzero().flatten(), begins)
        assert (positions.diff(dim=1)[positions[:, 1:] != 0] == 1).all()
        for part in parts:
            assert torch.equal(part.targets.flatten()[part.supervised_at], part.labels)
        assert sum(part.supervised for part in parts) == whole.supervised == plan.supervised(step)
        assert sum(part.tokens for part in parts) == whole.tokens


def test_images_and_their_positions_move_with_the_batch(monkeypatch):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    batch = Batch(ids, ids, ids, torch.tensor([0, 4]), ids[0], ids[0], 4)
    assert batch.to(torch.device("meta")).images is None
    batch = replace(batch, images={"pixel_values": torch.zeros(2, 3)}, rope_positions=torch.zeros(3, 1, 4))
    moved = batch.to(torch.device("meta"))
    assert moved.images["pixel_values"].is_meta
    assert moved.rope_positions.is_meta
    assert moved.input_ids.is_meta
    assert not batch.images["pixel_values"].is_meta
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    batch.record_stream("stream")
    assert any(tensor is batch.images["pixel_values"] and stream == "stream" for tensor, stream in recorded)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    assert batch.pin_memory().images["pixel_values"].unique().tolist() == [1]
