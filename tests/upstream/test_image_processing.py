"""Image processors with fewer passes, against transformers' own."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fxtune.upstream.image_processing import blank, with_fewer_passes

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen2_vl", "Qwen2VL"): dict(size=dict(shortest_edge=4 * 784, longest_edge=16 * 784)),
    ("gemma3", "Gemma3"): dict(size=dict(height=56, width=56)),
    ("gemma4", "Gemma4"): dict(max_soft_tokens=70, patch_size=4, pooling_kernel_size=2),
    ("got_ocr2", "GotOcr2"): dict(size=dict(height=28, width=28), crop_to_patches=True, max_patches=4),
    ("clip", "CLIP"): dict(size=dict(shortest_edge=56), crop_size=dict(height=56, width=56)),
    ("llava", "Llava"): dict(size=dict(shortest_edge=56), crop_size=dict(height=56, width=56), do_pad=True),
    ("llava_onevision", "LlavaOnevision"): dict(
        size=dict(height=28, width=28), image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]]
    ),
    ("idefics3", "Idefics3"): dict(size=dict(longest_edge=112), max_image_size=dict(longest_edge=56)),
    ("smolvlm", "SmolVLM"): dict(size=dict(longest_edge=112), max_image_size=dict(longest_edge=56)),
    ("pixtral", "Pixtral"): dict(size=dict(longest_edge=64), patch_size=dict(height=8, width=8)),
    ("siglip", "Siglip"): dict(size=dict(height=56, width=56)),
}
"""(package of the family, name of its image processor) -> settings for small pictures."""


@pytest.fixture(params=SETTINGS, ids="-".join)
def processors(request):
    """(transformers' image processor, the same with fewer passes)"""
    package, name = request.param
    module = import_module(f"transformers.models.{package}.image_processing_pil_{package}")
    own = getattr(module, f"{name}ImageProcessorPil")(**SETTINGS[request.param])
    return own, with_fewer_passes(own)


def picture(height: int, width: int) -> Image.Image:
    """Colours that change slowly, with noise."""
    draw = np.random.default_rng(height * width)
    rows, columns = np.mgrid[:height, :width]
    smooth = np.stack([rows * 255 / height, columns * 255 / width, (rows + columns) % 200], -1)
    return Image.fromarray((smooth + draw.normal(0, 20, smooth.shape)).clip(0, 255).astype(np.uint8))


def levels(image_processor: Any, difference: torch.Tensor) -> torch.Tensor:
    """A difference of normalized pixels, in levels of 255."""
    deviation = min(image_processor.image_std or [1]) if image_processor.do_normalize else 1
    return difference.abs() * deviation * 255


@pytest.mark.parametrize("size", [(150, 250), (250, 150), (40, 40), (56, 56), (301, 97)])
def test_the_pixels_are_those_of_transformers(processors, size):
    own, image = processors[0], picture(*size)
    expected, found = (processor([image], return_tensors="pt") for processor in processors)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name == "pixel_values":
            assert found[name].shape == values.shape
            assert found[name].dtype == values.dtype
            difference = levels(own, found[name] - values)
            # Both round and clip to bytes between rows and columns, some sizes in another order.
            assert difference.max() < 6
            assert difference.mean() < 0.25
        else:
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(values)), name


def test_pixels_that_are_not_resized_are_equal_to_rounding():
    module = import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    own = module.Qwen2VLImageProcessorPil(**SETTINGS["qwen2_vl", "Qwen2VL"])
    image = picture(112, 84)
    expected, found = (
        processor([image], return_tensors="pt")["pixel_values"] for processor in (own, with_fewer_passes(own))
    )
    assert (found - expected).abs().max() < 1e-6


def test_several_images_at_once_are_as_one_by_one(processors):
    _, quick = processors
    images = [picture(100, 80), picture(100, 80)]
    together = quick(images, return_tensors="pt")["pixel_values"]
    alone = [quick([image], return_tensors="pt")["pixel_values"] for image in images]
    assert torch.equal(together.flatten(), torch.cat([pixels.flatten() for pixels in alone]))


@pytest.mark.parametrize("size", [(150, 250), (30, 90), (3, 60), (60, 3), (1, 1)])
def test_a_blank_image_is_a_black_one(processors, size):
    own, quick = processors
    try:
        expected = own([Image.new("RGB", size[::-1])], return_tensors="pt")
    except Exception as error:  # noqa: BLE001 - what a family refuses differs
        with pytest.raises(type(error)):
            quick([blank(quick, *size)], return_tensors="pt")
        return
    found = quick([blank(quick, *size)], return_tensors="pt")
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        if name == "pixel_values":
            assert found[name].shape == values.shape
            assert levels(own, found[name] - values).max() < 2
        else:
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(values)), name


def test_copies_and_files_have_the_settings(processors, tmp_path):
    own, quick = processors
    assert quick.to_dict() == own.to_dict()
    quick.save_pretrained(tmp_path)
    assert type(own).from_pretrained(tmp_path).to_dict() == own.to_dict()
    image = picture(90, 60)
    expected = quick([image], return_tensors="pt")["pixel_values"]
    for made in (pickle.loads(pickle.dumps(quick)), copy.deepcopy(quick)):
        assert torch.equal(made([image], return_tensors="pt")["pixel_values"], expected)


def test_an_image_processor_of_another_backend_stays():
    assert with_fewer_passes(processor := object()) is processor
    assert blank(processor, 2, 3).size == (3, 2)
