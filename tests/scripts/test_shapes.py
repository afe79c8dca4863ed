"""scripts/bench/shapes.py: a benchmark's shape has each value of the published config of its model, except named ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from transformers import CONFIG_MAPPING

from fxtune.models.shipped import shipped_configs

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import bench_peers  # noqa: E402
import peer_tools  # noqa: E402
import shapes  # noqa: E402

sys.path.remove(str(ROOT / "scripts" / "bench"))

LAYERS = ("num_hidden_layers",)
LLAMA = "meta-llama/Llama-3.1-8B"
NAMED: dict[str, tuple[str, tuple[str, ...]]] = {
    "8b": (LLAMA, ()),
    "70b": ("meta-llama/Llama-3.1-70B", ()),
    "1b": ("meta-llama/Llama-3.2-1B", ()),
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B", ()),
    "moe": ("Qwen/Qwen3-30B-A3B", LAYERS),
    "30b_a3b": ("Qwen/Qwen3-30B-A3B", ()),
    "moe_heads_64": ("Qwen/Qwen3-30B-A3B", ("head_dim", *LAYERS)),
    "30b_a3b_heads_64": ("Qwen/Qwen3-30B-A3B", ("head_dim",)),
    "gpt_oss": ("openai/gpt-oss-20b", ()),
    "qwen3_5_4b": ("Qwen/Qwen3.5-9B", ("hidden_size", "intermediate_size", "tie_word_embeddings")),
    "qwen3_5_9b": ("Qwen/Qwen3.5-9B", ()),
    "qwen3_5_35b": ("Qwen/Qwen3.5-35B-A3B", ()),
    "gemma4_31b": ("google/gemma-4-31B", ("layer_types", *LAYERS)),
    "llama4_scout": (
        "meta-llama/Llama-4-Scout-17B-16E",
        ("layer_types", "moe_layers", "no_rope_layers", *LAYERS),  # lists with a value for each layer
    ),
    "qwen3_vl_8b": ("Qwen/Qwen3-VL-8B-Instruct", ()),
    "qwen3_5_vl_9b": ("Qwen/Qwen3.5-9B", ()),
    "qwen2_5_vl_7b": ("Qwen/Qwen2.5-VL-7B-Instruct", ()),
}
"""Shape -> the model that it is named after, and the keys that differ."""
WITHOUT_CONFIG = {"modernbert", "modernbert_tiny", *(name for name in shapes.SHAPES if "tiny" in name)}
"""Shapes of this project, and one whose published config does not ship."""
NOT_OF_THE_SHAPE = (*shapes.STORED, "transformers_version", "_name_or_path", "per_layer_config")


def values(config: dict) -> dict:
    """All values of a config, transformers' defaults included, by their paths. Of a model that reads images and whose
    shape does not, the language model's."""
    full = CONFIG_MAPPING[config["model_type"]](**{k: v for k, v in config.items() if k != "model_type"}).to_dict()

    def flat(part: dict, path: str = "") -> dict:
        found = {}
        for key, value in part.items():
            if key in NOT_OF_THE_SHAPE or str(key).endswith("_token_id"):
                continue
            found |= flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
        return found

    return flat(full)


def published(name: str, images: bool) -> dict:
    config = shipped_configs()[name].config
    return config if images else config.get("text_config", config)


@pytest.mark.parametrize("name", NAMED)
def test_a_shape_has_each_value_of_its_published_config_but_the_named_ones(name):
    model, named = NAMED[name]
    shape = shapes.SHAPES[name]
    mine, theirs = values(shape), values(published(model, "vision_config" in shape))
    assert {key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key)} == set(named)
    assert shipped_configs()[model].source


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_peers_build_every_shape_for_the_longest_rows_of_its_cases(name):
    longest = max((case.length for case in bench_peers.CASES.values() if case.shape == name), default=4096)
    head = "AutoModel" if name in shapes.ENCODERS else ""
    model = peer_tools.random_model(shapes.SHAPES[name], longest, "eager", "meta", head)
    config = model.config.get_text_config()
    assert (config.eos_token_id, config.pad_token_id) == (2, 0)
    assert config.max_position_embeddings >= longest


def test_every_shape_is_compared_or_is_of_this_project():
    assert NAMED.keys() | WITHOUT_CONFIG == shapes.SHAPES.keys()


@pytest.mark.parametrize(
    ("group", "model"),
    [("llama_8b_shape", "meta-llama/Meta-Llama-3-8B"), ("llama_70b_shape", "meta-llama/Llama-3.1-70B")],
)
def test_a_config_group_with_a_shape_has_the_published_config(group, model):
    written = yaml.safe_load((ROOT / "configs" / "model" / f"{group}.yaml").read_text())
    assert values(written["architecture"]) == values(published(model, images=False))


def test_heads_of_the_mixture_are_as_wide_as_published():
    """The widths of Qwen3-30B-A3B: 32 heads of 128 on 2,048 hidden values."""
    assert [shapes.SHAPES[name]["head_dim"] for name in ("moe", "30b_a3b")] == [128, 128]
