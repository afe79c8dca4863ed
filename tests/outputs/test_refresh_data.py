"""The verdicts of a refresh from losses alone, and the mixture that it trains on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fxtune.config.needs import unread
from fxtune.config.root import RefreshConfig
from fxtune.data.config import SourceConfig
from fxtune.objectives.dpo import DPO
from fxtune.outputs.document_losses import DocumentLosses
from fxtune.outputs.refresh_data import RefreshData, find_drift, judge
from fxtune.training.builder import RunBuilder


def losses(means: np.ndarray) -> DocumentLosses:
    return DocumentLosses(np.arange(len(means), dtype=np.uint64), means * 10, np.full(len(means), 10.0))


def test_verdicts():
    draw, settings = np.random.default_rng(0), RefreshConfig()
    old, new = draw.lognormal(0, 0.5, 100), draw.lognormal(0, 0.5, 60)
    assert not find_drift(losses(old), losses(new), settings).found
    assert find_drift(losses(old), losses(new * 1.4), settings).found
    assert not find_drift(losses(old), losses(new / 1.4), settings).found  # easier rows need no training

    def passes(kept: float, gained: float) -> bool:
        after = old + kept + draw.normal(0, 0.01, 100), new - gained + draw.normal(0, 0.01, 60)
        return judge((losses(old), losses(after[0])), (losses(new), losses(after[1])), settings).passed

    assert passes(0.0, 0.1)
    assert passes(0.01, 0.1)
    assert not passes(0.03, 0.1)
    assert not passes(0.0, -0.1)
    assert not passes(-0.5, 0.0005)  # less than refresh.gain


def test_a_model_that_has_forgotten_general_text_does_not_pass():
    old, better = losses(np.linspace(1, 2, 60)), losses(np.linspace(1, 2, 60) - 0.1 + np.sin(range(60)) / 1000)

    def passes(after: float, bound: float | None) -> bool:
        return judge((old, better), (old, better), RefreshConfig(forgotten=bound), general=(2.0, after)).passed

    assert passes(2.09, 0.1)
    assert not passes(2.11, 0.1)
    assert passes(2.11, None)


@pytest.mark.parametrize("weighted", [False, True])
def test_mixture_has_its_shares_and_holds_the_same_old_rows_out(narrow, cwd, weighted):
    def write(name: str, count: int, start: int) -> SourceConfig:
        rows = [
            {"prompt": f"row {start + i}", "completion": f"answer {start + i} " * (i % 5 + 1)} for i in range(count)
        ]
        (cwd / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SourceConfig(path=name)

    narrow.data.eval_fraction, narrow.train.global_batch_size = 0.3, 4
    narrow.data.sources = [write("a.jsonl", 60, 0), write("b.jsonl", 40, 100)]
    if weighted:
        narrow.data.sources[0].weight, narrow.data.sources[1].weight = 3.0, 1.0
    before = narrow.data
    (cwd / "setting.json").write_text("{}")
    new = write("new.jsonl", 50, 200)
    config = replace(narrow, data=replace(before, sources=[new]))
    config.refresh.epochs, config.refresh.replay = 2.0, 0.25
    data = RefreshData(cwd, before, config, config.model)
    candidate = data.candidate(cwd / "adapter", cwd / "run-1", data.write_new_rows(cwd, "run-1"))
    candidate.model = narrow.model  # there are no weights here
    prepared = RunBuilder(candidate).read()[1]
    shares = [source["share"] for source in prepared.training.summary()["sources"]]
    assert sum(shares[:2]) == pytest.approx(0.25, abs=0.03)
    assert not weighted or shares[0] / shares[1] == pytest.approx(3, rel=0.2)
    repeats = prepared.training.summary()["sources"][2]["repeats"] * candidate.train.epochs
    assert repeats == pytest.approx(2.0, rel=0.05)
    held = prepared.evaluation
    evaluated = {
        int(held.tables[at].digests[one]) for step in range(held.steps) for at, one in held.documents(step, 0)
    }
    assert {int(digest) for digest in data.old.digests} <= evaluated
    trained = {
        int(prepared.tables[at].digests[one])
        for step in range(prepared.training.steps)
        for micro in range(prepared.training.micro_batches(step))
        for at, one in prepared.training.documents(step, micro)
    }
    assert not trained & evaluated


def test_no_prompt_of_a_pair_is_learned_and_held_out(narrow, cwd):
    """New pairs may have prompts of old pairs, of which another share is held out."""

    def write(name: str, answer: str, first: int) -> SourceConfig:
        numbers = range(first, first + 80)
        rows = [{"prompt": f"row {n}", "chosen": f" {answer} {n}", "rejected": f" not {answer}"} for n in numbers]
        (cwd / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SourceConfig(path=name)

    narrow.objective, narrow.data.eval_fraction = DPO(name="dpo"), 0.4
    narrow.data.sources = [write("old.jsonl", "old", 0)]
    before = narrow.data
    (cwd / "setting.json").write_text("{}")
    config = replace(narrow, data=replace(before, sources=[write("new.jsonl", "new", 40)]))
    data = RefreshData(cwd, before, config, config.model)
    assert len(data.unknown) == 80
    candidate = data.candidate(cwd / "adapter", cwd / "run-1", data.write_new_rows(cwd, "run-1"))
    candidate.model = narrow.model
    assert not list(unread(candidate))
    prepared = RunBuilder(candidate).read()[1]
    sides = []
    for plan in (prepared.training, prepared.evaluation):
        steps = ((step, micro) for step in range(plan.steps) for micro in range(plan.micro_batches(step)))
        documents = {document for place in steps for document in plan.documents(*place)}
        hashes = ("prompts", "digests")
        sides.append([{int(getattr(plan.tables[at], kind)[row]) for at, row in documents} for kind in hashes])
    (trained, _), (held_out, evaluated) = sides
    assert trained
    assert not trained & held_out
    assert {*data.old.digests.tolist(), *data.new_held_out.tolist()} <= evaluated
