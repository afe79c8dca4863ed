"""The parts of a Hugging Face causal language model: its decoder, its layers, and the same model without weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    pass


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal language model, first to last, adapters or not: what one checkpoints and compiles."""
    depth = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    raise AssertionError(f"{type(model).__name__} has no list of {depth} layers")


def skeleton(config: dict[str, Any]) -> nn.Module | None:
    """The model of this config (`Facts.model`) without its weights, or None where only the author's own code can build it.

    To be read only: whoever asks for the same config gets the same model.
    """
    from transformers import CONFIG_MAPPING

    return (
        _skeleton(json.dumps(config, sort_keys=True, default=str))
        if config.get("model_type") in CONFIG_MAPPING
        else None
    )


@functools.lru_cache(maxsize=4)
def _skeleton(architecture: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = json.loads(architecture)
    kind = values.pop("model_type")
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values))
    return model


def backbone(model: nn.Module) -> nn.Module:
    """The decoder inside a causal language model, adapters or not: tokens in, the last hidden states out, no head."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    found: nn.Module = base.get_decoder()
    return found


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """How many weights each parameter stands for, by its name.

    That is not its size where bitsandbytes packs two weights into a byte, or where a fused group of adapted linears keeps room
    for the adapters beside its weights (techniques/lora/frozen_weights.py).
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
    """Look at a model without changing it: no dropout, and the training flag and the random state as before."""
    was_training = model.training
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)
