"""A patch embedding as a product against the convolution."""

from __future__ import annotations

import pytest
import torch
from support import image_models
from torch import nn

from fxtune.models.kinds.image_decoder.parts import vision_encoders
from fxtune.models.kinds.image_decoder.patch_embedding import PatchEmbedding, replace_patch_embeddings


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False), (5, 3, 2, 4, 4)),
        (nn.Conv2d(3, 8, 7, 7), (2, 3, 28, 21)),
        (nn.Conv2d(3, 8, (7, 5), (7, 5), padding="valid"), (2, 3, 30, 29)),
    ],
    ids=["a patch", "images", "a rest at the edge"],
)
def test_results_and_gradients_are_those_of_the_convolution(convolution, shape):
    pixels = torch.randn(shape, requires_grad=True)
    product = PatchEmbedding(convolution)
    results = []
    for module in (convolution, product):
        out = module(pixels)
        convolution.zero_grad()
        pixels.grad = None
        out.sin().sum().backward()
        results.append([out, pixels.grad.clone(), *(weight.grad.clone() for weight in convolution.parameters())])
    for found, expected in zip(results[1], results[0], strict=True):
        assert found.shape == expected.shape
        assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_no_family_keeps_a_convolution(family):
    """So channels-last memory and cuDNN's autotuner have nothing to act on."""
    model = image_models.model(family)
    tensors = {name: tensor.shape for name, tensor in model.state_dict().items()}
    replace_patch_embeddings(model)
    left = [module for tower in vision_encoders(model) for module in tower.modules()]
    assert not any(isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for module in left)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == tensors


@pytest.mark.parametrize(
    "convolution",
    [nn.Conv2d(3, 8, 4, 2), nn.Conv2d(3, 8, 4, 4, padding=1), nn.Conv2d(4, 8, 4, 4, groups=2)],
    ids=["overlap", "padding", "groups"],
)
def test_other_convolutions_stay(convolution):
    model = image_models.model("qwen2_5_vl")
    model.model.visual.other = convolution
    replace_patch_embeddings(model)
    assert model.model.visual.other is convolution
    assert isinstance(model.model.visual.patch_embed.proj, PatchEmbedding)
