"""Which parts of a model are quantized."""

from __future__ import annotations

import pytest
import torch
from support import image_models
from support.architectures import built, prepared_model, random_model
from support.quantized import qlora

from fxtune.models.kinds.image_decoder.parts import image_modules
from fxtune.techniques.quantized_modules import is_quantized


def test_skipped_linears_and_the_head_are_not_quantized():
    mine = built(qlora(skip=("down_proj", "layers.0.self_attn.q_proj")), random_model("llama"))
    left = [
        name
        for name, module in mine.named_modules()
        if isinstance(module, torch.nn.Linear) and not is_quantized(module) and "lora_" not in name
    ]
    assert [name.removeprefix("base_model.model.").removesuffix(".base_layer") for name in left] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "lm_head",
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_towers_and_projectors_are_not_quantized(family):
    mine = built(qlora(), image_models.recipe(family))
    of_images = {*image_modules(mine)}
    linears = [module for module in mine.modules() if isinstance(module, torch.nn.Linear)]
    assert of_images & {*linears}
    assert not any(is_quantized(module) for module in of_images)
    assert any(is_quantized(module) for module in mine.modules())


def test_experts_of_a_mixture_are_refused_by_name():
    model = random_model("llama", model_type="mixtral", num_local_experts=4)
    pipeline = qlora()
    seen = next(iter(pipeline.quantize.verify(prepared_model(pipeline, model), {})))
    assert seen.observed.startswith("8 in nf4, 13.0% of the model")
