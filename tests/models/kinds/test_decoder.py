"""The parts of a decoder of text, with towers beside it or without."""

from __future__ import annotations

import pytest
import torch
from support.architectures import tiny_model
from support.decoder_sizes import decoder_sizes
from transformers import AutoModelForCausalLM, Gemma3Config

from fxtune.models.kinds.known import kind_of
from fxtune.models.load import load_config

GEMMA3 = {
    "text_config": {
        **decoder_sizes(32, 48, layers=2, heads=4, key_heads=2, head_dim=8, vocabulary=96),
        "pad_token_id": 0,
    },
    "vision_config": {
        **decoder_sizes(16, 16, layers=1, heads=2),
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_small_row_runs_and_head_after_backbone_gives_the_logits(family):
    model = AutoModelForCausalLM.from_config(load_config(tiny_model(family))).eval()
    kind = kind_of(model.config)
    row = kind.small_row(model, 9)
    assert row["input_ids"].shape == (1, 9)
    with torch.no_grad():
        hidden = kind.backbone(model)(**row)[0]
        assert torch.equal(model.get_output_embeddings()(hidden), model(**row).logits)
    assert len(kind.layers(model)) == model.config.num_hidden_layers
    assert kind.untrained_parts(model.config) == ""


def test_text_model_of_a_checkpoint_with_a_tower_is_the_decoder(tmp_path):
    config = Gemma3Config(**GEMMA3)
    model = AutoModelForCausalLM.from_config(config)
    kind = kind_of(config)
    assert len(kind.layers(model)) == 2
    assert not any("vision" in name for name, _ in kind.backbone(model).named_modules())
    assert "vision encoder and projector stay" in kind.untrained_parts(config)


def test_files_that_prepare_images_go_with_an_export(tmp_path):
    base, export = tmp_path / "base", tmp_path / "export"
    for folder in (base, export):
        folder.mkdir()
    config = Gemma3Config(**GEMMA3)
    config.save_pretrained(base)
    (base / "preprocessor_config.json").write_text("{}")
    config.name_or_path = str(base)
    kind_of(config).write_beside(config, export)
    assert [file.name for file in export.iterdir()] == ["preprocessor_config.json"]

    other = tmp_path / "other"
    other.mkdir()
    kind_of(config).write_beside(config, export, other)
    assert (export / "preprocessor_config.json").read_text() == "{}"
    (other / "preprocessor_config.json").write_text('{"do_resize": false}')
    kind_of(config).write_beside(config, export, other)
    assert (export / "preprocessor_config.json").read_text() == '{"do_resize": false}'
