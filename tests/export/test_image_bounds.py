from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import transformers
from packaging.version import Version
from support import processors
from support.architectures import CPU
from support.processors import image_ids
from transformers import AutoImageProcessor

from fxtune.data.config import DataConfig, ImageTokensConfig
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, build, load_config, load_tokenizer
from fxtune.settle.images import image_processor


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24") and not find_spec("torchvision"),
    reason="this AutoImageProcessor needs torchvision",
)
@pytest.mark.parametrize("written_as", ["size", "min_pixels", "processor_config.json"])
def test_a_whole_model_shows_images_as_large_as_in_training(tmp_path, written_as):
    model = ModelConfig(path=str(processors.write_model("qwen2_5_vl", tmp_path / "base")), dtype=DType.float32)
    file = tmp_path / "base" / "preprocessor_config.json"
    values = json.loads(file.read_text())
    if written_as == "min_pixels":
        size = values.pop("size")
        values |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        file.write_text(json.dumps(values))
    elif written_as == "processor_config.json":
        values = {"image_processor": values, "processor_class": "Qwen2_5_VLProcessor"}
        file.unlink()
        file = file.with_name(written_as)
        file.write_text(json.dumps(values))
    tokenizer = load_tokenizer(model)
    bounded = image_processor(model, DataConfig(image_tokens=ImageTokensConfig(max=9)), tokenizer)
    free = image_processor(model, DataConfig(), tokenizer)
    assert len(image_ids(free, 600, 800)) > len(image_ids(bounded, 600, 800))
    built = build(model, load_config(model), CPU, seed=0)
    card = {"config": {"data": {"image_tokens": {"min": None, "max": 9}}}}
    whole = save_model(built, tokenizer, tmp_path / "whole", card)
    served = image_processor(ModelConfig(path=str(whole)), DataConfig(), tokenizer)
    for size in ((600, 800), (8, 8)):
        assert image_ids(served, *size) == image_ids(bounded, *size)
    written = AutoImageProcessor.from_pretrained(whole, backend="pil").size
    assert dict(written) == dict(bounded.processor.image_processor.size)
    assert "data.image_tokens" not in (whole / "README.md").read_text()
    assert json.loads(file.read_text()) == values, "the base is as it was"
