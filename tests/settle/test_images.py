"""The processor that a run uses for its images."""

from __future__ import annotations

import copy
import importlib.util
import json
import pickle
from dataclasses import replace

import pytest
import torch
from PIL import Image
from support import image_models
from support.harness import write_chats
from support.processors import image_ids, write_model, write_picture_pairs, write_picture_rows, write_processor

from fxtune.config.root import Config
from fxtune.data.config import DataConfig, ImageTokensConfig, SourceConfig
from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError, StorageError
from fxtune.facts.options import Switch
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.objectives.dpo import DPO
from fxtune.settle.images import image_processor, refusals
from fxtune.training.builder import RunBuilder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_model("qwen2_5_vl", tmp_path_factory.mktemp("model"))


def made(folder, **bounds):
    model = ModelConfig(path=str(folder))
    return image_processor(model, DataConfig(image_tokens=ImageTokensConfig(**bounds)), load_tokenizer(model))


def test_bounds_resize_images(qwen):
    big, small = (800, 600), (16, 16)
    free, bounded = made(qwen), made(qwen, min=6, max=9)
    assert (len(image_ids(free, *big)), len(image_ids(free, *small))) == (12, 4)
    assert all(6 <= len(image_ids(bounded, *size)) <= 9 for size in (big, small))
    assert free.identity != bounded.identity
    tensors = bounded.tensors([Image.new("RGB", big[::-1])])
    assert int(tensors["image_grid_thw"].prod()) // 4 == len(image_ids(bounded, *big))
    with pytest.raises(ConfigError, match="at least 20"):
        made(qwen, min=20)


def test_positions_and_the_merge_are_those_of_the_family(qwen):
    images = pickle.loads(pickle.dumps(made(qwen)))
    tensors = images.tensors([Image.new("RGB", (16, 16))])
    ids = torch.tensor([7, 8, *image_ids(images, 16, 16), 9])
    assert images.rope_positions(ids, tensors).tolist() == [
        [0, 1, 2, 2, 2, 2, 4],
        [0, 1, 2, 2, 3, 3, 4],
        [0, 1, 2, 3, 2, 3, 4],
    ]


def test_a_family_without_bounds_refuses_them(tmp_path):
    folder = write_model("llava", tmp_path)
    assert image_ids(made(folder), 30, 30)
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


def test_a_package_that_a_processor_needs_is_named(tmp_path):
    if importlib.util.find_spec("num2words"):
        pytest.skip("the package is installed")
    folder = write_processor("idefics3", tmp_path)
    config = image_models.config("smolvlm")
    config.text_config.vocab_size = 200
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "SmolVLMImageProcessor"}))
    with pytest.raises(StorageError, match="num2words"):
        made(folder)


def test_a_broken_processor_is_an_error_with_its_folder(tmp_path):
    folder = write_model("llava", tmp_path)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "NoSuchProcessor"}))
    with pytest.raises(StorageError, match="processor of images"):
        made(folder)


def recipe(folder, rows, family="qwen2_5_vl", **options):
    config = Config(model=ModelConfig(path=str(write_model(family, folder / "model"))), **options)
    config.data = DataConfig(sources=[SourceConfig(path=str(rows))], sequence_length=256, packing=True)
    config.data.cache_dir = str(folder / "cache")
    config.techniques.lora.enabled = True
    config.run.device = "cpu"
    return config


def test_parts_for_images_are_not_trained_on_rows_without_images(tmp_path):
    config = recipe(tmp_path, write_chats(tmp_path / "chats.jsonl"))
    RunBuilder(config).read()
    config.techniques.lora.vision, config.techniques.lora.projector = True, True
    with pytest.raises(ConfigError, match=r"techniques.lora.vision, techniques.lora.projector: no row"):
        RunBuilder(config).read()
    config.data.sources = [SourceConfig(path=str(write_picture_rows(tmp_path / "pictures")))]
    RunBuilder(config).read()


def test_rows_with_images_are_not_cut_over_ranks(tmp_path):
    config = recipe(tmp_path, write_picture_rows(tmp_path / "pictures"))
    builder = RunBuilder(config)
    builder.read()
    facts = replace(builder.facts, degrees=Degrees(context=2))
    assert not [*refusals(config, builder.techniques, builder.facts, True, True)]
    assert [reason.split(":")[0] for reason in refusals(config, builder.techniques, facts, True, True)] == [
        "parallel.context"
    ]


def test_cuda_graphs_are_refused_for_rows_with_images(tmp_path):
    config = recipe(tmp_path, write_picture_rows(tmp_path / "pictures"))
    builder = RunBuilder(config)
    builder.read()
    techniques = copy.deepcopy(builder.techniques)
    techniques.compile.enabled, techniques.compile.cuda_graphs = True, Switch.on
    facts = replace(builder.facts, device="cuda", techniques=techniques)
    text, pictures = (
        {*refusals(config, techniques, replace(facts, image_features=features), True, True)} for features in (0, 16)
    )
    (reason,) = pictures - text
    assert reason.startswith("techniques.compile.cuda_graphs:")
    assert facts.image_features


def test_pairs_with_images_that_see_both_ways_share_no_prompt(tmp_path):
    """Pairs of text may, where the recipe says so."""
    config = recipe(tmp_path, write_picture_pairs(tmp_path / "pictures"), "gemma3", objective=DPO())
    builder = RunBuilder(config)
    builder.read()
    assert builder.config.data.share_prompts is False
    assert any(note.startswith("share_prompts: off, because") for note in builder.notes)
    config.data.share_prompts = True
    with pytest.raises(ConfigError, match=r"the tokens of an image in gemma3"):
        RunBuilder(config).read()
    config.data.sources = [SourceConfig(path=str(write_picture_pairs(tmp_path / "text", images=False)))]
    RunBuilder(config).read()
