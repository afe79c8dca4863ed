"""An export counts only if its files are what was trained: every damage to a file between writing and proving is caught.

A mutation changes the written files before they are read back. Each is one that a bug, a full disk or another version of
a library can make.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support import processors
from support.architectures import (
    architecture,
    lora,
    on_disk,
    prepared_model,
    random_model,
    trained,
    word_tokenizer,
)

from fxtune.cli.main import main
from fxtune.data.config import DataConfig
from fxtune.errors import StorageError
from fxtune.export import save, weights
from fxtune.export.read_back import LIMIT, EndingProbe
from fxtune.export.save import save_model
from fxtune.facts.options import Switch
from fxtune.models.load import Init, ModelConfig, load_tokenizer
from fxtune.settle.images import image_processor
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.rope import Rope

CPU = torch.device("cpu")
ADAPTER, CONFIG, MODEL = "adapter_model.safetensors", "adapter_config.json", "model.safetensors"
INDEX, TOKENIZER = "model.safetensors.index.json", "tokenizer_config.json"
Q = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
Mutation = Callable[[Path], None]


def tensors(change: Callable[[dict[str, torch.Tensor]], object], file: str = ADAPTER) -> Mutation:
    """A mutation that changes the tensors of a file. `change` gets them by name."""

    def mutate(folder: Path) -> None:
        held = load_file(folder / file)
        change(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / file)

    return mutate


def options(file: str = CONFIG, **values: Any) -> Mutation:
    """A mutation that sets options of a JSON file; None removes one."""

    def mutate(folder: Path) -> None:
        held = {**json.loads((folder / file).read_text()), **values}
        (folder / file).write_text(json.dumps({name: value for name, value in held.items() if value is not None}))

    return mutate


def renamed(held: dict[str, torch.Tensor], old: str, new: str) -> None:
    held[new] = held.pop(old)


def swapped(held: dict[str, torch.Tensor], one: str, other: str) -> None:
    held[one], held[other] = held[other], held[one]


def cut(file: str) -> Mutation:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-100])


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def in_index(change: Callable[[dict[str, str]], object]) -> Mutation:
    def mutate(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return mutate


def scaled_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["factor"] = config["rope_scaling"]["factor"] = 8.0
    (folder / "config.json").write_text(json.dumps(config))


def without_token(folder: Path) -> None:
    held = json.loads((folder / "tokenizer.json").read_text())
    held["added_tokens"] = [token for token in held["added_tokens"] if token["content"] != "<call>"]
    (folder / "tokenizer.json").write_text(json.dumps(held))


ADAPTERS: dict[str, tuple[Mutation, str]] = {
    "transposed B": (tensors(lambda t: t.update({Q.format(0, "B"): t[Q.format(0, "B")].T})), "q_proj.lora_B"),
    "swapped A of two layers": (tensors(lambda t: swapped(t, Q.format(0, "A"), Q.format(1, "A"))), "numbers differ"),
    "zeroed tensor": (tensors(lambda t: t[Q.format(1, "B")].zero_()), "q_proj.lora_B.weight, read back"),
    "one NaN": (tensors(lambda t: t[Q.format(1, "A")][0].fill_(torch.nan)), "numbers differ"),
    "one bit": (
        tensors(lambda t: t[Q.format(0, "A")].view(torch.int32)[0, 0].bitwise_xor_(1)),
        ": 1 of 256 numbers differ",
    ),
    "truncated dtype": (tensors(lambda t: t.update({name: one.bfloat16() for name, one in t.items()})), "bfloat16"),
    "dropped layer": (tensors(lambda t: t.pop(Q.format(1, "A"))), "layers.1.* is missing in the files"),
    "left-over tensor": (tensors(lambda t: t.update(x=torch.ones(1))), "x is left over in the files"),
    "renamed key": (
        tensors(lambda t: renamed(t, Q.format(0, "A"), "base_model.q.lora_A.weight")),
        "left over|missing",
    ),
    "trained head dropped": (tensors(lambda t: t.pop("base_model.model.lm_head.weight")), "lm_head.* is missing"),
    "cut file": (cut(ADAPTER), f"{ADAPTER} cannot be read back"),
    "alpha": (options(lora_alpha=16), "lora_alpha is 16 in it, and 32.0 in the model"),
    "rank": (options(r=8), "r is 8 in it, and 4 in the model"),
    "rank pattern": (options(rank_pattern={"v_proj": 4}), "rank_pattern"),
    "rank pattern dropped": (options(rank_pattern=None), "rank_pattern is None in it"),
    "alpha pattern": (options(alpha_pattern={"k_proj": 4}), "alpha_pattern"),
    "rslora": (options(use_rslora=False), "use_rslora"),
    "dora": (options(use_dora=True), "use_dora"),
    "fan_in_fan_out": (options(fan_in_fan_out=True), "fan_in_fan_out"),
    "bias": (options(bias="all"), "bias is all in it"),
    "targets": (options(target_modules=["q_proj"]), "target_modules"),
    "layers": (options(layers_to_transform=[0]), "layers_to_transform"),
    "trained modules": (options(modules_to_save=None), "modules_to_save is None in it"),
    "start": (options(init_lora_weights="pissa"), "init_lora_weights"),
    "base": (options(base_model_name_or_path="meta/other"), "base_model_name_or_path is meta/other in it"),
    "revision": (options(revision="v2"), "revision"),
    "stale RoPE": (scaled_rope, "config.json: rope_parameters"),
    "no RoPE": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "chat template": (lambda folder: (folder / "chat_template.jinja").unlink(), "its chat template differ"),
    "added token": (without_token, "the tokenizer, read back"),
    "special token": (options(TOKENIZER, pad_token="t5"), "its special tokens differ"),
}
MODELS: dict[str, tuple[Mutation, str]] = {
    "lost shard": (lambda folder: shards(folder)[1].unlink(), "is missing in the files"),
    "cut shard": (lambda folder: cut(shards(folder)[0].name)(folder), "model-00001-of-.* cannot be read back"),
    "index names another shard": (in_index(lambda files: files.update({"lm_head.weight": min(files.values())})),
     "lm_head.weight is in model-00001-of-.* by model.safetensors.index.json"),
    "index without a tensor": (in_index(lambda files: files.pop("lm_head.weight")), f"missing in {INDEX}"),
    "no index": (lambda folder: (folder / INDEX).unlink(), f"{INDEX} cannot be read back"),
    "dropped bias": (lambda folder: tensors(lambda t: t.pop(next(n for n in t if n.endswith("bias"))),
     shard_of(folder, "bias"))(folder), "bias is missing"),
    "stale config": (options("config.json", rms_norm_eps=1e-3), "rms_norm_eps is 0.001 in it"),
    "tied head": (options("config.json", tie_word_embeddings=True), "tie_word_embeddings is True in it"),
    "stale generation config": (options("generation_config.json", eos_token_id=5), "eos_token_id is 5 in it"),
}  # fmt: skip


def shard_of(folder: Path, ending: str) -> str:
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    return next(file for name, file in files.items() if name.endswith(ending))


@pytest.fixture(scope="module")
def tokenizer():
    made = word_tokenizer(120, pad_token="t0", unk_token="t0")
    made.add_tokens(["<call>"])
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A trained model with adapters of several ranks, a trained head and scaled RoPE."""
    base = on_disk(tmp_path_factory.mktemp("proof") / "base")
    patterns = {"rank_pattern": {"k_proj": 8}, "alpha_pattern": {"k_proj": 12.0}}
    pipeline = lora(r=4, rslora=True, modules_to_save=["lm_head"], **patterns)
    pipeline.rope = Rope(enabled=True, factor=4.0)
    return trained(prepared_model(pipeline, ModelConfig(path=str(base))))


