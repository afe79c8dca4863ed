"""Layers for multi-token prediction: which tensors of a checkpoint belong to them, and what an export copies."""

from __future__ import annotations

import pytest
import torch
from support.hybrids import hybrid, tensors

from fxtune.distributed.world import World
from fxtune.errors import StorageError
from fxtune.export.save import save_model
from fxtune.models import load as models
from fxtune.models.load import ModelConfig

PREDICTS = {"mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight", "mtp.norm.weight"}
OTHERS = {"model.visual.blocks.0.norm1.weight", "model.visual.merger.norm.weight"}


def test_an_export_copies_prediction_layers_and_nothing_else_that_transformers_passes_over(tmp_path):
    hybrid("qwen3_5_text", tmp_path / "base", 2, {name: torch.randn(3) for name in PREDICTS | OTHERS})
    model = ModelConfig(str(tmp_path / "base"), tokenizer="builtin:tiny")
    built = models.build(model, models.load_config(model), World(torch.device("cpu")), seed=0)
    assert built.mtp.keys() == PREDICTS
    tokenizer = models.load_tokenizer(model)
    before, after = tensors(tmp_path / "base"), tensors(save_model(built, tokenizer, tmp_path / "copy"))
    assert before.keys() - after.keys() == OTHERS
    assert all(torch.equal(before[name], after[name]) for name in PREDICTS)
    for file in built.mtp.values():
        file.unlink(missing_ok=True)
    with pytest.raises(StorageError, match="multi-token prediction cannot be read"):
        save_model(built, tokenizer, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("rows", "copied"), [(1024, False), (7, True)])
def test_prediction_layers_that_embed_the_old_vocabulary_are_left_out_of_a_grown_model(rows, copied, tmp_path):
    extra = {"mtp.embed_tokens.weight": torch.randn(rows, 4)}
    hybrid("qwen3_5_text", tmp_path / "base", 1, extra, {"vocab_size": 1024})
    model = ModelConfig(str(tmp_path / "base"), tokenizer="builtin:tiny", add_tokens=["<|new|>"])
    built = models.build(model, models.load_config(model), World(torch.device("cpu")), seed=0)
    assert built.grown_from == 1024
    assert bool(built.mtp) == copied
