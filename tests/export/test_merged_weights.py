"""A merged model is computed again from its base and its adapter, by the formulas of the papers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.architectures import lora, on_disk, prepared_model, tiny_model, trained, word_tokenizer
from transformers import CONFIG_MAPPING

from fxtune.errors import StorageError
from fxtune.export.save import save_model
from fxtune.facts.options import AdapterInit
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.outputs import merge as merging


def adapter(folder, model=None, **options):
    """The folder of a trained adapter."""
    base = on_disk(folder / "base", model=model)
    word_tokenizer(128, unk_token="t0").save_pretrained(base)
    source = ModelConfig(path=str(base))
    return save_model(trained(prepared_model(lora(**options), source)), load_tokenizer(source), folder / "adapter")


WRONG_MERGES: dict[str, Callable[[Any], None]] = {
    "left-out layer": lambda layer: layer.merged_adapters.append("default"),
    "half the scaling": lambda layer: layer.scaling.update(default=layer.scaling["default"] / 2),
    "one number": lambda layer: layer.get_base_layer().weight.data[3].add_(1e-4),
}


@pytest.mark.filterwarnings("ignore:All adapters are already merged")
@pytest.mark.parametrize("name", WRONG_MERGES)
def test_merged_model_that_is_not_base_plus_adapter_is_no_export(tmp_path, monkeypatch, name):
    adapter(tmp_path)
    real = merging._merge_in_float32

    def wrong(layer: Any, given: str) -> None:
        if not done:
            WRONG_MERGES[name](layer)
            done.append(layer)
        real(layer, given)

    done: list[Any] = []
    monkeypatch.setattr(merging, "_merge_in_float32", wrong)
    with pytest.raises(StorageError, match=r"mean KL|q_proj\.weight in .* is not base \+ scaling"):
        merging.merge(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    monkeypatch.undo()
    merged = merging.merge(tmp_path / "adapter", tmp_path / "merged")
    assert "21 of them are the base's plus scaling * B A" in (merged / "README.md").read_text()


def test_formula_of_each_kind_gives_what_peft_merges(tmp_path):
    kinds = {
        "dora": ("the base's plus scaling", {"dora": True, "rslora": True}, None),
        "gpt2": ("28 of them are the base's", {"dora": True}, "gpt2"),
        "renamed": (r"(\d+) tensors are the model's, bit by bit; \1 of them are the base's plus", {}, "lfm3"),
        "experts": ("21 of them .* Not compared: the sums .* in 24 tensors", {}, "qwen3_moe"),
        "pissa": (
            "Not compared: the sums of base and adapter, because pissa changes the base",
            {"init": AdapterInit.pissa},
            None,
        ),
    }
    for name, (words, options, kind) in kinds.items():
        if kind and kind not in CONFIG_MAPPING:
            continue  # this transformers is older than the type
        folder = tmp_path / name
        adapter(folder, kind and tiny_model(kind), **options)
        card = (merging.merge(folder / "adapter", folder / "merged") / "README.md").read_text()
        assert re.search(words, card), name