@pytest.fixture(scope="module")
def full():
    """A trained model with biases."""
    sizes = {"vocab_size": 160, "intermediate_size": 96}
    model = ModelConfig(path=None, init=Init.random, architecture=architecture("qwen2", **sizes))
    return trained(prepared_model(Pipeline(), model))


@pytest.fixture
def save_mutated(monkeypatch, tmp_path, tokenizer):
    """save_model() with a mutation of the files that it has written. Returns the error's text."""

    def attempt(model: Any, mutate: Mutation) -> str:
        real = save.write_tokenizer

        def write(given: Any, folder: Path) -> None:
            real(given, folder)
            mutate(folder)

        monkeypatch.setattr(save, "write_tokenizer", write)
        with pytest.raises(StorageError) as raised:
            save_model(model, tokenizer, tmp_path / "out", keeps="The weights are in the checkpoint.")
        assert not list(tmp_path.iterdir()), "nothing of it is left"
        text = str(raised.value)
        assert "were written and differ from the trained model: " in text
        assert "The weights are in the checkpoint." in text
        return text

    return attempt


@pytest.mark.parametrize("name", ADAPTERS)
def test_mutated_adapter_is_no_export(adapted, save_mutated, name):
    mutate, words = ADAPTERS[name]
    assert re.search(words, save_mutated(adapted, mutate))


