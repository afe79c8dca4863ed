"""Liger's modules: in one model only, and with its inputs unchanged."""

from __future__ import annotations

import copy

import torch
from support.architectures import (
    built,
    random_model,
)
from support.liger import (
    with_liger,
)

from fxtune.techniques.pipeline import Pipeline, make_probe


def test_a_plain_model_in_the_same_process_is_not_changed(stand_ins):
    """Liger's own patches would change every model that is built later."""
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    forwards = {
        name: kind.forward for name, kind in before.items() if isinstance(kind, type) and hasattr(kind, "forward")
    }
    mine, _ = with_liger(random_model("llama"))
    plain = built(Pipeline(), random_model("llama"))
    assert vars(modeling_llama) == before
    assert all(getattr(modeling_llama, name).forward is forward for name, forward in forwards.items())
    assert {type(module).__name__ for module in plain.modules() if "Liger" in type(module).__name__} == set()
    assert {type(module).__name__ for module in mine.modules() if "Liger" in type(module).__name__} == {
        "LigerRMSNorm",
        "LigerSwiGLUMLP",
        "LigerLlamaAttention",
    }
    probe = make_probe(plain)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        plain(**probe)
    assert not {event.name for event in seen.events()} & {
        "_rms_norm_forward_kernel",
        "fxtune::rotary",
        "_swiglu_forward_kernel",
    }


def test_rope_does_not_overwrite_its_inputs(stand_ins):
    """Else a result that checkpointing keeps would be rotated twice."""
    model, _ = with_liger(random_model("llama"))
    results = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, __, out: results.append((out, out.clone())))
    model(**make_probe(model))
    assert torch.equal(*results[0])


def test_a_model_can_be_deep_copied(stand_ins):
    model, _ = with_liger(random_model("llama"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0)
    assert not model(**make_probe(model)).logits.eq(0).all()
