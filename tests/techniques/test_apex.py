"""Apex's norms replace the model's. Apex is not installed for the tests: apex_standin.py says what they show without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import apex_standin
from support.architectures import built, enable, logits, lora, prepared_model, random_model
from torch import nn

from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.models.prepared import PreparedModel
from fxtune.system.machine.facts import APEX
from fxtune.techniques.apex import Apex
from fxtune.techniques.pipeline import make_probe

HERE = Facts(device="cuda", packages={APEX: "0.1"})


@pytest.fixture(autouse=True)
def _apex(monkeypatch):
    apex_standin.install(monkeypatch)
    monkeypatch.setattr(Apex, "check", lambda self, facts: iter(()))


def apex_pipeline():
    pipeline = lora()
    pipeline.apex = Apex(True)
    return pipeline


@pytest.mark.parametrize(("family", "norms"), [("llama", 5), ("qwen3", 9), ("phi", 3)])
def test_norms_are_replaced_and_outputs_stay(family, norms):
    pipeline, model = apex_pipeline(), random_model(family)
    with_apex, plain = built(pipeline, model), built(lora(), model)
    (seen,) = pipeline.apex.verify(PreparedModel(with_apex), make_probe(with_apex))
    assert seen.acted, seen
    assert seen.observed.startswith(f"{norms} norms are Apex's")
    assert list(with_apex.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(logits(with_apex), logits(plain), rtol=1e-4, atol=1e-5)
    assert not any(type(module).__name__.endswith("LlamaRMSNorm") for module in with_apex.modules())


def test_other_norms_stay_and_verify_finds_a_model_without_apex_norms():
    pipeline = apex_pipeline()
    prepared = prepared_model(pipeline, random_model("gemma"))
    model = prepared.module
    assert not any(type(module).__module__.startswith("apex.") for module in model.modules())
    with pytest.raises(ConfigError, match="seen: 0 norms are Apex's"):
        pipeline.prove(prepared, make_probe(model))


def test_verify_finds_a_kernel_with_other_results(monkeypatch):
    monkeypatch.setattr(
        apex_standin.FusedRMSNorm, "forward", lambda self, x: nn.functional.rms_norm(x, x.shape[-1:], eps=0.1)
    )
    pipeline = apex_pipeline()
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    with pytest.raises(ConfigError, match="from the original"):
        pipeline.prove(prepared, make_probe(model))


REFUSED = [
    (Facts(), "the device is cpu"),
    (Facts(device="cuda"), "NVIDIA's Apex is not installed"),
    (Facts(device="cuda", packages={"apex": "0.9"}), "it is PyPI's, which is another project"),
    (replace(HERE, techniques=enable(liger={})), "Liger's kernels replace the same norms"),
    (replace(HERE, techniques=enable(compile={})), "torch.compile fuses norms itself"),
    (replace(HERE, techniques=enable(precision={"autocast": "bfloat16"})), "under autocast"),
]


@pytest.mark.parametrize(("facts", "part"), REFUSED, ids=range(len(REFUSED)))
def test_check_refuses_with_the_cause(facts, part, monkeypatch):
    monkeypatch.undo()
    (reason,) = Apex(True).check(facts)
    assert part in reason
    assert not list(Apex(True).check(HERE))
