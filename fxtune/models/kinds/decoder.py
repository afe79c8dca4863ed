"""Decoders that predict the next token of a text: AutoModelForCausalLM of transformers.

Some checkpoints of this auto class also hold a tower for images or sound (Gemma 3n). Their text model is trained, and
the files that prepare images go into an export as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.models.kinds.base import Kind
from fxtune.models.kinds.image_families import FAMILIES as IMAGE_FAMILIES

PROCESSORS = "*processor_config.json"
"""The files with which a model prepares images."""


class Decoder(Kind):
    head = "lm"
    adapter_task = "CAUSAL_LM"
    auto_class = "AutoModelForCausalLM"
    pipeline_tag = "text-generation"

    @property
    def families(self) -> Collection[str]:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def why_not(self, family: str) -> str:
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES

        if family in WITH_IMAGES:
            known = ", ".join(sorted(IMAGE_FAMILIES))
            return f"which fxtune has not compared with plain transformers. Of models with images it trains {known}"
        return "which is no causal language model"

    def model_class(self, config_class: type) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        return MODEL_FOR_CAUSAL_LM_MAPPING[config_class]

    def backbone(self, model: Any) -> nn.Module:
        decoder = _decoder(model)
        if decoder is model:  # Llama 4 names the whole model as its decoder
            layers = _layer_lists(model, model.config)[0]
            decoder = next(module for module in model.modules() if layers in module.children())
        return decoder

    def layers(self, model: Any) -> list[nn.Module]:
        return [layer for layers in _layer_lists(_decoder(model), model.config) for layer in layers]

    def head_of(self, model: Any) -> nn.Module | None:
        head: nn.Module | None = model.get_output_embeddings()
        return head

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = model(**inputs).logits
        return logits

    def small_row(self, model: Any, tokens: int, spread: bool = True) -> dict[str, torch.Tensor]:
        ids = torch.arange(tokens, device=next(model.parameters()).device)
        ids = (ids * 7919 + 3 if spread else ids) % model.config.get_text_config().vocab_size
        return {"input_ids": ids.unsqueeze(0)}

    def untrained_parts(self, config: Any) -> str:
        if config.get_text_config() is config:
            return ""
        return "its decoder and head are trained; parts for images or sound stay as they are"

    def write_beside(self, config: Any, folder: Path, source: Path | None = None) -> None:
        own = Path(str(getattr(config, "name_or_path", "") or ""))
        folders = [*([source] if source else []), *([own] if (own / "config.json").is_file() else [])]
        files = next((found for each in folders if (found := list(each.glob(PROCESSORS)))), [])
        for file in files:
            shutil.copyfile(file, folder / file.name)


def _layer_lists(decoder: nn.Module, config: Any) -> list[nn.ModuleList]:
    """The lists of layers in a decoder: the list with `num_hidden_layers` entries. Where `num_hidden_layers` counts
    something else (passes through a layer in HRM, attentions in LongCat), the largest lists of one class."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module)]
    depth = getattr(config.get_text_config(), "num_hidden_layers", None)
    if matching := [layers for layers in lists if len(layers) == depth]:
        return matching[:1]
    inner = {id(part) for layers in lists for layer in layers for part in layer.modules()}
    outer = [layers for layers in lists if id(layers) not in inner]
    assert outer, f"{type(decoder).__name__} has no list of layers"
    largest = max(outer, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))
    return [layers for layers in outer if type(layers[0]) is type(largest[0])]


def _decoder(model: Any) -> nn.Module:
    """The module of `get_decoder()`; the base model where `get_decoder()` returns the head (ModernBERT)."""
    decoder: nn.Module = model.get_decoder()
    has_layers = any(isinstance(module, nn.ModuleList) for module in decoder.modules())
    return decoder if has_layers else model.base_model
