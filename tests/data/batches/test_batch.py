"""A batch whose number of targets is rounded up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxtune.data.batches.batch import MIN_TARGETS, TARGET_COUNTS, BatchSpec, build_batch


@settings(max_examples=60)
@given(rows=st.integers(1, 4), length=st.integers(2, 700), share=st.floats(0, 1))
def test_rounded_targets_have_few_sizes_and_keep_the_targets(rows, length, share):
    draw = np.random.default_rng(rows * 1000 + length)
    table = SimpleNamespace(ids=draw.integers(1, 99, rows * length), supervised=draw.random(rows * length) < share)
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
