"""Loading a model: a mistake is one clear error before training, and a right model is loaded unchanged."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import (
    CPU,
    lora,
    prepared_model,
    tiny_model,
    word_tokenizer,
)

from fxtune.errors import ConfigError, StorageError, UserError
from fxtune.export.save import save_model
from fxtune.models.load import (
    DType,
    Init,
    ModelConfig,
    build,
    load_config,
    load_tokenizer,
    resolve_dtype,
    starting_from,
)


def load(path, **options):
    model = ModelConfig(path=str(path), **options)
    return build(model, load_config(model), CPU, seed=0).module


def test_folder_gives_its_weights(base):
    loaded = load(base)
    stored = load_file(base / "model.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in stored.items())
    assert loaded.name_or_path == str(base.resolve())
    assert load(base, dtype=DType.bfloat16).dtype is torch.bfloat16


def test_model_goes_on_from_what_its_run_exported(base, tmp_path):
    drawn = ModelConfig(path=None, init=Init.random, architecture={"model_type": "llama"}, dtype=DType.bfloat16)
    whole = starting_from(drawn, base)
    assert (whole.path, whole.init, whole.architecture, whole.dtype) == (
        str(base),
        Init.pretrained,
        {},
        DType.bfloat16,
    )
    (tmp_path / "adapter_config.json").write_text("{}")
    assert starting_from(drawn, tmp_path) == replace(drawn, adapter=str(tmp_path))


def test_shipped_model_is_the_default():
    model = ModelConfig()
    assert load_tokenizer(model).chat_template
    assert load(model.path).name_or_path.endswith("fxtune/assets/tiny"), (
        "a path, so that plain peft finds the base of an adapter"
    )


def test_architecture_takes_what_the_model_s_code_reads_beyond_declared_fields():
    config = load_config(tiny_model("qwen3_moe"))
    assert config.head_dim == 16
    assert build(tiny_model("qwen3_moe"), config, CPU, seed=0).module.model.layers[0].self_attn.head_dim == 16
    model = tiny_model("qwen3_moe")
    model.architecture["head_dims"] = 16
    with pytest.raises(ConfigError, match=r"model\.architecture\.head_dims: qwen3_moe has no such key"):
        load_config(model)


def test_architecture_overrides_config_of_path(base):
    config = load_config(
        ModelConfig(path=str(base), init=Init.random, architecture={"hidden_size": 128, "num_hidden_layers": 3})
    )
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (128, 3, 128)
    assert config.head_dim == 32, "computed anew from the new size"
    alone = load_config(
        ModelConfig(path=str(base), init=Init.random, architecture={"model_type": "llama", "hidden_size": 128})
    )
    assert alone.vocab_size == 32000, "an architecture with a model_type does not read the path"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": {"model_type": "llama"}}, "init=random"),
        ({"path": None}, "model.path is null"),
        ({"init": Init.random, "architecture": {"model_type": "lama"}}, "did you mean `llama`?"),
        (
            {"init": Init.random, "architecture": {"model_type": "llama", "hiden_size": 8}},
            "did you mean `hidden_size`?",
        ),
        (
            {
                "init": Init.random,
                "architecture": {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 7},
            },
            "30",
        ),
        ({"init": Init.random, "architecture": {"model_type": "llama", "hidden_size": "big"}}, "hidden_size"),
        ({"path": "./nowhere"}, "there is no such folder"),
        ({"path": "./" + "n" * 300}, "there is no such folder"),
        ({"path": "/nowhere/at/all"}, "there is no such folder"),
        ({"path": "runs/mine"}, "there is no such folder"),
        ({"path": "a b/c"}, "there is no such folder"),
        ({"path": "builtin:huge"}, "does not ship"),
        ({"trust_remote_code": True}, "40-digit commit"),
        ({"path": "some/model", "trust_remote_code": True, "revision": "main"}, "40-digit commit"),
    ],
)
def test_wrong_model_config_says_what_to_change(options, message, cwd):
    with pytest.raises(ConfigError) as caught:
        load_config(ModelConfig(**options))
    assert message in str(caught.value)


def test_folder_without_usable_model_is_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    for content, message in (
        ("{", "cannot be used"),
        (json.dumps({**config, "dtype": ["float32"]}), "cannot be used"),
        (json.dumps({**config, "model_type": "lamma"}), "cannot be used"),
        (json.dumps({"model_type": "vit"}), "no causal language model"),
        (json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}), "quantized already"),
    ):
        (copy / "config.json").write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_config(ModelConfig(path=str(copy)))
        assert message in str(caught.value)
    (copy / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_config(ModelConfig(path=str(copy)))
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        load_config(ModelConfig(path=str(copy)))
    with pytest.raises(ConfigError, match="is a file"):
        load_config(ModelConfig(path=str(copy / "tokenizer.json")))


def test_tokenizer_without_pad_token_gets_one_without_resizing(base, tmp_path):
    assert load_tokenizer(ModelConfig(path=str(base))).pad_token == "t1"
    word_tokenizer(unk_token="t0").save_pretrained(tmp_path / "bare")
    assert load_tokenizer(ModelConfig(path=str(base), tokenizer=str(tmp_path / "bare"))).pad_token_id == 0
    word_tokenizer(pad_token="t7", eos_token="t1").save_pretrained(tmp_path / "padded")
    padded = load_tokenizer(ModelConfig(path=str(base), tokenizer=str(tmp_path / "padded")))
    assert padded.pad_token == "t7"
    assert len(padded) == 128


def test_unfit_or_unreadable_tokenizer_is_refused(base, copy, tmp_path):
    word_tokenizer(words=129, eos_token="t1").save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match="ids up to 128, but the model embeds only 128"):
        load_tokenizer(ModelConfig(path=str(base), tokenizer=str(tmp_path / "wide")))
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(StorageError, match=r"tokenizer.*cannot be read"):
        load_tokenizer(ModelConfig(path=str(copy)))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="holds no tokenizer"):
        load_tokenizer(ModelConfig(path=str(copy)))


def test_auto_dtype_is_float32_on_a_cpu():
    assert resolve_dtype(ModelConfig(), None) is torch.float32
    assert resolve_dtype(ModelConfig(dtype=DType.bfloat16), None) is torch.bfloat16


def test_folder_without_adapter_is_refused(base, tmp_path):
    run = tmp_path / "run"
    adapter = save_model(
        prepared_model(lora(), ModelConfig(path=str(base))),
        load_tokenizer(ModelConfig(path=str(base))),
        run / "adapter",
    )
    with pytest.raises(ConfigError, match=f"no PEFT adapter.*such as {adapter}"):
        load_config(ModelConfig(path=str(base), adapter=str(run)))
