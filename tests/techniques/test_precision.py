"""Autocast: what a forward pass computes in, and what a card must have for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from architectures import CPU, built, facts_of, lora, random_model

from fxtune.pipeline import make_probe
from fxtune.techniques.precision import Autocast, Precision
from fxtune.world import Facts

TURING = Facts(device="cuda", device_name="Tesla T4", capability=(7, 5))
AMPERE = dataclasses.replace(TURING, device_name="A100", capability=(8, 0))


@pytest.mark.parametrize(("autocast", "expected"), [(Autocast.none, torch.float32), (Autocast.bfloat16, torch.bfloat16)])
def test_a_forward_pass_computes_in_the_dtype_asked_for(autocast, expected):
    precision = Precision(enabled=True, autocast=autocast)
    model = built(lora(), random_model("llama"))
    seen = []
    linear = model.get_base_model().model.layers[0].mlp.down_proj
    linear.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    with precision.context(CPU.device):
        model(**make_probe(model))
    assert seen == [expected]
    assert all(evidence.acted for evidence in precision.verify(model, make_probe(model)))


def test_disabled_is_no_context():
    with Precision(enabled=False, autocast=Autocast.bfloat16).context(CPU.device):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_an_autocast_that_does_not_act_is_noticed(monkeypatch):
    monkeypatch.setattr(Precision, "context", lambda self, device: torch.autocast(device.type, enabled=False))
    model = built(lora(), random_model("llama"))
    evidence = list(Precision(enabled=True, autocast=Autocast.bfloat16).verify(model, {}))
    assert not evidence[0].acted


@pytest.mark.parametrize(("facts", "autocast", "expected"), [
    (TURING, Autocast.bfloat16, "Tesla T4 (compute capability 7.5) has no bfloat16 units. Use none"),
    (dataclasses.replace(TURING, dtype="bfloat16"), Autocast.none, "Set model.dtype=float32"),
    (dataclasses.replace(AMPERE, dtype="float16"), Autocast.bfloat16, "over float16 weights"),
    (AMPERE, Autocast.bfloat16, None), (TURING, Autocast.none, None), (Facts(), Autocast.bfloat16, None)])
def test_check_names_what_the_card_lacks(facts, autocast, expected):
    reasons = list(Precision(enabled=True, autocast=autocast).check(facts))
    assert (expected is None) == (not reasons)
    assert expected is None or expected in reasons[0]


def test_the_cpu_s_own_matmul_setting_is_left_alone():
    before = torch.get_float32_matmul_precision()
    Precision(enabled=True, tf32=True).apply(built(lora(), random_model("llama")), CPU)
    assert torch.get_float32_matmul_precision() == before
    assert facts_of(random_model("llama")).device == "cpu"
