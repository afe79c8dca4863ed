"""Tells whether vLLM can serve an adapter, by vLLM's own rules.

The rules are from vLLM's main branch of 2026: vllm/lora/peft_helper.py (options that vLLM refuses, and one scaling for
all modules), vllm/config/lora.py (values of --max-lora-rank) and vllm/lora/lora_model.py (names of tensors). An
adapter with an option that vLLM does not read, such as rank_pattern, loads and gives wrong answers. vLLM's list of
models says whether a class takes adapters (`SupportsLoRA`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fxtune.models.kinds.image_decoder.families import FAMILIES
from fxtune.system.files.atomic_files import read_json

MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank takes, apart from 1."""
REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules that were trained in full (modules_to_save)",
    "lora_bias": "biases of adapters",
    "target_parameters": "adapters of parameters that are in no linear (target_parameters)",
    "trainable_token_indices": "trained tokens",
    "rank_pattern": "another rank for some modules: it scales all of them by lora_alpha / r",
    "alpha_pattern": "another alpha for some modules: it scales all of them by lora_alpha / r",
}
"""{option of an adapter that vLLM refuses or does not read: its meaning}. An option counts if it is set."""
EMBEDDINGS = ("embed_tokens", "lm_head")
ENDS_IN = "models whose class lists them as embedding_modules"


def max_rank(r: int) -> int | None:
    """The least --max-lora-rank for rank `r`; None if vLLM has no value for it."""
    return next((rank for rank in MAX_RANKS if rank >= r), None)


def is_beside_language_model(tensors: Iterable[str]) -> bool:
    """Whether some tensors of an adapter belong to a vision encoder or a projector. `tensors`: their names."""
    parts = [f".{part}." for family in FAMILIES.values() for part in (family.encoder, *family.projector)]
    return any(part in name for name in tensors for part in parts)


def refusals(options: Mapping[str, Any], tensors: Iterable[str], ends_in: str = ENDS_IN) -> list[str]:
    """The reasons why vLLM cannot serve an adapter. `options`: the content of adapter_config.json. `tensors`: the
    names of the adapter's tensors. `ends_in`: the models whose embeddings may have adapters."""
    found = [f"no {what}" for option, what in REFUSED.items() if options.get(option)]
    if options.get("bias", "none") != "none":
        found.append("no trained biases")
    if max_rank(int(options.get("r") or 0)) is None:
        found.append(f"no rank above {MAX_RANKS[-1]}")
    if (init := options.get("init_lora_weights")) in ("pissa", "olora"):
        found.append(f"no {init}: it does not take the first factors out of the base")
    adapted = {name.rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    if any("experts" in module.split(".") for module in adapted):
        found.append("no adapters of experts in peft's layout")
    if ends := sorted({module.rpartition(".")[2] for module in adapted} & {*EMBEDDINGS}):
        found.append(f"adapters of {' and '.join(ends)} only in {ends_in}")
    return found


def refusals_of(folder: Path, ends_in: str = ENDS_IN, **served: Any) -> list[str]:
    """refusals() of the adapter in `folder`. `served`: values in place of options that a server computes."""
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return refusals(read_json(folder / "adapter_config.json") | served, list(file.keys()), ends_in)


def rope_types(config: Mapping[str, Any]) -> set[str]:
    """The kinds of scaled RoPE in `config`, the content of a config.json; empty without scaling."""
    parameters = (config.get("text_config") or config).get("rope_parameters") or {}
    # A model has one set of parameters, or a set for each type of layer.
    sets = [values for values in (parameters, *parameters.values()) if isinstance(values, dict)]
    return {values.get("rope_type", "default") for values in sets} - {"default"}


def rope_overrides(config: Mapping[str, Any], positions: int) -> str:
    """The value of --hf-overrides that gives a base the RoPE of `config`, the content of config.json beside an
    adapter. `positions`: up to which the RoPE reaches."""
    rope = (config.get("text_config") or config)["rope_parameters"]
    scaling = {"rope_parameters": rope}
    if rope.get("rope_type") == "llama3":  # for other types vLLM itself multiplies the base's length by the factor
        scaling["max_position_embeddings"] = positions
    return json.dumps({"text_config": scaling} if "text_config" in config else scaling)
