"""Losses of single documents: their sum is the evaluation's, whatever rows they lie in, and pieces are one document."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cases import slow_but
from support.rows import write_jsonl

from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader
from fxtune.data.config import SourceConfig
from fxtune.errors import HardwareError
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.dpo import DPO
from fxtune.objectives.kto import KTO
from fxtune.objectives.orpo import ORPO
from fxtune.outputs.document_losses import (
    MeasuredDocuments,
    _require_weights_fit,
    document_losses,
    document_parts,
    document_values,
)
from fxtune.training.builder import RunBuilder
from fxtune.training.evaluation import evaluate


@pytest.mark.parametrize(("packing", "length"), [(True, 256), (False, 256), (True, 40)])
def test_documents_add_up_to_the_evaluation(narrow, packing, length):
    narrow.data.packing, narrow.data.sequence_length = packing, length
    builder = RunBuilder(narrow)
    tables = builder.read()[1].tables
    model = builder.language_model(builder.build())
    plan = plan_evaluation(tables, builder.config.data, micro_batch_size=4)
    loader = Loader(plan, narrow.loader, builder.world.device)
    found = document_losses(model, CausalLM(), loader, builder.techniques.precision)
    whole = (tables[0].whole or tables[0]).digests
    assert set(found.digests.tolist()) == set(whole.tolist())
    expected = evaluate(model, CausalLM(), loader, builder.techniques.precision)["loss"]
    assert found.summed.sum() / found.count.sum() == pytest.approx(expected, rel=1e-5)
    few = MeasuredDocuments(tables, found.digests[5:9])
    loader = Loader(few.plan(builder.config, 0), narrow.loader, builder.world.device)
    alone = document_losses(model, CausalLM(), loader, builder.techniques.precision)
    assert alone.digests.tolist() == found.digests[5:9].tolist()
    assert np.allclose(alone.means, found.means[5:9], rtol=1e-4)


@pytest.mark.parametrize(
    ("objective", "packing"),
    slow_but([(DPO(), True), (DPO(), False), (KTO(), True), (ORPO(), True)], (DPO(), True), (KTO(), True)),
)
def test_groups_add_up_to_the_evaluation(narrow, cwd, objective, packing):
    judged, rows = isinstance(objective, KTO), []
    for number in range(24):
        prompt, answers = f"Which number is {number}?", [f" It is {'very ' * (number % 5)}fine.", " Ask me."]
        judgments = {"completion": answers[number % 2], "label": number % 2 == 0}
        pair = dict(zip(("chosen", "rejected"), answers, strict=True))
        rows.append({"prompt": prompt, **(judgments if judged else pair)})
    narrow.data.sources = [SourceConfig(path=str(write_jsonl(cwd / "rows.jsonl", rows)))]
    narrow.data.packing, narrow.objective = packing, replace(objective, name=type(objective).__name__.lower())
    builder = RunBuilder(narrow)
    tables = builder.read()[1].tables
    plan = plan_evaluation(tables, builder.config.data, micro_batch_size=4)
    builder.compare_on([plan])
    model, _ = builder.proven_model()
    with torch.no_grad():  # away from the reference, on which all losses of DPO are equal
        for parameter in model.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    loader, precision = Loader(plan, narrow.loader, builder.world.device), builder.techniques.precision
    objective, parts = builder.config.objective, None
    if objective.needs.whole_step:
        parts = document_parts(objective, [document_values(model, objective, precision, loader)])
    found = document_losses(model, objective, loader, precision, parts)
    assert found.count.tolist() == [1.0] * 24
    assert found.means.std() > 0.001
    assert found.means.mean() == pytest.approx(evaluate(model, objective, loader, precision)["loss"], rel=1e-5)
    few = MeasuredDocuments(tables, found.digests[5:9])
    loader = Loader(few.plan(builder.config, 0), narrow.loader, builder.world.device)
    alone = document_losses(model, objective, loader, precision, parts)
    assert alone.digests.tolist() == found.digests[5:9].tolist()
    assert np.allclose(alone.means, found.means[5:9], rtol=1e-4)


def test_divided_model_that_one_card_cannot_hold_is_refused_before_it_is_loaded(narrow):
    builder = RunBuilder(narrow)
    _require_weights_fit(builder)
    builder.stage = replace(builder.stage, facts=replace(builder.facts, memory=1000))
    with pytest.raises(HardwareError, match="compared on one card, although their runs"):
        _require_weights_fit(builder)
