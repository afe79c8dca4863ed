"""Stored features of images in each family: the loss and gradients of computed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import image_models
from support.image_models import FAMILIES, documents, gradients

from fxtune.models.kinds.image_decoder.parts import for_images
from fxtune.models.kinds.image_decoder.stored_features import StoredFeatures


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_computed_features(family):
    """The decoder gets the same numbers, so the bits are the same. Pixels are still computed."""
    model = image_models.model(family)
    for weight in for_images(model):
        weight.requires_grad_(False)
    shown = documents(family, model)
    batch, loss = image_models.batch(model, [shown]), image_models.language_model(model).summed_loss
    wanted = gradients(model, expected := loss(batch))
    with torch.no_grad():
        stored = StoredFeatures(model, next(each.images for each in shown if each.images))
        found = stored.features(batch.images)
    stored.begin()
    given = replace(batch, images={"pixel_values": found.flatten()})
    for images in (given, batch):
        own = loss(images)
        assert torch.equal(own, expected)
        for name, gradient in gradients(model, own).items():
            assert torch.equal(gradient, wanted[name]), name


def test_features_of_a_level_each():
    """Qwen3-VL adds features to hidden states of the first layers."""
    model = image_models.model("qwen3_vl")
    shown = next(each for each in documents("qwen3_vl", model) if each.images)
    with torch.no_grad():
        found = StoredFeatures(model, shown.images).features(shown.images)
    assert found.shape == (int((shown.ids == image_models.IMAGE_TOKEN).sum()), 2, 32)
    assert not torch.equal(found[:, 0], found[:, 1])
