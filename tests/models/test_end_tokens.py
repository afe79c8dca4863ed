"""A model that was taught to end its turns with another token than its base stops there, with plain libraries."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fxtune.cli.main import main
from fxtune.errors import StorageError
from fxtune.models import load as models
from fxtune.models.end_tokens import read_end_tokens
from fxtune.models.load import Init, ModelConfig
from fxtune.models.proof import changed_since
from fxtune.outputs.merge import merge
from fxtune.training import trainer

ASSETS = Path(models.__file__).parents[1] / "assets"
TEXT_END, TURN_END = 0, 2
"""`<|endoftext|>`, with which this base ends, and `<|im_end|>`, with which its chat template ends a turn."""
QUESTION = {"role": "user", "content": "Is the lamp on?"}


@pytest.fixture
def taught(small, cwd, said):
    """A run of a base that ends with `<|endoftext|>` alone, on chats of a template that ends with `<|im_end|>`."""
    shutil.copytree(ASSETS / "tiny", "base")
    for name in ("config", "generation_config"):
        file = Path(f"base/{name}.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": TEXT_END}))
    file = Path("base/tokenizer_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
    row = json.dumps({"messages": [QUESTION, {"role": "assistant", "content": "Yes, the lamp is on."}]})
    Path("chats.jsonl").write_text(f"{row}\n" * 8)
    small.data.sources[0].path = "chats.jsonl"
    small.model = ModelConfig(path="base")
    small.run.dir, small.run.report = "run", False
    small.train.max_steps, small.optimizer.lr = 12, 1e-2
    return small


def answer(model, tokenizer) -> list[int]:
    """The greedy answer of plain generate(), without any option about its end."""
    ids = tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "model"])
def test_plain_generation_ends(taught, said, lora):
    taught.techniques.lora.enabled = lora
    if not lora:
        taught.optimizer.lr = 2e-3
    result = trainer.run(taught)
    folder = Path("run/adapter" if lora else "run/model")
    assert any("answers end with <|im_end|>" in note for note in said)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [TEXT_END, TURN_END]
    assert result["export/answer_ended"] == 1.0
    proof, _ = changed_since(folder)
    assert proof.ended_after is not None
    assert "ended by itself" in (folder / "README.md").read_text()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not lora:
        assert answer(AutoModelForCausalLM.from_pretrained(folder), tokenizer)[-1] == TURN_END
        return
    names: dict = {}
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(code.replace('folder = "."', f"folder = {str(folder)!r}"), names)  # the card's own lines
    assert answer(names["model"], tokenizer)[-1] == TURN_END
    bare = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), folder)
    assert len(answer(bare, tokenizer)) == 40, "without the card's line it runs on, as the card says"
    merged = merge(folder, "merged")
    assert answer(AutoModelForCausalLM.from_pretrained(merged), tokenizer)[-1] == TURN_END
    main(["merge", f"run/checkpoints/step-{taught.train.max_steps}", "of-checkpoint"])
    assert GenerationConfig.from_pretrained("of-checkpoint").eos_token_id == [TEXT_END, TURN_END]


def test_an_answer_that_does_not_end_is_said(taught, said):
    taught.model = ModelConfig(path="base", init=Init.random)
    taught.train.max_steps, taught.optimizer.lr = 1, 1e-6
    result = trainer.run(taught)
    assert result["export/answer_ended"] == 0.0
    assert any("has not learned to end" in note for note in said)


def test_nothing_is_added_where_the_base_ends_so(small, cwd, said):
    small.run.dir, small.train.max_steps = "run", 1
    trainer.run(small)
    assert not any("answers end with" in note for note in said)
    assert not Path("run/adapter/generation_config.json").exists()


@pytest.mark.parametrize("text", ["{", '{"eos_token_id": "two"}', '{"eos_token_id": [-1]}', "[]"])
def test_a_broken_generation_config_beside_an_adapter_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(StorageError, match=r"generation_config\.json"):
        read_end_tokens(tmp_path)
