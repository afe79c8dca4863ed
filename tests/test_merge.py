"""Merging: one model with the adapter's logits, loaded by plain transformers; nothing is ever written over."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from architectures import ADAPTERS, built, logits, lora, on_disk, random_model, trained

from fxtune.commands.merge import merge, run
from fxtune.config import Config
from fxtune.errors import ConfigError, StorageError
from fxtune.model import DType, ModelConfig, load_tokenizer, save
from fxtune.techniques.rope import Rope


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("merge") / "base")


def adapted(base, folder, dtype=DType.float32, scaled=False, **options):
    model, pipeline = ModelConfig(path=str(base), dtype=dtype), lora(**options)
    pipeline.rope = Rope(enabled=scaled, factor=4.0)
    mine = trained(built(pipeline, model, dtype=dtype.value))
    return mine, save(mine, load_tokenizer(model), folder)


def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_merged_model_has_the_adapter_s_logits(kind, base, tmp_path):
    mine, adapter = adapted(base, tmp_path / "adapter", **ADAPTERS[kind])
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.dtype is torch.float32
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)
    assert not [name for name in merged.state_dict() if "lora" in name or "base_layer" in name]


def test_adapters_on_a_mixture_s_experts_are_merged_too(tmp_path):
    base = on_disk(tmp_path / "base", model_type="mixtral", num_local_experts=4)
    mine, adapter = adapted(base, tmp_path / "adapter")
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert not torch.equal(merged.model.layers[0].mlp.experts.down_proj, plain(base).model.layers[0].mlp.experts.down_proj)
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)


@pytest.mark.parametrize("trained_in", [DType.float32, DType.bfloat16])
def test_over_a_base_stored_in_bfloat16_it_is_rounded_once(trained_in, tmp_path):
    base = on_disk(tmp_path / "half", dtype=torch.bfloat16)
    mine, adapter = adapted(base, tmp_path / "adapter", trained_in)
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.dtype is torch.bfloat16
    assert (logits(merged) - logits(mine)).abs().max() < 2**-7 * logits(mine).abs().max() * 4
    layer = mine.get_base_model().model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    assert torch.equal(merged.model.layers[0].mlp.up_proj.weight, exact.bfloat16())


def test_scaled_rope_and_the_tokenizer_come_along(base, tmp_path):
    from transformers import AutoTokenizer

    mine, adapter = adapted(base, tmp_path / "adapter", scaled=True)
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.config.rope_parameters["rope_type"] == "yarn"
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").pad_token == "t1"
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"| merged from | {adapter} |" in card
    assert "peft" not in card
    assert len({file.stat().st_mode for file in (tmp_path / "merged").iterdir()}) == 1, "readable by all or by none"


def test_tied_weights_stay_tied(tmp_path):
    mine, adapter = adapted(on_disk(tmp_path / "base", tie_word_embeddings=True), tmp_path / "adapter")
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)


def test_the_recipe_s_newest_run_is_merged_beside_its_adapter(base, cwd):
    for name in ("mine", "mine-2", "mine-two"):
        adapted(base, cwd / "runs" / name / "adapter")
    shutil.rmtree(cwd / "runs" / "mine-2" / "adapter")
    config = Config()
    config.run.name = "mine"
    assert run(config).resolve() == cwd / "runs" / "mine" / "merged"
    with pytest.raises(StorageError, match="merged exists"):
        run(config)
    config.run.dir = str(cwd / "runs" / "mine-two")
    assert run(config) == cwd / "runs" / "mine-two" / "merged"
    config.run.dir = str(cwd / "runs" / "mine-2")
    with pytest.raises(ConfigError, match="No adapter lies in"):
        run(config)


def test_what_cannot_be_merged_leaves_no_folder(base, tmp_path):
    _, adapter = adapted(base, tmp_path / "adapter")
    out = tmp_path / "out"
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="never writes over"):
        merge(adapter, tmp_path / "taken")
    with pytest.raises(ConfigError, match="is no PEFT adapter"):
        merge(base, out)
    with pytest.raises(ConfigError, match="no such folder"):
        merge(tmp_path / "nowhere", out)
    description = json.loads((adapter / "adapter_config.json").read_text())
    for number, (changes, error, message) in enumerate((
            ({"base_model_name_or_path": str(tmp_path / "gone")}, ConfigError, "no such folder"),
            ({"base_model_name_or_path": None}, ConfigError, "names no base model"),
            ({"r": 8}, StorageError, "another shape"),
            ({"target_modules": ["q_proj"]}, StorageError, "no place in the model"),
            ({"peft_type": "IA3"}, ConfigError, "IA3 adapter"))):
        changed = tmp_path / f"changed-{number}"
        shutil.copytree(adapter, changed)
        (changed / "adapter_config.json").write_text(json.dumps({**description, **changes}))
        with pytest.raises(error, match=message):
            merge(changed, out)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(StorageError, match="cannot be read"):
        merge(adapter, out)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors is missing"):
        merge(adapter, out)
    assert not out.exists()


def test_an_adapter_of_random_weights_has_no_base(tmp_path):
    adapter = save(built(lora(), random_model("llama")), load_tokenizer(ModelConfig(path=str(on_disk(tmp_path / "base")))),
                   tmp_path / "adapter")
    with pytest.raises(ConfigError, match="names no base model"):
        merge(adapter, tmp_path / "out")
