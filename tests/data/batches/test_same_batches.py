"""Batches of supervised text stay the same, bit for bit: a run that began with an earlier version resumes.

The hashes were recorded at commit fb5330e, before tables had groups of documents.
"""

from __future__ import annotations

import hashlib
import json

import pytest

from fxtune.data.batches.build import plan_evaluation
from fxtune.data.config import DataConfig, Dedup, MixConfig, SourceConfig
from tests.support.tables import natural, table, training

TENSORS = ("input_ids", "targets", "position_ids", "cu_seqlens", "supervised_at", "labels", "filled")


def hashed(plan) -> str:
    found = hashlib.sha256(plan.fingerprint.encode())
    for step in range(min(plan.steps, 12)):
        found.update(f"{plan.supervised(step)} {plan.tokens(step)} {plan.lengths(step).tolist()}".encode())
        for micro in range(plan.micro_batches(step)):
            batch = plan.batch(step, micro)
            found.update(f"{plan.documents(step, micro)} {batch.tokens} {batch.pieces}".encode())
            for name in TENSORS:
                found.update(getattr(batch, name).numpy().tobytes())
    summary = plan.summary()
    assert summary.pop("computed_tokens") == summary["tokens"], "rows have whole documents"
    found.update(json.dumps([summary, plan.notes()]).encode())
    return found.hexdigest()[:16]


def evaluation(tables, micro=2, shares=None, **data):
    sources = [SourceConfig(path=table.name) for table in tables]
    return plan_evaluation(tables, DataConfig(sources=sources, **data), micro_batch_size=micro, shares=shares)


def tables(*sizes):
    return [natural(count, mean, seed, f"table {seed}") for seed, (count, mean) in enumerate(sizes)]


def repeated():
    return table(
        [([number % 40 + 1, *range(2, number % 23 + 4)], [True] * (number % 23 + 3)) for number in range(2000)]
    )


PLANS = {
    "packed": lambda: training(tables((300, 60)), sequence_length=256, epochs=2),
    "two ranks": lambda: training(tables((300, 60)), sequence_length=256, epochs=1).for_rank(1, 2),
    "pieces": lambda: training(tables((300, 60)), sequence_length=256, epochs=1).with_row_piece(1, 2),
    "unpacked": lambda: training(tables((120, 60)), sequence_length=128, packing=False, epochs=1.5),
    "buckets": lambda: training(
        tables((120, 60)), sequence_length=128, packing=False, buckets=[32, 64], on_long="truncate"
    ),
    "weights": lambda: training(
        tables((200, 40), (90, 70)), weights=[3, 1], sequence_length=200, max_steps=20, on_long="drop"
    ),
    "mix": lambda: training(tables((300, 60)), sequence_length=256, epochs=1, mix=MixConfig(0.5, 80)),
    "length schedule": lambda: training(
        tables((300, 60)), sequence_length=256, max_steps=12, length_schedule=[[0.0, 64], [0.5, 256]]
    ),
    "unpacked schedule": lambda: training(
        tables((300, 60)), sequence_length=256, packing=False, max_steps=12, length_schedule=[[0.0, 64], [0.5, 256]]
    ),
    "ramp": lambda: training(tables((300, 60)), sequence_length=256, max_steps=12, ramp=[[0.5, 8]]),
    "held out": lambda: evaluation(tables((300, 60), (80, 50)), shares=[0.2, 0.1], sequence_length=256, eval_limit=20),
    "distinct": lambda: training([repeated()], sequence_length=256, dedup=Dedup.exact),
}
RECORDED = {
    "packed": "0b85057b1640572e",
    "two ranks": "12625d7c255b3879",
    "pieces": "02d764910baee84d",
    "unpacked": "b08d62cdf5e9776e",
    "buckets": "58d4f6d725476ad1",
    "weights": "ca729bf5529a5e79",
    "mix": "2e7dd3309f8f1fef",
    "length schedule": "cc9101ef0660f824",
    "unpacked schedule": "addf11671e6f5f37",
    "ramp": "03944dbbb9f07289",
    "held out": "abe79ec016586f86",
    "distinct": "aef583e0a63bab40",
}


@pytest.mark.parametrize("name", PLANS)
def test_batches_are_those_of_the_recorded_plan(name):
    assert hashed(PLANS[name]()) == RECORDED[name]