@pytest.mark.parametrize("name", MODELS)
def test_mutated_model_is_no_export(full, save_mutated, monkeypatch, name):
    monkeypatch.setattr(weights, "FILE_BYTES", 60_000)
    mutate, words = MODELS[name]
    assert re.search(words, save_mutated(full, mutate))


def test_permuted_experts_are_no_export(save_mutated):
    model = trained(prepared_model(lora(), random_experts()))
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"

    def permute(held: dict[str, torch.Tensor]) -> None:
        held[name] = held[name].flip(-1)

    assert "experts.lora_B.weight, read back" in save_mutated(model, tensors(permute))


def random_experts() -> ModelConfig:
    return ModelConfig(path=None, init=Init.random, architecture=architecture("qwen3_moe"))


def test_unmutated_exports_are_proven(adapted, full, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(weights, "FILE_BYTES", 60_000)
    figures: dict[str, float] = {}
    for model, name in ((adapted, "adapter"), (full, "model")):
        folder = save_model(model, tokenizer, tmp_path / name, record=lambda proof: figures.update(proof.figures()))
        assert figures.keys() == {"export/kl", "export/max_difference", "export/proof_seconds"}
        assert figures["export/kl"] < 1e-9
        card = (folder / "README.md").read_text()
        assert "## Proof" in card
        assert "bit by bit" in card
        assert "Not compared" not in card
        assert main(["verify", str(folder)]) == 0
        assert "as it was proven" in capsys.readouterr().out
    (tmp_path / "adapter" / "README.md").write_text("a better card")
    assert main(["verify", str(tmp_path / "adapter")]) == 0
    cut(ADAPTER)(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.bin").write_text("")
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "adapter")]) == 1
    said = capsys.readouterr().err
    assert re.search(r"adapter/adapter_model\.safetensors has [\d,]+ bytes, and [\d,]+ were saved", said)
    assert "adapter_model.bin was added" in said
    (tmp_path / "adapter" / "proof.json").unlink()
    assert main(["verify", str(tmp_path)]) == StorageError.exit_code, "although the other export is proven"
    assert "adapter holds no proof.json" in capsys.readouterr().err


def test_fused_adapters_are_proven_over_the_frozen_weights_that_they_share(tmp_path, tokenizer):
    figures: dict[str, float] = {}
    prepared = prepared_model(lora(fused=Switch.on), random_model("llama"))
    model = trained(prepared.module)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    save_model(prepared, tokenizer, tmp_path / "out", record=lambda proof: figures.update(proof.figures()))
    assert figures["export/kl"] < 1e-9
    after = model.state_dict()
    assert all(torch.equal(one, after[name]) for name, one in before.items()), "the trained model is untouched"


def test_options_that_do_not_act_are_no_export(save_mutated, adapted):
    """The options in memory can be as wrong as those in the file: what acts is what counts."""
    layer = adapted.module.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    was = layer.scaling["default"]
    layer.scaling["default"] = 3.0
    try:
        assert re.search(
            r"the scaling of .*q_proj is 16\.0 in plain peft, and 3\.0", save_mutated(adapted, lambda _: None)
        )
    finally:
        layer.scaling["default"] = was


def test_code_that_computes_something_else_is_no_export(save_mutated, adapted):
    """Every file and option is right, and only the logits show it: here one MLP gives twice its result."""
    mlp = adapted.module.get_submodule("base_model.model.model.layers.0.mlp")
    hook = mlp.register_forward_hook(lambda _, __, output: 2 * output)
    try:
        said = save_mutated(adapted, lambda _: None)
    finally:
        hook.remove()
    found = re.search(r"plain peft on the plain base .* mean KL (\S+) nats", said)
    assert found
    assert float(found[1]) > LIMIT


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_the_question_whose_answer_should_end_comes_with_its_images(family, tmp_path):
    source = ModelConfig(path=str(processors.write_model(family, tmp_path / "model")))
    tokenizer = load_tokenizer(source)
    images = image_processor(source, DataConfig(), tokenizer)
    prompt = [40, *processors.image_ids(images, 30, 30), 41]
    shown = images.tensors([Image.new("RGB", (30, 30))])
    proofs = []
    for tensors in (shown, images.merge([shown, shown])):
        question = EndingProbe(prompt, 3, tensors)
        prepared = prepared_model(Pipeline(), source)
        save_model(prepared, tokenizer, tmp_path / "out", question=question, record=proofs.append)
    assert (proofs[0].asked, proofs[0].left_out) == (3, "")
    assert "generation fails" in proofs[1].left_out, "the model got two images for one"
