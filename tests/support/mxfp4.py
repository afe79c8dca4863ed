"""Checkpoints whose experts are stored in MXFP4, as gpt-oss ships its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of e2m1, by their codes."""


def in_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Store random experts in `folder` as gpt-oss ships its own, and return what they are, by their names."""
    meant, tensors = {}, load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
        scales = torch.randint(118, 123, (experts, outputs, inputs // 32))
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
        meant[name] = (FP4[codes] * 2.0 ** (scales - 127).unsqueeze(-1)).flatten(2).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant
