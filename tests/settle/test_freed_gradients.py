"""Whether weights are updated in the backward pass: the refusals, and what `auto` decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.forecasts import card

from fxtune.config.root import Config
from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError
from fxtune.estimate.memory import forecast
from fxtune.facts.execution import OptimizerState
from fxtune.facts.options import Autocast, Scope, Switch
from fxtune.facts.recomputation import RecomputePlan
from fxtune.optim.config import OptimizerName
from fxtune.settle.freed_gradients import change_for, decide, refusals
from fxtune.training.builder import RunBuilder


@pytest.fixture
def full(narrow, cwd) -> Config:
    """Full fine-tuning of which each step is one micro-batch, updated in the backward pass."""
    narrow.techniques.lora.enabled, narrow.optimizer.in_backward = False, Switch.on
    narrow.train.max_grad_norm, narrow.train.micro_batch_size = 0.0, 8
    return narrow


def test_auto_is_off_with_cuda_graphs(full):
    full.optimizer.in_backward, full.techniques.compile.enabled = Switch.auto, True
    facts = replace(card(139, 4096, techniques={}), techniques=full.techniques, free_memory=1)
    full.techniques.compile.cuda_graphs = Switch.on
    assert not decide(full, facts)[0].in_backward
    full.optimizer.in_backward = Switch.on
    assert not list(refusals(full, facts)), "techniques.compile refuses it itself"


BATCHES = "optimizer.in_backward: steps of 16 rows in micro-batches of 8 add up gradients"


@pytest.mark.parametrize(
    ("keys", "facts", "said"),
    [
        ({"train.max_grad_norm": 1.0}, {}, "Set train.max_grad_norm=0, or in_backward=off."),
        ({"train.global_batch_size": 16}, {}, f"{BATCHES}, so all gradients are kept. Set train.global_batch_size=8,"),
        ({"train.batch_ramp": [[0.5, 16]]}, {}, f"{BATCHES}, so all gradients are kept. Set train.batch_ramp=[],"),
        ({"techniques.lora.enabled": True}, {}, "adapters' gradients are small"),
        ({}, {"degrees": Degrees(2, 1, 1)}, "Set run.gpus=1, or in_backward=off."),
        ({"optimizer.name": OptimizerName.apex_adamw}, {}, "apex_adamw counts steps for all weights together"),
        ({"techniques.precision.autocast": Autocast.float16}, {}, "float16's loss scale"),
        ({"techniques.compile.enabled": True, "techniques.compile.scope": Scope.model}, {}, "is one graph"),
        ({"train.noise_scale": True}, {}, "train.noise_scale compares several micro-batches"),
    ],
)
def test_each_refusal_says_what_to_change(full, keys, facts, said):
    seen = replace(card(139, 4096, techniques={}), techniques=full.techniques)
    assert not list(refusals(full, seen))
    for key, value in keys.items():
        *path, last = key.split(".")
        place = full
        for name in path:
            place = getattr(place, name)
        setattr(place, last, value)
    (reason,) = refusals(full, replace(seen, **facts))
    assert reason.startswith("optimizer.in_backward: ")
    assert said in reason
    full.optimizer.in_backward = Switch.auto
    assert not list(refusals(full, replace(seen, **facts)))
    assert not decide(full, replace(seen, free_memory=1, **facts))[0].in_backward


def test_a_refusal_comes_before_a_weight_is_loaded(full):
    full.train.max_grad_norm = 1.0
    with pytest.raises(ConfigError, match=r"train\.max_grad_norm=1"):
        RunBuilder(full)


def test_forecast_counts_the_gradients_of_a_layer_and_auto_frees_what_does_not_fit(full):
    full.optimizer.in_backward = Switch.auto
    facts = replace(card(139, 512, techniques={}), optimizer=OptimizerState(0.5, size=4))
    facts = replace(facts, techniques=full.techniques)
    kept, freed = (forecast(replace(facts, in_backward=on), RecomputePlan("input")) for on in (False, True))
    end = 2 * 128256 * 4096  # the head is larger than a layer
    assert kept.trained - freed.trained == pytest.approx(8.03e9 * 2 - end, rel=0.01)
    assert decide(full, facts) == (facts, ""), "there is room for all gradients"
    need = facts.techniques.memory_need(facts).device
    chosen, note = decide(full, replace(facts, free_memory=need - 2**30))
    assert chosen.in_backward
    assert "updated in the backward pass" in note
    full.optimizer.in_backward = Switch.off
    assert not decide(full, replace(facts, free_memory=need - 2**30))[0].in_backward


def test_advice_names_the_keys_that_free_gradients(full):
    full.optimizer.in_backward, full.train.max_grad_norm = Switch.auto, 1.0
    facts = replace(card(40, 4096, techniques={}), techniques=full.techniques)
    assert change_for(full, facts) == "optimizer.in_backward=on train.max_grad_norm=0"
    assert change_for(full, replace(facts, in_backward=True)) == ""
    full.train.global_batch_size = 16
    assert change_for(full, facts) == "", "steps of one micro-batch are another recipe"
