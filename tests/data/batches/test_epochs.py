"""The endless sequence of rows: epoch after epoch, each shuffled in its own order."""

from __future__ import annotations

from collections import Counter

import pytest
from support.tables import natural, table, training


def test_epochs_are_shuffled_differently_without_partial_steps_between():
    data = [natural(21, 20, 0)]
    plan = training(data, packing=False, sequence_length=512, epochs=3, step=4)
    order = [d for step in range(plan.steps) for m in range(plan.micro_batches(step)) for d in plan.documents(step, m)]
    assert plan.steps == 16
    assert [sum(len(plan.documents(s, m)) for m in range(plan.micro_batches(s))) for s in range(16)] == [4] * 15 + [3]
    stream = [plan.stream.epoch(e).segments.tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(21)) for epoch in stream)
    assert stream[0] != stream[1] != stream[2]
    assert Counter(order) == Counter({(0, d): 3 for d in range(21)})


@pytest.mark.parametrize(
    ("max_steps", "epochs", "steps"),
    [
        (None, None, 10),
        (3, None, 3),
        (100, None, 100),
        (100, 2, 20),
        (5, 2, 5),
        (None, 0.5, 5),
        (None, 2.25, 23),
        (None, 0.001, 1),
    ],
)
def test_run_ends_at_max_steps_or_epochs_whichever_is_first(max_steps, epochs, steps):
    data = [table([([1, 2, 3], [True] * 3)] * 40)]
    plan = training(data, packing=False, max_steps=max_steps, epochs=epochs)
    assert plan.steps == steps
    with pytest.raises(IndexError):
        plan.batch(steps, 0)
    with pytest.raises(IndexError):
        plan.batch(0, 2)


@pytest.mark.parametrize("packing", [True, False])
def test_weighted_sources_get_their_share_of_supervised_tokens(packing):
    data = [natural(1500, 30, 0, "big"), natural(120, 60, 1, "small"), natural(400, 10, 2, "short", share=0.9)]
    weights = [0.2, 0.5, 0.3]
    plan = training(data, weights=weights, sequence_length=256, packing=packing, step=8, epochs=3)
    summary = plan.summary()
    for at, source in enumerate(summary["sources"]):
        assert source["share"] == pytest.approx(weights[at], rel=0.01)
        supply = int(sum(t.supervised.sum() for t in data[at : at + 1]))
        assert source["repeats"] == pytest.approx(source["supervised_tokens"] / supply, rel=0.02)
    everything = sum(int(t.supervised.sum()) for t in data)
    assert summary["supervised_tokens"] == pytest.approx(everything, rel=0.01)
    assert summary["sources"][1]["repeats"] > 3
    assert summary["sources"][0]["repeats"] < 0.6
