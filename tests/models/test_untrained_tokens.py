"""Special tokens whose rows the base has never trained are found, and a run names them with the key that trains them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fxtune.models import load as models
from fxtune.models.load import ModelConfig
from fxtune.models.untrained_tokens import untrained_rows
from fxtune.training import trainer

ASSETS = Path(models.__file__).parents[1] / "assets"
START, END = 1, 2


def base(tied: bool):
    """The built-in model, frozen, its head apart from its embedding unless `tied`."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny")
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model.requires_grad_(False)


@pytest.mark.parametrize("tied", [True, False])
def test_zero_and_equal_rows_are_found_in_both_tables(tied):
    model = base(tied)
    assert untrained_rows(model, [START, END, 7]) == {}
    model.model.embed_tokens.weight[START] = 0
    assert untrained_rows(model, [START, END, 7]) == {"embed_tokens": [START]}
    model.model.embed_tokens.weight[START] = model.model.embed_tokens.weight[9]
    model.lm_head.weight[END] = 0
    head = {} if tied else {"lm_head": [END]}
    assert untrained_rows(model, [START, END, 7]) == {"embed_tokens": [START, END] if tied else [START], **head}
    model.requires_grad_(True)
    assert untrained_rows(model, [START, END]) == {}, "trained rows need no word"


@pytest.mark.parametrize("tied", [True, False])
def test_a_run_names_them(small, cwd, said, tied):
    shutil.copytree(ASSETS / "tiny", "base")
    model = base(tied)
    model.model.embed_tokens.weight[START] = 0
    model.save_pretrained("base")
    small.model, small.run.dir, small.train.max_steps = ModelConfig(path="base"), "run", 1
    trainer.run(small)
    (note,) = [note for note in said if "never trained" in note]
    assert "<|im_start|>" in note
    assert "<|im_end|>" not in note.partition(":")[0]
    assert "techniques.lora.train_tokens=auto" in note
    if not tied:
        small.techniques.lora.modules_to_save, small.run.dir = ["embed_tokens"], "trained"
        del said[:]
        trainer.run(small)
        assert not any("never trained" in note for note in said)
