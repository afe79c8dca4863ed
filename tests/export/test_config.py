"""config.json of an export: RoPE for transformers 4 and 5; and transformers 4.57 itself reads an export."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from support.architectures import CPU, lora, prepared_model, trained

from fxtune.export.config import versions_of_readers, write_rope_for_4
from fxtune.export.save import save_model
from fxtune.models.load import DType, Init, ModelConfig, build, load_config, load_tokenizer
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.rope import Rope

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def written(folder, **values):
    from transformers import CONFIG_MAPPING, AutoConfig

    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    config.save_pretrained(folder)
    write_rope_for_4(folder, config)
    assert AutoConfig.from_pretrained(folder).to_dict() == {**config.to_dict(), "_name_or_path": str(folder)}
    return json.loads((folder / "config.json").read_text())


def test_theta_and_scaling_stand_where_both_versions_read_them(tmp_path):
    found = written(tmp_path, model_type="llama", rope_parameters=LLAMA3)
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"] == 500000.0
    assert found["rope_scaling"] == {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    assert "4.57" in versions_of_readers(tmp_path)


def test_a_model_without_scaling_gets_theta_alone(tmp_path):
    found = written(tmp_path, model_type="qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert found["rope_theta"] == 1e6
    assert "rope_scaling" not in found


def test_layers_of_two_kinds_have_both_of_their_thetas(tmp_path):
    kinds = {"full_attention": 1e6, "sliding_attention": 1e4}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()}
    found = written(tmp_path, model_type="gemma3_text", rope_parameters=rope)
    assert (found["rope_theta"], found["rope_local_base_freq"]) == (1e6, 1e4)


def test_a_family_that_keeps_the_keys_as_something_else_is_for_transformers_5_alone(tmp_path):
    found = written(tmp_path, model_type="gpt_neox")
    assert "rope_theta" not in found
    assert versions_of_readers(tmp_path) == "transformers 5"


def test_files_that_prepare_images_are_in_the_export(copy, tmp_path):
    (copy / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    model = ModelConfig(path=str(copy))
    folder = save_model(build(model, load_config(model), CPU, seed=0), load_tokenizer(model), tmp_path / "whole")
    adapter = save_model(prepared_model(lora(), model), load_tokenizer(model), tmp_path / "adapter")
    assert (folder / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    assert not (adapter / "preprocessor_config.json").exists()


READER = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__.startswith("4.57"), transformers.__version__
folder, text = sys.argv[1:3]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
ids = torch.tensor([tokenizer(text)["input_ids"]])
with torch.no_grad():
    logits = model(input_ids=ids).logits
chat = [{"role": "user", "content": "hi"}]
prompt = tokenizer.apply_chat_template(chat, tokenize=False) if tokenizer.chat_template else ""
special = [tokenizer.eos_token, sorted(tokenizer.all_special_tokens)]
print(json.dumps({"ids": ids.tolist(), "logits": logits.tolist(), "prompt": prompt, "special": special}))
"""


@pytest.fixture(scope="module")
def transformers_4(tmp_path_factory):
    """A folder with transformers 4.57 and what it needs in other versions; the rest is this environment's."""
    folder = tmp_path_factory.mktemp("transformers-4")
    wanted = ["transformers==4.57.*", "tokenizers<0.23", "huggingface_hub<1"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install transformers 4.57 here: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "scaled", "added token"])
def test_transformers_4_computes_what_was_trained(transformers_4, tmp_path, case):
    """Random weights with a RoPE theta that is not the default of transformers 4."""
    from fxtune.techniques.lora.technique import Lora

    theta = {"rope_theta": 500000.0, "rope_type": "default"}
    model = ModelConfig(
        init=Init.random, dtype=DType.float32, architecture={"rope_parameters": theta, "num_hidden_layers": 2}
    )
    pipeline = Pipeline(rope=Rope(enabled=case == "scaled", factor=4.0), lora=Lora(enabled=False))
    prepared = prepared_model(pipeline, model, dtype="float32")
    tuned = trained(prepared.module)
    tokenizer = load_tokenizer(model)
    if case == "added token":
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<tool>"]})
    folder = save_model(prepared, tokenizer, tmp_path / "export")
    assert "4.57" in (folder / "README.md").read_text()
    text = "Two <|im_start|>large pizzas, " * 40
    environment = {**os.environ, "PYTHONPATH": str(transformers_4), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder), text], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ids = tokenizer(text)["input_ids"]
    assert found["ids"] == [ids]
    assert found["special"] == [tokenizer.eos_token, sorted(tokenizer.all_special_tokens)]
    chat = [{"role": "user", "content": "hi"}]
    assert found["prompt"] == tokenizer.apply_chat_template(chat, tokenize=False)
    with torch.no_grad():
        wanted = tuned(input_ids=torch.tensor([ids])).logits
    assert (torch.tensor(found["logits"]) - wanted).abs().max() < 1e-3 * wanted.abs().max()
