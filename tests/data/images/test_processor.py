"""Token ids and tensors of images, against the processor of each family."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from PIL import Image
from support.processors import FAMILIES, image_ids, processor

from fxtune.data.formats.values import RowError
from fxtune.data.images.processor import ImageProcessor
from fxtune.models.kinds.image_decoder.families import concatenated

SIZES = (56, 56), (30, 90), (201, 100)
"""Heights and widths."""


@pytest.fixture(params=FAMILIES)
def images(request, tmp_path):
    return ImageProcessor(processor(request.param, tmp_path), concatenated)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_letters_and_ids_are_what_the_processor_makes_of_a_text(images, height, width):
    placeholder = list(images.placeholders)[-1]
    image = Image.effect_noise((width, height), 80).convert("RGB")
    text, tokenizer = images.text(height, width, placeholder), images.processor.tokenizer
    whole = images.processor(text=[f"a{placeholder}b"], images=[[image]], add_special_tokens=False)["input_ids"][0]
    around = [
        tokenizer(letters, add_special_tokens=False)["input_ids"] for letters in ("a" + text.before, text.after + "b")
    ]
    assert around[0] + text.ids + around[1] == list(whole)


def test_tensors_of_several_documents_are_those_of_one(images):
    pictures = [Image.effect_noise((width, height), 80).convert("RGB") for height, width in ((56, 56), (56, 56))]
    one = images.tensors(pictures)
    merged = images.merge([images.tensors([picture]) for picture in pictures])
    assert one.keys() == merged.keys()
    assert "input_ids" not in one
    for name, tensor in one.items():
        assert torch.equal(tensor.flatten(), merged[name].flatten())


def test_an_image_processor_can_be_sent_to_a_worker(images):
    image_ids(images, 56, 30)
    copy = pickle.loads(pickle.dumps(images))
    assert copy.identity == images.identity
    assert image_ids(copy, 30, 90) == image_ids(images, 30, 90)
    picture = Image.new("RGB", (30, 60), "red")
    for name, tensor in images.tensors([picture]).items():
        assert torch.equal(copy.tensors([picture])[name], tensor)


def test_the_number_of_tokens_follows_from_the_size(tmp_path):
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path), concatenated)
    assert len(image_ids(images, 56, 56)) == 4
    assert len(image_ids(images, 56, 84)) == 6
    assert len(image_ids(images, 2000, 1000)) <= 16


def test_an_image_that_the_processor_refuses_is_a_bad_row(tmp_path):
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path), concatenated)
    for call in (lambda: image_ids(images, 1, 500), lambda: images.tensors([Image.new("RGB", (500, 1))])):
        with pytest.raises(RowError, match="aspect ratio"):
            call()


def test_the_key_of_the_cache_has_the_settings_of_the_processor(tmp_path):
    first, second = (ImageProcessor(processor("qwen2_5_vl", tmp_path / name), concatenated) for name in "ab")
    assert first.identity == second.identity
    second.processor.image_processor.size = {"shortest_edge": 784, "longest_edge": 8 * 784}
    assert first.identity != second.identity


def test_pixels_of_another_dtype(images):
    picture = Image.effect_noise((60, 40), 80).convert("RGB")
    half = ImageProcessor(images.processor, concatenated, pixels=torch.bfloat16).tensors([picture])
    for name, tensor in images.tensors([picture]).items():
        assert half[name].dtype == (torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        assert torch.equal(half[name], tensor.to(half[name].dtype))


def test_blank_tensors_are_those_of_black_images(images):
    sizes = [(56, 84)]
    black = images.tensors([Image.new("RGB", (width, height)) for height, width in sizes])
    blank = images.blank_tensors(sizes)
    assert blank.keys() == black.keys()
    for name, tensor in black.items():
        assert torch.equal(blank[name], tensor)


@pytest.mark.slow
def test_a_process_with_the_modules_imports_no_other_for_an_image(tmp_path):
    """The fork server of the loader's workers imports them, because transformers takes seconds in each process."""
    for family in FAMILIES:
        made = ImageProcessor(processor(family, tmp_path / family), concatenated)
        (tmp_path / f"{family}.pickle").write_bytes(pickle.dumps(made))
        (tmp_path / f"{family}.json").write_text(json.dumps(made.modules))
    done = subprocess.run([sys.executable, "-c", IN_A_WORKER, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


IN_A_WORKER = """
import importlib, json, pathlib, pickle, sys
new = []
for file in pathlib.Path(sys.argv[1]).glob("*.json"):
    for name in json.loads(file.read_text()):
        importlib.import_module(name)
    before = set(sys.modules)
    pickle.loads(file.with_suffix(".pickle").read_bytes()).blank_tensors([(56, 84)])
    new += [name for name in set(sys.modules) - before if name.startswith(("transformers", "torch", "tokenizers"))]
print(json.dumps(new))
"""


def test_the_image_as_the_model_sees_it_has_the_same_tensors(tmp_path):
    """Qwen's patches are put together again, so a preview shows these pixels and no others."""
    images = ImageProcessor(processor("qwen2_5_vl", tmp_path), concatenated)
    picture = Image.effect_noise((301, 97), 80).convert("RGB")
    seen = images.seen(picture)
    assert seen.size == (196, 56)
    tensors = images.tensors([picture])
    for name, tensor in images.tensors([seen]).items():
        torch.testing.assert_close(tensor, tensors[name])
