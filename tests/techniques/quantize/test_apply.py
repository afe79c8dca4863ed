"""Quantizing a model that does not fit."""

from __future__ import annotations

import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import built, logits, on_disk, prepared_model, random_model
from support.quantized import WIDE, qlora

from fxtune.distributed.world import World
from fxtune.errors import StorageError
from fxtune.facts.options import DType
from fxtune.facts.run import Facts
from fxtune.models import load as models
from fxtune.models import weights
from fxtune.models.load import ModelConfig, load_config
from fxtune.techniques.pipeline import make_probe
from fxtune.techniques.quantize import apply


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_model_larger_than_the_card_is_built_in_host_memory(pretrained, base, monkeypatch):
    """Which device holds the weights before quantization. World is patched to report a card with 1 kB of free memory."""
    model = ModelConfig(path=str(base)) if pretrained else random_model("llama")
    model.dtype = DType.bfloat16
    monkeypatch.setattr(World, "facts", lambda self: Facts(device="cuda", free_memory=1000, host_memory=2**40))
    monkeypatch.setattr(World, "capability", (9, 0))
    made = models.build(model, load_config(model), World(torch.device("cuda", 0)), seed=0, shrinks=True).module
    assert {parameter.device.type for parameter in made.parameters()} == {"cpu"}
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("random", [True, False])
def test_random_weights_larger_than_the_card_are_not_drawn_in_host_memory(random, device, monkeypatch):
    """World is patched to report a card with 1 kB of free memory and a large host."""
    model = random_model("llama")
    monkeypatch.setattr(World, "facts", lambda self: Facts(device=device, free_memory=1000, host_memory=2**40))
    fits = weights.fits_whole(load_config(model), torch.bfloat16, World(torch.device(device)), False, random)
    assert fits == (device == "cpu" or not random)


@pytest.mark.parametrize(
    ("kind", "pretrained"),
    [("nf4", True), ("int8", False)],
)
def test_a_model_that_fits_nowhere_is_quantized_as_it_is_read(kind, pretrained, tmp_path, monkeypatch):
    """The same bits as a model that is read whole, and never more than one matrix in 16 bits beside what is no linear."""
    sizes = {**WIDE, "attention_bias": True}
    model = (
        ModelConfig(path=str(on_disk(tmp_path / "base", **sizes))) if pretrained else random_model("llama", **sizes)
    )
    model.dtype = DType.bfloat16
    pipeline = qlora(kind, DType.bfloat16)
    whole = built(pipeline, model)
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    held, most = weakref.WeakSet(), [0]
    real = apply.quantized

    def watched(linear, *options):
        held.add(linear.weight)
        most[0] = max(most[0], len(held))
        assert not linear.weight.is_meta
        return real(linear, *options)

    monkeypatch.setattr(apply, "quantized", watched)
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    assert most == [1]
    assert all(one.acted for one in pipeline.prove(prepared, make_probe(mine)))
    assert torch.equal(logits(mine), logits(whole))
    assert mine.state_dict().keys() == whole.state_dict().keys()


def test_broken_weight_is_found_as_it_is_quantized(tmp_path, monkeypatch):
    folder = on_disk(tmp_path / "base", **WIDE)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    monkeypatch.setattr("fxtune.techniques.assemble._quantizes_rows", lambda *_: True)
    with pytest.raises(StorageError, match=r"hold NaN .* in model\.layers\.1\.mlp\.up_proj\.weight"):
        built(qlora(), ModelConfig(path=str(folder)))
