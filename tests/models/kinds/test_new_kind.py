"""A new kind of model is one file (support/pooled.py) and one entry of KINDS: nothing else knows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.cases import slow_but
from support.rows import write_jsonl
from support.runs import losses
from transformers import AutoModel, AutoTokenizer

from fxtune.cli.main import main
from fxtune.models.kinds import known

FILE = Path(__file__).parents[2] / "support/pooled.py"
WORDS = [
    "--plugin",
    str(FILE),
    "objective=together",
    "model.path=null",
    "model.tokenizer=builtin:tiny",
    "model.init=random",
    "model.architecture={model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2}",
    "data.sources=[{path: pairs.jsonl}]",
    "data.sequence_length=64",
    "data.eval_fraction=0.2",
    "train.eval_every=2",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "optimizer.lr=1e-2",
    "schedule.name=constant",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]


@pytest.fixture
def pairs(cwd, monkeypatch):
    import fxtune.plugins as plugins

    with plugins.files_used([FILE]):  # the module that holds the kind is the plugin
        import sys

        kind = sys.modules["fxtune_plugin_pooled"].Pooler()
    monkeypatch.setattr(known, "KINDS", (kind, *known.KINDS))
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rows = [
        {"prompt": f"{words[at % 8]} {at}", "chosen": words[at % 7], "rejected": words[at % 5] + " no"}
        for at in range(48)
    ]
    write_jsonl(Path("pairs.jsonl"), rows)


@pytest.mark.parametrize("adapters", slow_but([True, False], False))
def test_a_new_kind_trains_resumes_plans_and_is_exported_and_verified(pairs, adapters):
    words = [*WORDS, f"techniques.lora.enabled={str(adapters).lower()}"]
    assert main(["plan", *words, "train.max_steps=6", "--gpu", "H200", "--json", "plan.json"]) == 0
    assert main(["verify", *words, "train.max_steps=6"]) == 0
    assert main([*words, "train.max_steps=6", "run.dir=whole"]) == 0
    assert main([*words, "train.max_steps=3", "run.dir=parts"]) == 0
    assert main([*words, "train.max_steps=6", "run.dir=parts"]) == 0
    assert losses(Path("whole")) == losses(Path("parts"))
    assert losses(Path("whole"))[-1] < losses(Path("whole"))[0]
    if adapters:
        assert Path("whole/adapter/adapter_model.safetensors").exists()
        return
    (folder,) = {file.parent for file in Path("whole").rglob("model.safetensors")}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaModel"]
    ids = AutoTokenizer.from_pretrained(folder)("one 0", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert AutoModel.from_pretrained(folder)(ids)[0].isfinite().all()
