"""Tiny mixtures of experts with random weights, and rows for them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from support.architectures import ARCHITECTURES, SIZES

from fxtune.data.batches.batch import BatchSpec, build_batch
from fxtune.models.load import Init, ModelConfig

WIDTHS = {**SIZES, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 1}


def _without(*names: str) -> dict[str, int]:
    return {name: size for name, size in WIDTHS.items() if name not in names}


MORE = {
    "glm4_moe": {
        **WIDTHS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 16,
    },
    "granitemoe": {**_without("moe_intermediate_size"), "num_local_experts": 4},
    "olmoe": {**_without("moe_intermediate_size"), "num_experts": 4},
    "qwen2_moe": {**WIDTHS, "num_experts": 4, "shared_expert_intermediate_size": 48},
}


SIZES = "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 1024"
QWEN3_MOE = (
    f"model.architecture={{model_type: qwen3_moe, {SIZES}, head_dim: 16, num_experts: 6, num_experts_per_tok: 2, "
    "moe_intermediate_size: 32}"
)
GPT_OSS = (
    f"model.architecture={{model_type: gpt_oss, {SIZES}, head_dim: 16, intermediate_size: 48, num_local_experts: 4, "
    "num_experts_per_tok: 2}"
)
ON_EXPERTS = ("techniques.lora.target_modules=[all-linear]", "techniques.checkpointing.enabled=true")
"""Words of commands: models, and what trains adapters of their experts."""


def mixture(kind: str, **changes) -> ModelConfig:
    values = {**(MORE.get(kind) or ARCHITECTURES.get(kind) or {}), **changes}
    return ModelConfig(path=None, init=Init.random, architecture={"model_type": kind, **values})


def uneven(model):
    """The model with larger weights, so that routing and experts matter, and adapters that do something."""
    for name, parameter in model.named_parameters():
        draw = torch.Generator().manual_seed(len(name))
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=draw)
        elif "lora_" not in name and (parameter.dim() > 1 or "bias" in name):
            parameter.data.normal_(std=0.1, generator=draw)
    return model


def batch(lengths=(9, 14), packed=False, seed=0):
    """One row a document with padding, or all in one row."""
    draw = np.random.default_rng(seed)
    table = SimpleNamespace(
        images=None,
        ids=draw.integers(3, 128, sum(lengths)).astype(np.int32),
        supervised=draw.random(sum(lengths)) < 0.6,
        stored=None,
    )
    rows = np.array([0, len(lengths)]) if packed else np.arange(len(lengths) + 1)
    width = sum(lengths) if packed else max(lengths) + 2
    return build_batch(
        [table],
        BatchSpec(
            np.zeros(len(lengths), np.int64), np.cumsum([0, *lengths[:-1]]), np.array(lengths), rows, width,
            packed=packed, pad_id=0, slots=len(lengths) + 1,
        ),
    )  # fmt: skip
