"""Selective checkpointing: which operators are recognised, saved and recomputed."""

from __future__ import annotations

import pytest
import torch
from support.architectures import CPU, built, enable, facts_of, lora, random_model, tiny_model
from support.checkpointing import NARROW, checkpointed, gradients, seen, traced, with_random_lora_b

from fxtune.facts.options import Policy
from fxtune.kernels import recurrence
from fxtune.models.load import load_config
from fxtune.techniques.assemble import assemble
from fxtune.techniques.checkpointing.policy import group_of, weight_shape


@pytest.mark.parametrize(
    ("name", "second", "shape"),
    [
        ("aten.mm", torch.empty(3, 5), (3, 5)),
        ("aten.addmm", torch.empty(3, 5), (3, 5)),
        ("aten.bmm", torch.empty(2, 3, 5), None),
        ("bitsandbytes.int8_linear_matmul", torch.empty(5, 3), (3, 5)),
        ("bitsandbytes.gemm_4bit", [5, 3], (3, 5)),
    ],
)
def test_products_are_recognised_by_the_shape_of_their_weight(name, second, shape):
    at = {"aten.addmm": 2, "bitsandbytes.gemm_4bit": 2}.get(name, 1)
    assert group_of(name) == "matmuls"
    assert weight_shape(name, (*[torch.empty(4, 3)] * at, second)) == shape


@pytest.mark.parametrize(
    "name",
    [
        *("fxtune.flash4_backward", "aten._scaled_dot_product_flash_attention_backward", "aten.add"),
        *("aten._fused_sdp_choice", "aten.linalg_vector_norm", "bitsandbytes.dequantize_4bit"),
    ],
)
def test_other_operators_belong_to_no_group(name):
    assert group_of(name) is None


def test_saved_operators_run_once_and_recomputed_ones_twice():
    pipeline = checkpointed(lora(), **NARROW)
    told = seen(pipeline, built(pipeline, random_model("llama")))
    assert "aten.mm (q_proj, o_proj) 4+0" in told
    assert "aten.mm (k_proj, v_proj) 4+0" in told
    assert "aten.mm (gate_proj, up_proj) 4+4" in told
    assert "flash_attention_for_cpu 2+0" in told


def test_flash4_operator_is_saved_by_its_name():
    model = random_model("llama")
    config = load_config(model)
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["fxtune.flash4"])
    pipeline.attention.backend = "flash4"
    ours = with_random_lora_b(assemble(pipeline, model, config, CPU, 0).module)
    told = seen(pipeline, ours)
    assert "fxtune.flash4 2+0" in told
    assert "aten.mm (q_proj, o_proj) 4+4" in told
    plain = lora()
    plain.attention.backend = "flash4"
    expected = gradients(with_random_lora_b(assemble(plain, model, config, CPU, 0).module))
    assert all(torch.equal(expected[name], value) for name, value in gradients(ours).items())


def test_save_attention_recomputes_all_matmuls():
    pipeline = checkpointed(lora(), policy=Policy.selective, save=["attention"])
    told = seen(pipeline, built(pipeline, random_model("llama")))
    assert "flash_attention_for_cpu 2+0" in told
    assert "aten.mm (q_proj, o_proj) 4+4" in told


@pytest.mark.parametrize(("kind", "is_compiled"), [("qwen3_next", False), ("mamba2", True)])
def test_linear_attention_is_saved_and_its_convolution_recomputed(kind, is_compiled, monkeypatch):
    model, runs = tiny_model(kind), []
    forward = recurrence.forward
    monkeypatch.setattr(recurrence, "forward", lambda *given: runs.append(1) or forward(*given))

    def made(**options):
        pipeline = enable(attention={})
        pipeline.attention.resolve(facts_of(model))
        if options:
            checkpointed(pipeline, **options)
        return pipeline, built(pipeline, model)

    def ran(ours):
        found = gradients(traced(ours) if is_compiled else ours)
        runs.clear()
        assert all(torch.equal(found[name], value) for name, value in gradients(ours).items())
        return found, len(runs)

    plain, layers = ran(made()[1])
    assert layers > 1
    for options, calls in (
        ({}, f"fxtune.linear_attention {layers}+0"),
        ({"save": ["attention", "fxtune.short_convolution"]}, f"fxtune.short_convolution {layers}+0"),
        ({"recompute": ["fxtune.linear_attention"]}, f"fxtune.linear_attention {layers}+{layers}"),
    ):
        pipeline, ours = made(policy=Policy.selective, **options)
        assert calls in seen(pipeline, ours)
        found, again = ran(ours)
        assert again == layers * (2 if "recompute" in options else 1)
        assert all(torch.equal(plain[name], value) for name, value in found.items())
