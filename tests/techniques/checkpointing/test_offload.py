"""Offload to host memory. On a CPU the same bookkeeping copies from host memory to host memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.architectures import CPU, built, lora, prepared_model, random_model
from support.checkpointing import NARROW, checkpointed, close, gradients, seen, traced, with_random_lora_b

from fxtune.errors import ConfigError, HardwareError
from fxtune.facts.options import Offloaded, Policy, Switch
from fxtune.models.load import load_config
from fxtune.models.structure import decoder_layers
from fxtune.techniques.assemble import assemble
from fxtune.techniques.checkpointing.offload import Offload
from fxtune.techniques.pipeline import Pipeline, make_probe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compiled"), [({}, False), (NARROW, False), ({}, True)], ids=["full", "selective", "compiled"]
)
def test_offloaded_inputs_return_and_buffers_are_reused(compiled, options):
    pipeline = checkpointed(lora(), **options)
    model = prepared_model(pipeline, random_model("llama", num_hidden_layers=3))
    with_random_lora_b(model.module)
    plain = gradients(with_random_lora_b(built(lora(), random_model("llama", num_hidden_layers=3))))
    offload = model.offload = Offload(decoder_layers(model.module), torch.device("cpu"))
    pipeline.checkpointing.offload = Offloaded.inputs
    model.module = traced(model.module) if compiled else model.module
    assert "2 sent there and 2 brought back" in seen(pipeline, model)
    buffers = {buffer.data_ptr() for buffer in offload.pool}
    for _ in range(3):
        assert close(gradients(model.module), plain, 1e-5 if compiled else 0.0)
    assert {buffer.data_ptr() for buffer in offload.pool} == buffers
    assert len(buffers) == 2


@pytest.mark.slow
@pytest.mark.parametrize("fused", ["on", "off"])
def test_offload_of_all_kept_tensors_leaves_gate_and_up_on_the_device(fused):
    """Floats a token of a Llama of hidden 64, MLP 96; rank 4. The same gradients, and the same host memory each time."""
    model, made = random_model("llama", num_hidden_layers=4), [lora(fused=Switch(fused)) for _ in range(2)]
    plain = gradients(with_random_lora_b(built(made[0], model)))
    pipeline = checkpointed(
        made[1],
        policy=Policy.mix,
        mix={"attention": 1, "narrow": 1, "wide": 2},
        offload=Offloaded.kept,
    )
    ours = assemble(pipeline, model, load_config(model), CPU, 0)
    with_random_lora_b(ours.module)
    ours.offload.min_bytes = 0
    ours.module = traced(ours.module)
    pipeline.checkpointing.offload = Offloaded.kept
    assert "3 sent there and 3 brought back" in seen(pipeline, ours)
    pieces = {piece.data_ptr() for piece in ours.offload.pool}
    for _ in range(3):
        before = ours.offload.sent
        assert close(gradients(ours.module), plain, 1e-5)
        size = (ours.offload.sent - before) / 24 / 4
    assert {piece.data_ptr() for piece in ours.offload.pool} == pieces
    adapters = 32 if fused == "on" else 7 * 4
    narrow = 64 + 128 + 64 + 64 + 4 + adapters
    assert abs(size - (64 + 64 + 4) - 2 * narrow) <= (32 if fused == "on" else 0)  # wide: the MLP's own adapters, too


def test_error_for_memory_that_cannot_be_pinned_says_what_to_change(monkeypatch):
    model = built(checkpointed(lora()), random_model("llama", num_hidden_layers=3))
    Offload(decoder_layers(model), torch.device("cpu"))
    empty = torch.empty

    def refuse(*size, **options):
        if "pin_memory" in options:
            raise RuntimeError("CUDA error: out of memory\nfurther lines")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(
        HardwareError, match=r"checkpointing\.offload: .* 0\.0 GiB are pinned.*out of memory\)\. Set it to"
    ) as told:
        model(**make_probe(model))
    assert "further lines" not in str(told.value)


def test_forward_pass_without_backward_returns_its_buffers():
    model = built(checkpointed(lora()), random_model("llama", num_hidden_layers=4))
    offload = Offload(decoder_layers(model), torch.device("cpu"))
    logits = model(**make_probe(model)).logits
    assert offload.inputs_sent == 3
    assert not offload.pool
    del logits
    assert len(offload.pool) == 3
    with torch.no_grad():
        model(**make_probe(model))
    assert offload.inputs_sent == 3


def test_longer_rows_get_larger_buffers_but_not_more():
    model = built(checkpointed(lora()), random_model("llama", num_hidden_layers=3))
    offload = Offload(decoder_layers(model), torch.device("cpu"))
    for length in (8, 32, 16):
        model(input_ids=torch.ones(1, length, dtype=torch.long), use_cache=False).logits.sum().backward()
        assert len(offload.pool) == 2
    assert {buffer.numel() for buffer in offload.pool} == {32 * 64 * 4}


def test_verify_fails_if_nothing_is_offloaded():
    pipeline = checkpointed(lora())
    prepared = prepared_model(pipeline, random_model("llama"))
    model = prepared.module
    pipeline.checkpointing.offload = Offloaded.inputs
    with pytest.raises(ConfigError, match="0 sent there and 0 brought back"):
        pipeline.prove(prepared, make_probe(model))


def test_offloading_model_is_freed_after_a_forward_pass_alone():
    model = built(Pipeline(), random_model("llama"))
    offload = Offload(decoder_layers(model), torch.device("cpu"))
    out = model(**make_probe(model)).logits
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, offload, out
    gc.collect()
    assert not any(weight() is not None for weight in weights)
