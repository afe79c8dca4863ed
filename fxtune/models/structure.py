"""The parts of a Hugging Face causal language model: its decoder, its layers, and the same model without weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal language model, with or without adapters, first to last."""
    depth = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")


def skeleton(config: dict[str, Any]) -> nn.Module | None:
    """The model of this config (`Facts.model`) on the meta device; None if transformers has no code for it.

    Do not change it: every caller with the same config gets the same model.
    """
    from transformers import CONFIG_MAPPING

    known = config.get("model_type") in CONFIG_MAPPING
    return _skeleton(json.dumps(config, sort_keys=True, default=str)) if known else None


@functools.lru_cache(maxsize=4)
def _skeleton(architecture: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = json.loads(architecture)
    kind = values.pop("model_type")
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    return model


def backbone(model: nn.Module) -> nn.Module:
    """The decoder of a causal language model, with or without adapters: tokens in, last hidden states out, no head."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    found: nn.Module = base.get_decoder()
    return found


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """The number of weights that each parameter represents, by its name.

    This differs from its size if bitsandbytes packs two weights into a byte, or if a fused group of adapted linears
    reserves rows for the adapters next to its weights (techniques/lora/frozen_weights.py).
    """
    known: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            packed = getattr(parameter, "quant_state", None)
            size = math.prod(packed.shape) if packed is not None else parameter.numel()
            known.setdefault(id(parameter), getattr(module, "weight_count", size))
    return {name: known[id(parameter)] for name, parameter in model.named_parameters()}


@contextmanager
def observed(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, and restore the training flag and the random state afterwards."""
    was_training = model.training
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)
