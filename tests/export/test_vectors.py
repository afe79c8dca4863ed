"""Exports of embedding models: the files of sentence-transformers, and vectors as in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.rows import write_jsonl
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from fxtune.cli.main import main
from fxtune.config.compose import of_run
from fxtune.data.batches.batch import Batch
from fxtune.models.load import starting_from
from fxtune.objectives.language_model import Pool
from fxtune.training.builder import RunBuilder

WORDS = [
    *("objective=embedding", "data.sources=[{path: rows.jsonl}]", "data.sequence_length=128", "data.cache_dir=cache"),
    *("train.global_batch_size=4", "train.micro_batch_size=2", "train.max_steps=1", "optimizer.lr=1e-2"),
    *("objective.instruction='Find: '", "tracking.display=plain", "run.report=false", "run.device=cpu"),
]


@pytest.mark.parametrize("adapters", [True, False])
def test_export_has_the_layout_of_sentence_transformers_and_the_trained_vectors(cwd, adapters):
    """sentence-transformers loads transformer, pooling and prompts from these files; here plain transformers does."""
    write_jsonl(Path("rows.jsonl"), [{"query": f"Where is {n}?", "positive": f"{n} is here."} for n in range(24)])
    assert main([*WORDS, f"techniques.lora.enabled={adapters}", "run.dir=run"]) == 0
    folders = [Path("run/adapter" if adapters else "run/model")]
    if adapters:
        assert main(["merge", "run"]) == 0
        folders.append(Path("run/merged"))
    found = []
    for folder in folders:
        modules = json.loads((folder / "modules.json").read_text())
        assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
        pooling = json.loads((folder / "1_Pooling/config.json").read_text())
        assert [name for name, value in pooling.items() if value is True] == [
            "pooling_mode_lasttoken",
            "include_prompt",
        ]
        prompts = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
        assert prompts == {"query": "Find: ", "document": ""}
        # With an adapter beside a config.json transformers would look for whole weights there.
        assert (folder / "config.json").exists() == (folder.name != "adapter")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        ids = tokenizer(prompts["query"] + "Where is order 3?", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found.append(F.normalize(model(input_ids=ids).last_hidden_state[0, -1], dim=0))
    config = of_run(Path("run"))
    builder = RunBuilder(replace(config, model=starting_from(config.model, folders[0])))
    model, _ = builder.proven_model()
    row = ids, torch.full_like(ids, -100), torch.arange(ids.shape[1])[None]
    starts, none = torch.tensor([0, ids.shape[1]], dtype=torch.int32), torch.tensor([0])
    with torch.no_grad():
        ours = F.normalize(model.vectors(Batch(*row, starts, none, none, tokens=ids.shape[1]), Pool.last)[0], dim=0)
    assert torch.allclose(ours, found[0], atol=1e-5)
    assert torch.allclose(ours, found[-1], atol=0.02)  # the merged weights are rounded to the bfloat16 of the base


def test_the_card_of_an_adapter_that_sentence_transformers_cannot_read_says_so(cwd):
    write_jsonl(Path("rows.jsonl"), [{"query": f"Where is {n}?", "positive": f"{n} is here."} for n in range(24)])
    for folder, tokens in (("plain", []), ("more", ["model.add_tokens=['<x>']"])):
        assert main([*WORDS, "techniques.lora.enabled=true", f"run.dir={folder}", *tokens]) == 0
        has_config = Path(folder, "adapter/config.json").exists()
        assert has_config == bool(tokens) == ("fxtune merge" in Path(folder, "adapter/README.md").read_text())
