"""Added tokens: tokenizer, embedding and head grow; their rows are trained, exported, merged and served by plain transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.architectures import built, logits, lora, on_disk, prepared_model
from support.cases import slow_but
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.cli import verify
from fxtune.errors import ConfigError
from fxtune.models import load as models
from fxtune.models.load import ModelConfig, load_config, load_tokenizer, starting_from
from fxtune.outputs.merge import merge
from fxtune.techniques.pipeline import make_probe
from fxtune.training import trainer

ASSETS = Path(models.__file__).parents[1] / "assets"
NEW = ["<|yes|>", "<|no|>"]
BOTH = pytest.mark.parametrize("tied", slow_but([True, False], False))


@pytest.fixture
def growing(small, cwd, request):
    """A run on short answers that are one added token each."""
    shutil.copytree(ASSETS / "tiny", "base")
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    if "False" in request.node.name:  # tied=False
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained("base")
    rows = [{"text": f"{word}<|yes|>"} for word in ("red", "lamp", "oslo")] * 3
    Path("texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small.model = ModelConfig(path="base", add_tokens=NEW)
    small.data.sources[0].path, small.run.dir = "texts.jsonl", "run"
    small.optimizer.lr, small.train.max_steps = 1e-2, 30
    return small


def tables(folder: Path | str) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


def next_token(model, tokenizer) -> str:
    ids = tokenizer("lamp", return_tensors="pt")
    return tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0, ids["input_ids"].shape[1] :])


@BOTH
def test_an_adapter_learns_a_new_token_and_its_export_loads_as_its_card_says(growing, cwd, said, tied):
    trainer.run(growing)
    assert any("<|yes|> (1024), <|no|> (1025); the embedding and the head grow from 1,024" in note for note in said)
    assert any("model.add_tokens: no document has <|no|>" in note for note in said)
    options = json.loads(Path("run/adapter/adapter_config.json").read_text())
    assert options["trainable_token_indices"] == (
        [1024, 1025] if tied else {"embed_tokens": [1024, 1025], "lm_head": [1024, 1025]}
    )
    card = Path("run/adapter/README.md").read_text()
    names: dict = {}
    code = card.partition("```python\n")[2].partition("```")[0].replace('folder = "."', 'folder = "run/adapter"')
    exec(code, names)
    plain, tokenizer = names["model"], names["tokenizer"]
    assert next_token(plain, tokenizer) == "<|yes|>"
    merge("run/adapter", "merged")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    assert next_token(merged, AutoTokenizer.from_pretrained("merged")) == "<|yes|>"
    assert merged.config.vocab_size == 1088
    torch.testing.assert_close(logits(merged), logits(plain), rtol=1e-5, atol=1e-4)
    for base, table in zip(tables("base"), tables("merged"), strict=True):
        assert torch.equal(table[:1024], base)
        torch.testing.assert_close(table[1026], base.mean(0))  # a spare row stays as it began
        assert not torch.equal(table[1024], table[1026])
    further = replace(
        growing, run=replace(growing.run, dir="further"), model=replace(growing.model, adapter="run/adapter")
    )
    trainer.run(further)
    out = merge("run/checkpoints/step-30", unmerged=True)
    assert (out / "adapter_model.safetensors").read_bytes() == Path(
        "run/adapter/adapter_model.safetensors"
    ).read_bytes()


def test_a_step_has_the_loss_and_the_gradients_of_plain_transformers(growing, cwd, capsys):
    seen = verify.run(growing, loss=True)
    assert len(seen["loss"]) > 1, "verify raises unless each variant is within its bounds"
    assert any("rows of 2 tokens are trained as peft trains them" in found["asked"] for found in seen["evidence"])


def test_full_fine_tuning_trains_a_new_token_and_exports_the_grown_model(growing, cwd):
    growing.techniques.lora.enabled, growing.optimizer.lr = False, 1e-3
    trainer.run(growing)
    model, tokenizer = AutoModelForCausalLM.from_pretrained("run/model"), AutoTokenizer.from_pretrained("run/model")
    assert next_token(model, tokenizer) == "<|yes|>"
    again = starting_from(growing.model, "run/model")
    assert load_tokenizer(again).get_vocab() == tokenizer.get_vocab()


@BOTH
def test_a_paused_run_has_the_same_bits(growing, cwd, tied):
    growing.train.max_steps, growing.train.pause_after = 4, 2
    trainer.run(growing)
    growing.train.pause_after = None
    trainer.run(growing)
    trainer.run(replace(growing, run=replace(growing.run, dir="whole")))
    adapters = [Path(run, "adapter/adapter_model.safetensors").read_bytes() for run in ("run", "whole")]
    assert adapters[0] == adapters[1]


def test_spare_rows_of_the_base_are_used(tmp_path):
    """Qwen embeds more tokens than its tokenizer has."""
    folder = on_disk(tmp_path / "base", vocab_size=160)
    model = ModelConfig(path=str(folder), add_tokens=NEW)
    assert load_config(model).vocab_size == 160
    assert [load_tokenizer(model).get_vocab()[token] for token in NEW] == [128, 129]
    pipeline = lora()
    prepared = prepared_model(pipeline, model)
    mine = prepared.module
    pipeline.prove(prepared, make_probe(mine))
    assert pipeline.lora.token_ids == [128, 129]
    assert not prepared.config_edited


def test_tokens_that_cannot_be_added_are_refused(tmp_path):
    folder = on_disk(tmp_path / "base")
    for tokens, message in ((["t5"], "has the token t5 already"), (NEW[:1] * 2, "named twice"), ([" "], "no token")):
        with pytest.raises(ConfigError, match=message):
            load_config(ModelConfig(path=str(folder), add_tokens=tokens))
    larger = load_tokenizer(ModelConfig(path=str(folder), add_tokens=NEW))
    larger.save_pretrained(tmp_path / "larger")
    model = ModelConfig(path=str(folder), tokenizer=str(tmp_path / "larger"))
    with pytest.raises(ConfigError, match=r'model\.add_tokens=\["<\|yes\|>","<\|no\|>"\]'):
        load_tokenizer(model)
    grown = replace(model, add_tokens=NEW)
    assert load_tokenizer(grown).get_vocab() == larger.get_vocab()
    assert load_config(grown).vocab_size == 192
    with pytest.raises(ConfigError, match="modules_to_save already trains lm_head"):
        built(lora(modules_to_save=["lm_head"]), grown)
