"""Small checkpoints of hybrid models as they are released: weights in bfloat16, states in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.model_table import small_models

PRECISE = (
    "A_log",
    "dt_bias",
    ".D",
    "mamba.norm.weight",
    "mixer.norm.weight",
    "linear_attn.norm.weight",
    "o_norm.weight",
)
"""Ends of the names of tensors that these checkpoints store in float32."""


def hybrid(
    kind: str,
    folder: Path,
    shards: int = 1,
    extra: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, int] | None = None,
    **keys: Any,
) -> Path:
    """Write a small model of this type, with `shards` files. `extra`: tensors that the model lacks; `sizes`: those of
    its config that differ from small(); `keys`: more keys in config.json."""
    small = small_models.small(kind)
    small_models.write({**small, **{key: size for key, size in (sizes or {}).items() if key in small}}, folder)
    (file,) = folder.glob("*.safetensors")
    stored = tensors(folder)
    stored = {name: of.float() if name.endswith(PRECISE) else of.bfloat16() for name, of in stored.items()}
    stored |= extra or {}
    if shards == 1:
        save_file(stored, file, {"format": "pt"})
    else:
        file.unlink()
        index: dict[str, str] = {}
        for number in range(shards):
            own = dict(sorted(stored.items())[number::shards])
            name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            save_file(own, folder / name, {"format": "pt"})
            index |= dict.fromkeys(own, name)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **keys}))
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the safetensors files of a folder."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def precise(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that hybrid() stores in float32."""
    return {name: of for name, of in tensors(folder).items() if name.endswith(PRECISE)}
