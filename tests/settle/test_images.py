"""The processor that a run uses for its images."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from PIL import Image
from support.processors import write_model

from fxtune.data.config import DataConfig, ImageTokensConfig
from fxtune.errors import ConfigError, StorageError
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.settle.images import image_processor


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def made(folder, **bounds):
    model = ModelConfig(path=str(folder))
    return image_processor(model, DataConfig(image_tokens=ImageTokensConfig(**bounds)), load_tokenizer(model))


def test_bounds_resize_images(qwen):
    big, small = (800, 600), (16, 16)
    free, bounded = made(qwen), made(qwen, min=6, max=9)
    assert (len(free.image_ids(*big)), len(free.image_ids(*small))) == (12, 4)
    assert all(6 <= len(bounded.image_ids(*size)) <= 9 for size in (big, small))
    assert free.identity != bounded.identity
    tensors = bounded.tensors([Image.new("RGB", big[::-1])])
    assert int(tensors["image_grid_thw"].prod()) // 4 == len(bounded.image_ids(*big))
    with pytest.raises(ConfigError, match="at least 20"):
        made(qwen, min=20)


def test_positions_and_the_merge_are_those_of_the_family(qwen):
    images = pickle.loads(pickle.dumps(made(qwen)))
    tensors = images.tensors([Image.new("RGB", (16, 16))])
    ids = torch.tensor([7, 8, *images.image_ids(16, 16), 9])
    assert images.rope_positions(ids, tensors).tolist() == [
        [0, 1, 2, 2, 2, 2, 4],
        [0, 1, 2, 2, 3, 3, 4],
        [0, 1, 2, 3, 2, 3, 4],
    ]


def test_a_family_without_bounds_refuses_them(tmp_path):
    folder = write_model("llava", tmp_path)
    assert made(folder).image_ids(30, 30)
    with pytest.raises(ConfigError, match="image_tokens"):
        made(folder, max=100)


def test_a_model_of_text_has_no_processor(base):
    assert made(base) is None
    with pytest.raises(ConfigError, match="models that read images"):
        made(base, max=100)


def test_a_vision_model_without_the_files_reads_text_only(tmp_path):
    folder = write_model("llava", tmp_path)
    for file in folder.glob("*processor_config.json"):
        file.unlink()
    assert made(folder) is None


def test_a_broken_processor_is_an_error_with_its_folder(tmp_path):
    folder = write_model("llava", tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuchProcessor"}))
    with pytest.raises(StorageError, match="processor of images"):
        made(folder)
