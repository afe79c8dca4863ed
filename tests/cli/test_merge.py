"""`fxtune merge`: one model with the adapter's logits, which plain transformers loads; nothing is ever overwritten.

For weights that are not finite and for disks, see tests/faults/test_adapters.py."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support.architectures import ADAPTERS, logits, lora, on_disk, prepared_model, trained
from support.cases import slow_but

from fxtune.cli.merge import run
from fxtune.config.root import Config
from fxtune.errors import ConfigError, StorageError
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.outputs.merge import merge
from fxtune.techniques.rope import Rope


def adapted(base, folder, dtype=DType.float32, scaled=False, **options):
    model, pipeline = ModelConfig(path=str(base), dtype=dtype), lora(**options)
    pipeline.rope = Rope(enabled=scaled, factor=4.0)
    prepared = prepared_model(pipeline, model, dtype=dtype.value)
    mine = trained(prepared.module)
    return mine, save_model(prepared, load_tokenizer(model), folder)


def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


PEFT_ONLY = {  # adapters that peft saves and no recipe of fxtune does: config of the base, options of LoraConfig
    "regular expression": ({}, {"target_modules": r".*\.1\..*\.(q|k)_proj"}),
    "patterns": ({}, {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}}),
    "some layers": ({}, {"layers_to_transform": [1]}),
    "rsLoRA with DoRA": ({}, {"use_rslora": True, "use_dora": True}),
    "full modules": ({}, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "biases": ({"model_type": "qwen2", "vocab_size": 160}, {"bias": "all"}),
    "biases of the adapter": ({"model_type": "qwen2", "vocab_size": 160}, {"lora_bias": True}),
    "parameters": ({}, {"target_parameters": ["q_proj.weight"], "target_modules": []}),
    "embedding": ({}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": ({}, {"target_modules": ["lm_head", "q_proj"]}),
    "tokens": ({}, {"trainable_token_indices": [3, 46, 70]}),
    "tied embedding": ({"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied head": ({"tie_word_embeddings": True}, {"target_modules": ["lm_head", "q_proj"]}),
    "tied full head": ({"tie_word_embeddings": True}, {"modules_to_save": ["lm_head"]}),
    "tied tokens": ({"tie_word_embeddings": True}, {"trainable_token_indices": [3, 46, 70]}),
}


def by_peft(base, folder, **options):
    """An adapter made and saved by peft alone, and the model with it."""
    import peft

    torch.manual_seed(3)
    described = peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    )
    model = peft.get_peft_model(plain(base), described)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "kind",
    slow_but(
        PEFT_ONLY, "regular expression", "rsLoRA with DoRA", "biases", "parameters", "tied embedding", "tied full head"
    ),
)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_peft_saved_is_merged_as_peft_runs_it(kind, tmp_path):
    base, options = PEFT_ONLY[kind]
    theirs = by_peft(on_disk(tmp_path / "base", **base), tmp_path / "adapter", **options)
    merged = plain(merge(tmp_path / "adapter", tmp_path / "merged"))
    expected = logits(theirs)
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5)
    assert (expected - logits(plain(tmp_path / "base"))).abs().max() > 1e-3, "the adapter has an effect"
    tied = merged.lm_head.weight is merged.get_input_embeddings().weight
    assert merged.config.tie_word_embeddings == tied


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_saved_with_weights_of_another_base_is_refused(tmp_path):
    """peft saves an embedding that has an adapter, and both ends of a model whose vocabulary was resized."""
    by_peft(on_disk(tmp_path / "base"), tmp_path / "adapter", target_modules=["embed_tokens"])
    for vocabulary in (128, 130):
        shutil.rmtree(tmp_path / "base")
        other = plain(on_disk(tmp_path / "base", vocab_size=vocabulary))
        with torch.no_grad():
            other.model.embed_tokens.weight[5] += 1
        other.save_pretrained(tmp_path / "base")
        with pytest.raises(StorageError, match=r"1 of them are not this base's.*embed_tokens"):
            merge(tmp_path / "adapter", tmp_path / "merged")


REFUSED = {  # changes of adapter_config.json, the error, its message
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, ConfigError, "is an aLoRA adapter .*alora_invocation_tokens"),
    "random start": ({"init_lora_weights": "pissa_niter_4"}, ConfigError, "cannot be computed again from the base"),
    "unknown option": ({"some_new_key": True}, ConfigError, r"options that peft \S+ does not know .*: some_new_key\."),
    "no type": ({"peft_type": None}, StorageError, "does not say what kind of adapter it is"),
    "unknown type": ({"peft_type": "MAGIC"}, ConfigError, "is a MAGIC adapter"),
    "infinity": ({"lora_alpha": 1e39}, ConfigError, r"lora_alpha=1e\+39 is no number to scale"),
    "NaN of one module": (
        {"alpha_pattern": {"q_proj": float("nan")}},
        ConfigError,
        r"alpha_pattern\.q_proj=nan is no number",
    ),
    "number for a table": ({"rank_pattern": 3}, ConfigError, "rank_pattern=3 is not a table"),
    "number for names": ({"target_modules": 3}, ConfigError, "target_modules=3 is not a list of names"),
    "unknown bias": ({"bias": "some"}, ConfigError, "does not fit its base: .*some"),
    "list of modules": (
        {"target_modules": ["layers"]},
        ConfigError,
        r"Target module ModuleList\(.* \.\.\. .*supported",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_options_of_an_adapter_are_refused(what, base, tmp_path):
    changes, error, message = REFUSED[what]
    by_peft(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(error, match=message) as caught:
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert len(str(caught.value)) < 1500
    assert not (tmp_path / "merged").exists()


def test_an_unknown_option_that_is_off_is_ignored(base, tmp_path):
    by_peft(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "some_new_key": False, "another": None}))
    assert (merge(tmp_path / "adapter", tmp_path / "merged") / "model.safetensors").exists()


@pytest.mark.filterwarnings("ignore")
def test_what_peft_cannot_merge_is_an_error(base, tmp_path):
    by_peft(base, tmp_path / "adapter", lora_bias=True)
    with pytest.raises(ConfigError, match=r"base layer has no bias"):
        merge(tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("kind", slow_but(ADAPTERS, "lora", "dora", "pissa", "head", "embedding"))
def test_a_merged_model_has_the_adapter_s_logits(kind, base, tmp_path):
    mine, adapter = adapted(base, tmp_path / "adapter", **ADAPTERS[kind])
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.dtype is torch.float32
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)
    assert not [name for name in merged.state_dict() if "lora" in name or "base_layer" in name]


def test_adapters_on_experts_are_merged(tmp_path):
    base = on_disk(tmp_path / "base", model_type="mixtral", num_local_experts=4)
    mine, adapter = adapted(base, tmp_path / "adapter")
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert not torch.equal(
        merged.model.layers[0].mlp.experts.down_proj, plain(base).model.layers[0].mlp.experts.down_proj
    )
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)


@pytest.mark.parametrize("trained_in", [DType.float32, DType.bfloat16])
def test_the_sum_is_rounded_once_to_a_bfloat16_base(trained_in, tmp_path):
    base = on_disk(tmp_path / "half", dtype=torch.bfloat16)
    mine, adapter = adapted(base, tmp_path / "adapter", trained_in)
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.dtype is torch.bfloat16
    assert (logits(merged) - logits(mine)).abs().max() < 2**-7 * logits(mine).abs().max() * 4
    layer = mine.get_base_model().model.layers[0].mlp.up_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default").float()
    assert torch.equal(merged.model.layers[0].mlp.up_proj.weight, exact.bfloat16())


def test_scaled_rope_and_the_tokenizer_are_kept(base, tmp_path):
    from transformers import AutoTokenizer

    mine, adapter = adapted(base, tmp_path / "adapter", scaled=True)
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.config.rope_parameters["rope_type"] == "yarn"
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "t1"
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"| merged from | {adapter} |" in card
    assert "peft" not in card
    assert len({file.stat().st_mode for file in (tmp_path / "merged").iterdir()}) == 1, (
        "all files have the same permissions"
    )


def test_tied_weights_stay_tied(tmp_path):
    mine, adapter = adapted(on_disk(tmp_path / "base", tie_word_embeddings=True), tmp_path / "adapter")
    merged = plain(merge(adapter, tmp_path / "merged"))
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(logits(merged), logits(mine), rtol=0, atol=1e-5)


def test_the_newest_run_of_the_recipe_is_merged_into_its_folder(base, cwd):
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
    with pytest.raises(ConfigError, match="No adapter in"):
        run(config)
    (cwd / "runs" / "mine-2" / "model").mkdir()
    with pytest.raises(ConfigError, match=r"mine-2/model was trained without adapters"):
        run(config)


def test_a_run_name_is_not_read_as_a_pattern(base, cwd):
    adapted(base, cwd / "runs" / "a[1]" / "adapter")
    config = Config()
    config.run.name = "a[1]"
    assert run(config).resolve() == cwd / "runs" / "a[1]" / "merged"


def test_a_failed_merge_leaves_no_folder(base, tmp_path):
    _, adapter = adapted(base, tmp_path / "adapter")
    out = tmp_path / "out"
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError, match="never writes over"):
        merge(adapter, tmp_path / "taken")
    with pytest.raises(ConfigError, match="without adapters"):
        merge(base, out)
    with pytest.raises(ConfigError, match=r"there is no run `.*nowhere`"):
        merge(tmp_path / "nowhere", out)
    description = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "proof.json").unlink()
    for number, (changes, error, message) in enumerate(
        (
            ({"base_model_name_or_path": str(tmp_path / "gone")}, ConfigError, "no such folder"),
            ({"base_model_name_or_path": None}, ConfigError, "names no base model"),
            ({"r": 8}, StorageError, "another shape"),
            ({"target_modules": ["q_proj"]}, StorageError, "no place in the model"),
        )
    ):
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


@pytest.mark.parametrize("dtype", ["float64", {"": "float32"}], ids=str)
def test_a_base_in_an_unsupported_dtype_is_refused(dtype, tmp_path):
    folder = on_disk(tmp_path / "base")
    by_peft(folder, tmp_path / "adapter")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    with pytest.raises(ConfigError, match=r"dtype in its config\.json"):
        merge(tmp_path / "adapter", tmp_path / "merged")


def test_attention_kernels_of_the_base_are_not_needed(tmp_path):
    folder = on_disk(tmp_path / "base")
    theirs = by_peft(folder, tmp_path / "adapter")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    merged = plain(merge(tmp_path / "adapter", tmp_path / "merged"))
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=0, atol=1e-5)
