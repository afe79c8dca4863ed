"""Loading: whatever is wrong with a model is one clear error before training, and what is right is loaded as it is."""

from __future__ import annotations

import json
import resource
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import (
    CPU,
    FAMILIES,
    SIZES,
    built,
    facts_of,
    logits,
    lora,
    on_disk,
    random_model,
    trained,
    word_tokenizer,
)

from fxtune.errors import ConfigError, StorageError, UserError
from fxtune.models.load import DType, Init, ModelConfig, build, load_config, load_tokenizer, resolve_dtype
from fxtune.models.save import save_model
from fxtune.system import hub
from fxtune.techniques.pipeline import Pipeline


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return on_disk(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def copy(base, tmp_path):
    """A copy of the base to break."""
    import shutil

    return shutil.copytree(base, tmp_path / "copy")


def load(path, **options):
    model = ModelConfig(path=str(path), **options)
    return build(model, load_config(model), CPU, seed=0)


def edit(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_folder_gives_the_weights_that_are_in_it(base):
    loaded = load(base)
    stored = load_file(base / "model.safetensors")
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in stored.items())
    assert loaded.name_or_path == str(base.resolve())
    assert load(base, dtype=DType.bfloat16).dtype is torch.bfloat16


def test_the_model_that_ships_is_the_default():
    model = ModelConfig()
    assert load_tokenizer(model).chat_template
    assert load(model.path).name_or_path.endswith("fxtune/assets/tiny"), (
        "a path, so that plain peft finds the base of an adapter"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_depend_on_the_seed_and_come_in_the_dtype_asked_for(family):
    model = random_model(family)
    first, again, other = (build(model, load_config(model), CPU, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    model.dtype = DType.bfloat16
    half = build(model, load_config(model), CPU, 0)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    frequencies = {name: buffer for name, buffer in half.named_buffers() if "inv_freq" in name}
    assert frequencies
    for buffer in frequencies.values():  # rounded to bfloat16 they would shift every position beyond a few hundred
        assert buffer.dtype is torch.float32
        assert not torch.equal(buffer, buffer.bfloat16().float())


def test_building_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build(random_model("llama"), load_config(random_model("llama")), CPU, seed=0)
    assert torch.equal(torch.rand(3), expected)


def test_an_architecture_is_laid_over_the_config_of_path(base):
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
def test_a_wrong_recipe_is_a_config_error_that_says_what_to_change(options, message, cwd):
    with pytest.raises(ConfigError) as caught:
        load_config(ModelConfig(**options))
    assert message in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_one_storage_error():
    with pytest.raises(StorageError, match=r"nobody/nothing.*hub cannot be reached"):
        load_config(ModelConfig(path="nobody/nothing"))
    start = time.perf_counter()
    with pytest.raises(StorageError, match=r"nobody/nothing.*hub cannot be reached"):
        load_config(ModelConfig(path="nobody/nothing", revision="0123456789" * 4))
    assert time.perf_counter() - start < 5, "a pinned commit is not asked for again and again"


def test_the_hub_s_refusals_say_what_to_do(monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "https://huggingface.co"))
    for refusal, message in (
        (errors.GatedRepoError("no", response=response), "hf auth login"),
        (errors.RepositoryNotFoundError("no", response=response), "no such model on the hub"),
        (errors.RevisionNotFoundError("no", response=response), "no revision 'v9'"),
    ):

        def refuse(*_, refusal=refusal, **__):
            raise refusal

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ConfigError) as caught:
            load_config(ModelConfig(path="some/model", revision="v9"))
        assert message in str(caught.value)


def test_a_hub_model_is_pinned_to_the_commit_that_was_resolved(base, tmp_path, monkeypatch):
    """The hub's own client stands for the network: it hands out the small files first, the weights when they are named."""
    import shutil

    import huggingface_hub

    commit, asked = "0123456789abcdef" * 2 + "01234567", []
    snapshot = tmp_path / "snapshots" / commit

    def download(name, revision, allow_patterns, local_files_only=False):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing was fetched yet")
        asked.append((revision, list(allow_patterns)))
        snapshot.mkdir(parents=True, exist_ok=True)
        for path in base.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(hub, "resolve_commit", lambda name, revision: (commit, None))
    loaded = load("some/model", revision="main")
    assert (loaded.name_or_path, loaded.base_revision) == ("some/model", commit)
    assert asked[-1] == (commit, ["model.safetensors"])


def test_missing_unexpected_and_misshapen_weights_are_refused(copy):
    weights = copy / "model.safetensors"
    edit(weights, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(StorageError, match=r"not in the files, such as model\.norm\.weight"):
        load(copy)
    edit(
        weights,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(64), "model.extra.weight": torch.ones(2)}),
    )
    with pytest.raises(StorageError, match=r"no place in the architecture, such as model\.extra\.weight"):
        load(copy)
    edit(
        weights,
        lambda tensors: (tensors.pop("model.extra.weight"), tensors.update({"model.norm.weight": torch.ones(32)})),
    )
    with pytest.raises(
        StorageError, match=r"another shape, such as model\.norm\.weight \(\(32,\) in the file, \(64,\)"
    ):
        load(copy)


def test_tied_weights_are_not_missing(tmp_path):
    folder = on_disk(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    loaded = load(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(copy, keep):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(StorageError, match=r"model\.safetensors is broken or cut short"):
        load(copy)


def test_a_missing_shard_is_named(copy):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StorageError, match=r"model-00001-of-00002\.safetensors is missing"):
        load(copy)
    for text in (
        "{}",
        "[]",
        "null",
        "3",
        "",
        '{"weight_map": {}}',
        '{"weight_map": null}',
        '{"weight_map": {"a": ["b.safetensors"]}}',
    ):
        (copy / "model.safetensors.index.json").write_text(text)
        with pytest.raises(StorageError, match="not a safetensors index"):
            load(copy)


def test_kernels_that_a_config_asks_for_and_nobody_installed_are_named(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    with pytest.raises(StorageError, match=r"cannot be loaded as its config\.json says: ImportError: FlashAttention2"):
        load(copy)


def test_pickled_weights_are_refused_unread(copy):
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*safetensors only"):
        load(copy)


def test_a_folder_that_is_no_model_says_so(copy):
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


def test_code_that_comes_with_a_model_does_not_run(copy, tmp_path):
    config = json.loads((copy / "config.json").read_text())
    config.update(model_type="mine", auto_map={"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"})
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_config(ModelConfig(path=str(copy)))
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_without_a_pad_token_gets_one_and_nothing_is_resized(base, tmp_path):
    assert load_tokenizer(ModelConfig(path=str(base))).pad_token == "t1"
    word_tokenizer(unk_token="t0").save_pretrained(tmp_path / "bare")
    assert load_tokenizer(ModelConfig(path=str(base), tokenizer=str(tmp_path / "bare"))).pad_token_id == 0
    word_tokenizer(pad_token="t7", eos_token="t1").save_pretrained(tmp_path / "padded")
    padded = load_tokenizer(ModelConfig(path=str(base), tokenizer=str(tmp_path / "padded")))
    assert padded.pad_token == "t7"
    assert len(padded) == 128


def test_a_tokenizer_that_does_not_fit_or_cannot_be_read_is_refused(base, copy, tmp_path):
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
    assert resolve_dtype(ModelConfig(), CPU) is torch.float32
    assert resolve_dtype(ModelConfig(dtype=DType.bfloat16), CPU) is torch.bfloat16


def test_a_full_model_saved_is_loaded_by_plain_transformers(base, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = trained(load(base))
    folder = save_model(model, load_tokenizer(ModelConfig(path=str(base))), tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model))
    assert AutoTokenizer.from_pretrained(folder).pad_token == "t1"
    assert not list(tmp_path.glob(".*")), "nothing staged is left"


def test_saving_again_replaces_and_a_full_disk_leaves_the_old_one(base, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(ModelConfig(path=str(base)))
    model = load(base)
    save_model(model, tokenizer, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def full(*_, **__):
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(StorageError, match="No space left"):
        save_model(trained(model), tokenizer, tmp_path / "out")
    monkeypatch.undo()
    limits, _ = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (10_000, limits[1])
    )  # the weights themselves do not fit: another library's error
    try:
        with pytest.raises(StorageError, match="File too large"):
            save_model(model, tokenizer, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    save_model(model, tokenizer, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_card_says_what_made_the_adapter_and_how_to_load_it(base, tmp_path):
    model = ModelConfig(path=str(base))
    pipeline = lora()
    pipeline.rope.enabled, pipeline.rope.factor = True, 2.0
    adapter = save_model(
        trained(built(pipeline, model)),
        load_tokenizer(model),
        tmp_path / "adapter",
        card={
            "config": {"run": {"name": "mine", "seed": 7}},
            "data": "abc123",
            "figures": {"eval/loss": 0.5},
            "facts": facts_of(model),
        },
    )
    card = (adapter / "README.md").read_text()
    for part in (
        "library_name: peft",
        str(base),
        "| run | mine |",
        "| seed | 7 |",
        "abc123",
        "| eval/loss | 0.5 |",
        "| transformers |",
    ):
        assert part in card
    assert "base_model:" not in card, "a local path is not a hub id"
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f"folder = {str(adapter)!r}")
    names: dict = {}
    exec(code, names)  # the card's own lines, as a reader would run them
    assert torch.equal(
        logits(names["model"]), logits(built(pipeline, ModelConfig(path=str(base), adapter=str(adapter))))
    )
    assert names["model"].config.max_position_embeddings == 2 * SIZES["max_position_embeddings"]


def test_an_adapter_has_no_config_beside_it_unless_the_base_s_was_edited(base, tmp_path):
    model = ModelConfig(path=str(base))
    adapter = save_model(built(lora(), model), load_tokenizer(model), tmp_path / "adapter")
    assert sorted(path.name for path in adapter.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base.resolve())
    assert Pipeline().lora.enabled is False


def test_what_is_no_adapter_is_refused_before_anything_is_loaded(base, tmp_path):
    run = tmp_path / "run"
    adapter = save_model(
        built(lora(), ModelConfig(path=str(base))), load_tokenizer(ModelConfig(path=str(base))), run / "adapter"
    )
    with pytest.raises(ConfigError, match=f"no PEFT adapter.*such as {adapter}"):
        load_config(ModelConfig(path=str(base), adapter=str(run)))


def test_the_adapter_s_config_is_the_same_in_every_process(base, tmp_path):
    adapter = save_model(
        built(lora(), ModelConfig(path=str(base))), load_tokenizer(ModelConfig(path=str(base))), tmp_path / "adapter"
    )
    modules = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert len(modules) > 1
    assert modules == sorted(modules)
