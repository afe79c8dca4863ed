"""The models of the benchmarks. A shape is the published config that ships with fxtune (fxtune/assets/model_configs.json,
each with its source), with the differences that are named here.

This module does not import fxtune, because the processes of the peers import this module.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "fxtune" / "assets" / "model_configs.json"
STORED = ("dtype", "quantization_config")
"""Keys of a published config that say how its weights are stored. Benchmarks draw weights."""
TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Option of a config with images -> the token whose id it is."""
IDS = {name: 1024 + number for number, name in enumerate(TOKENS)}
"""The built-in tokenizer, which all shapes have, has 1,024 tokens."""
ENDS = dict(bos_token_id=None, eos_token_id=2, pad_token_id=0)
HEADS_OF_64 = "_heads_64"
"""The end of the names of two shapes. Until 2026-11-29 the shapes of Qwen3-30B-A3B had heads of 64; the published model
has heads of 128. Rows of benchmarks/baselines from before name these shapes."""


@functools.cache
def models() -> dict[str, dict[str, Any]]:
    """The shipped configs, by the names of their repositories."""
    return {name: entry["config"] for entry in json.loads(FILE.read_text())["models"] for name in entry["ids"]}


def published(name: str, **changes: Any) -> dict[str, Any]:
    """The language model of a published config, with values that differ."""
    return changed(_drawn(models()[name].get("text_config", models()[name])), **changes)


def changed(shape: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A shape with values that differ. Of fewer layers the first ones are kept."""
    shape = shape | changes
    return shape | {key: shape[key][: shape["num_hidden_layers"]] for key in ("layer_types",) if key in shape}


def with_positions(shape: dict[str, Any], length: int) -> dict[str, Any]:
    """A shape with positions for rows of `length` tokens."""
    short = shape.get("max_position_embeddings", length) < length
    return {**shape, "max_position_embeddings": length} if short else shape


def with_images(name: str, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None) -> dict[str, Any]:
    """A published config that reads images. `text`, `vision`: values of these parts that differ."""
    shape = _drawn(models()[name])
    shape |= {"vision_config": shape["vision_config"] | (vision or {}), **IDS}
    if "text_config" not in shape:  # the older, flat form
        return {**shape, **(text or {}), **ENDS}
    return {**shape, "text_config": {**_drawn(shape["text_config"]), **(text or {}), **ENDS}}


def _drawn(config: dict[str, Any]) -> dict[str, Any]:
    """A config for random weights and the built-in tokenizer."""
    return {key: value for key, value in config.items() if key not in STORED and not key.endswith("_token_id")}


def in_words(value: Any) -> str:
    """A value as fxtune's command line takes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_words, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


QWEN3_MOE, QWEN3_5 = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-9B"
_TINY = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
TINY = dict(_TINY, model_type="llama", num_hidden_layers=2, max_position_embeddings=131072)
DECODERS: dict[str, dict[str, Any]] = {
    "8b": published("meta-llama/Llama-3.1-8B"),
    "70b": published("meta-llama/Llama-3.1-70B"),
    "1b": published("meta-llama/Llama-3.2-1B"),
    "qwen3_0_6b": published("Qwen/Qwen3-0.6B"),
    "tiny": TINY,
    "tiny_128k": dict(TINY, vocab_size=128256, head_dim=32),
    "tiny_teacher": dict(TINY, num_hidden_layers=3),
    "moe": published(QWEN3_MOE, num_hidden_layers=12),  # a quarter of its layers
    "30b_a3b": published(QWEN3_MOE),
    f"moe{HEADS_OF_64}": published(QWEN3_MOE, num_hidden_layers=12, head_dim=64),
    f"30b_a3b{HEADS_OF_64}": published(QWEN3_MOE, head_dim=64),
    "gpt_oss": published("openai/gpt-oss-20b"),
    # No config of this size ships: the sizes of torchtitan's models/qwen3_5.
    "qwen3_5_4b": published(QWEN3_5, hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True),
    "qwen3_5_9b": published(QWEN3_5),
    "qwen3_5_35b": published("Qwen/Qwen3.5-35B-A3B"),
    "qwen3_5_tiny": published(
        QWEN3_5,
        **dict(_TINY, num_hidden_layers=4, head_dim=64, tie_word_embeddings=True),
        **dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
    ),
    "gemma4_31b": published("google/gemma-4-31B", num_hidden_layers=20),  # a third of its layers
    "llama4_scout": published("meta-llama/Llama-4-Scout-17B-16E", num_hidden_layers=6),  # an eighth of its layers
}
IMAGES: dict[str, dict[str, Any]] = {
    "qwen3_vl_8b": with_images("Qwen/Qwen3-VL-8B-Instruct"),
    "qwen3_5_vl_9b": with_images(QWEN3_5),
    "qwen2_5_vl_7b": with_images("Qwen/Qwen2.5-VL-7B-Instruct"),
    "qwen2_5_vl_tiny": with_images(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        dict(_TINY, vocab_size=1040, num_hidden_layers=2, max_position_embeddings=2048, rope_theta=1e4)
        | dict(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]}),
        dict(
            depth=2, hidden_size=32, intermediate_size=48, num_heads=2, fullatt_block_indexes=[1], out_hidden_size=64
        ),
    ),
}
ENCODERS: dict[str, dict[str, Any]] = {
    "modernbert": dict(model_type="modernbert"),  # ModernBERT-base: the defaults of transformers' ModernBertConfig
    "modernbert_tiny": dict(TINY, model_type="modernbert", max_position_embeddings=1024),
}
SHAPES = {**DECODERS, **IMAGES, **ENCODERS}
