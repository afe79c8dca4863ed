"""Losses of single documents: their sum is the evaluation's, whatever rows they lie in, and pieces are one document."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader
from fxtune.errors import HardwareError
from fxtune.objectives.causal_lm import CausalLM
from fxtune.training.builder import RunBuilder
from fxtune.training.document_losses import MeasuredDocuments, _require_weights_fit, document_losses
from fxtune.training.evaluation import evaluate


@pytest.mark.parametrize(("packing", "length"), [(True, 256), (False, 256), (True, 40)])
def test_documents_add_up_to_the_evaluation(narrow, packing, length):
    narrow.data.packing, narrow.data.sequence_length = packing, length
    builder = RunBuilder(narrow)
    tables = builder.read()[1].tables
    model = builder.language_model(builder.build())
    plan = plan_evaluation(tables, builder.config.data, micro_batch_size=4)
    loader = Loader(plan, narrow.loader, builder.world.device)
    found = document_losses(model, loader, builder.techniques.precision)
    whole = (tables[0].whole or tables[0]).digests
    assert set(found.digests.tolist()) == set(whole.tolist())
    expected = evaluate(model, CausalLM(), loader, builder.techniques.precision)["loss"]
    assert found.summed.sum() / found.tokens.sum() == pytest.approx(expected, rel=1e-5)
    few = MeasuredDocuments(tables, found.digests[5:9])
    loader = Loader(few.plan(builder.config, 0), narrow.loader, builder.world.device)
    alone = document_losses(model, loader, builder.techniques.precision)
    assert alone.digests.tolist() == found.digests[5:9].tolist()
    assert np.allclose(alone.means, found.means[5:9], rtol=1e-4)


def test_divided_model_that_one_card_cannot_hold_is_refused_before_it_is_loaded(narrow):
    builder = RunBuilder(narrow)
    _require_weights_fit(builder)
    builder.settled = replace(builder.settled, facts=replace(builder.facts, memory=1000))
    with pytest.raises(HardwareError, match="compared on one card, although their runs"):
        _require_weights_fit(builder)
