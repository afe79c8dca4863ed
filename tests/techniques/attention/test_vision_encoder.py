"""Vision encoders against the vision encoders of plain transformers."""

from __future__ import annotations

import pytest
import torch
from support import image_models
from support.image_models import assert_alike, documents, gradients

from fxtune.models.kinds.image_decoder import host_arguments
from fxtune.models.kinds.image_decoder.parts import encoder_layers, vision_encoders
from fxtune.models.kinds.image_decoder.patch_embedding import replace_patch_embeddings
from fxtune.techniques.attention import vision_encoder

AT_ONCE = [*(family for family in image_models.CONFIGS if family.startswith("qwen")), "pixtral", "mistral3"]
"""Families whose towers take the patches of all images in one list."""


def prepared(family):
    model = image_models.model(family)
    replace_patch_embeddings(model)
    vision_encoder.prepare(model)
    for part in vision_encoders(model):
        if host_arguments.takes_bounds(part):
            vision_encoder.call(part, "fxtune_tower_flash4")
    return model


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_loss_and_gradients_are_those_of_plain_transformers(family):
    plain = image_models.model(family)
    shown = documents(family, plain)
    expected = image_models.plain_loss(plain, shown)
    wanted = gradients(plain, expected)
    model = prepared(family)
    assert all(vision_encoder.attends_at_once(part) == (family in AT_ONCE) for part in vision_encoders(model))
    language_model = image_models.language_model(model, reads_sizes_on_host=True)
    loss = language_model.summed_loss(image_models.batch(model, [shown[:3], shown[3:]]))
    assert abs(loss.item() - expected.item()) < 1e-5 * expected.item()
    assert_alike(gradients(model, loss), wanted)


@pytest.mark.parametrize("family", AT_ONCE)
def test_attention_is_called_once_in_a_layer(family):
    model = prepared(family)
    asked, seen, acted = vision_encoder.observe(model)
    assert acted
    assert seen == f"{len(encoder_layers(model))} calls in 2 layers of the vision encoder"
    assert asked == "the vision encoder's: FlashAttention-4, once for all images"


@pytest.mark.parametrize("family", [family for family in AT_ONCE if family.startswith("qwen")])
def test_a_tower_computes_nothing_from_the_sizes_of_images(family, monkeypatch):
    """Each computation there would wait for the device."""
    model = prepared(family)
    images = image_models.document(family, model, [2, (2, 3), 2, (1, 2), 2], 0).images
    part = vision_encoders(model)[0]
    given = host_arguments.qwen_arguments(part, images["image_grid_thw"])
    expected = part(images["pixel_values"], grid_thw=images["image_grid_thw"]).pooler_output
    without_sizes = torch.full_like(images["image_grid_thw"], 10**6)
    monkeypatch.setattr(vision_encoder, "qwen_arguments", lambda *_: given)
    assert torch.equal(part(images["pixel_values"], grid_thw=without_sizes).pooler_output, expected)


def test_bounds_of_lengths_are_few():
    model = prepared("qwen2_5_vl")
    longest = {
        host_arguments.qwen_arguments(vision_encoders(model)[0], torch.tensor([[1, rows, 16]]))["max_seqlen"]
        for rows in range(2, 65, 2)
    }
    assert longest == {64, 128, 256, 512, 1024}


def test_sizes_stay_on_the_host():
    model = image_models.model("qwen2_5_vl")
    batch = image_models.batch(model, [documents("qwen2_5_vl", model)]).to(torch.device("meta"))
    assert batch.images["pixel_values"].is_meta
    assert not batch.images["image_grid_thw"].is_meta


def test_a_frozen_tower_keeps_nothing_for_the_backward_pass():
    model = prepared("qwen2_5_vl")
    for weight in model.parameters():
        weight.requires_grad_(False)
    for weight in model.model.language_model.layers[0].self_attn.q_proj.parameters():
        weight.requires_grad_(True)
    features = []
    vision_encoders(model)[0].register_forward_hook(lambda *given: features.append(given[-1].pooler_output))
    loss = image_models.language_model(model).summed_loss(image_models.batch(model, [documents("qwen2_5_vl", model)]))
    assert loss.requires_grad
    assert features
    assert not any(feature.requires_grad for feature in features)
