"""What the rest of fxtune asks a kind of model: how it is read, where its parts are, and what a small input of it is.

A kind is what is alike in all families of one auto class of transformers. Decoders that predict the next token of a
text (AutoModelForCausalLM) are one kind, whether Llama or Qwen, and the base of the others. Decoders that also read
images are another kind, with parts beside the decoder (image_decoder.py). A head that gives a number for a document
makes another kind, too (scorer.py): it has another auto class, and `architectures` in its config names its class.

Some checkpoints of AutoModelForCausalLM also hold an encoder of images or sound (Gemma 3n). Their text model is
trained, and the files that prepare images go into an export as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.models.kinds.image_families import FAMILIES as IMAGE_FAMILIES
from fxtune.models.kinds.tower_shape import TowerShape

PROCESSORS = "*processor_config.json"
"""The files with which a model prepares images."""


class Decoder:
    head: str = "lm"
    """What the head gives: `lm`, log-probabilities of tokens, or `score`, a number for a document."""
    adapter_task: str = "CAUSAL_LM"
    """peft's name (TaskType) of what adapters of such models are for."""
    use: str = ""
    """Markdown for the model card: how to use a loaded model."""
    writes: bool = True
    """Whether models of this kind write text."""
    trains_head: bool = False
    """Whether the head is new, so that a run with adapters trains it, too, whole."""
    pads_by_token: bool = False
    """Whether a plain forward pass tells padding by its token, so that the config must name it."""
    auto_class: str = "AutoModelForCausalLM"
    """The name of transformers' auto class, which makes models of this kind from a config or a folder."""
    reads_images: bool = False
    """Whether models of this kind read images beside tokens."""
    tokenizer_class: str = "AutoTokenizer"
    """The name of the class that reads the tokenizer."""
    pipeline_tag: str = "text-generation"
    """The hub's name of what models of this kind do."""

    @property
    def families(self) -> Collection[str]:
        """The values of `model_type` that this transformers has."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def why_not(self, family: str) -> str:
        """Why a model of this `model_type` is not of this kind, as the end of a sentence."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES

        if family in WITH_IMAGES:
            known = ", ".join(sorted(IMAGE_FAMILIES))
            return f"which fxtune has not compared with plain transformers. Of models with images it trains {known}"
        return "which is no causal language model"

    def takes(self, config: Any, own_code: bool = True) -> bool:
        """Whether a model of this config is of this kind. `own_code`: whether code that the model's author
        ships counts."""
        in_own_code = self.auto_class in (getattr(config, "auto_map", None) or {})
        return config.model_type in self.families or (own_code and in_own_code)

    @property
    def auto(self) -> Any:
        """transformers' auto class."""
        import transformers

        return getattr(transformers, self.auto_class)

    def model_class(self, config_class: type) -> Any:
        """The class of models with configs of this class. Raises KeyError if there is none."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        return MODEL_FOR_CAUSAL_LM_MAPPING[config_class]

    def read_tokenizer(self, folder: Path, trust_remote_code: bool) -> Any:
        """The tokenizer in `folder`. Raises what transformers raises."""
        import transformers

        return getattr(transformers, self.tokenizer_class).from_pretrained(folder, trust_remote_code=trust_remote_code)

    def backbone(self, model: Any) -> nn.Module:
        """The part of a model without adapters that makes hidden states of tokens: its decoder, without a head."""
        decoder = _decoder(model)
        if decoder is model:  # Llama 4 names the whole model as its decoder
            layers = _layer_lists(model, model.config)[0]
            decoder = next(module for module in model.modules() if layers in module.children())
        return decoder

    def body(self, model: Any) -> nn.Module:
        """The part of a model without adapters that makes hidden states of tokens and images: all but the head."""
        return self.backbone(model)

    def layers(self, model: Any) -> list[nn.Module]:
        """The decoder layers of a model without adapters, first to last."""
        return [layer for layers in _layer_lists(_decoder(model), model.config) for layer in layers]

    def head_of(self, model: Any) -> nn.Module | None:
        """The head of a model without adapters; None if nothing comes after the backbone."""
        head: nn.Module | None = model.get_output_embeddings()
        return head

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """What the head makes of each token, [rows, tokens, numbers]. `model`: with adapters or without."""
        logits: torch.Tensor = model(**inputs).logits
        return logits

    def drawn_weights(self, missing: Collection[str]) -> list[str]:
        """Those of the weights that are `missing` in a base's files that training begins with drawn ones."""
        return []

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        """Those of the weights that only a base's files have that this kind leaves out."""
        return []

    def towers(self, model: Any) -> list[nn.Module]:
        """The modules of a model without adapters that make features of images."""
        return []

    def tower_layers(self, model: Any) -> list[nn.Module]:
        """The layers of towers() of a model without adapters, first to last."""
        return []

    def projectors(self, model: Any) -> list[nn.Module]:
        """The modules of a model without adapters between its vision encoders, or inside them, and its decoder."""
        return []

    def tower_configs(self, config: Any) -> list[Any]:
        """The configs of towers() in a model's config."""
        return []

    def tower_shape(self, config: Any) -> TowerShape | None:
        """What the vision encoder of a model of this config computes for an image; None: the model reads no images."""
        return None

    def positions(self, config: Any, position_ids: torch.Tensor, rope_positions: torch.Tensor | None) -> torch.Tensor:
        """What forward() takes as positions, from Batch.position_ids [rows, tokens] and Batch.rope_positions."""
        return position_ids

    def rope_positions(self, config: Any) -> Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor] | None:
        """For families with M-RoPE: from the ids of a document, int64 [tokens], and the tensors of its images to
        int64 [3, tokens]. Picklable."""
        return None

    def merge(self, config: Any) -> Callable[[Sequence[dict[str, torch.Tensor]]], dict[str, torch.Tensor]]:
        """From the tensors of the images of each document to the tensors of a micro-batch. Picklable."""
        raise NotImplementedError(f"{type(self).__name__} reads no images")

    def pixel_dtype(self, config: Any, weights: torch.dtype) -> torch.dtype:
        """The dtype in which pixels can be delivered to a model with such weights for the same bits as in float32."""
        return torch.float32

    def divided_images(
        self, model: Any, images: dict[str, torch.Tensor], documents: Sequence[torch.Tensor]
    ) -> list[dict[str, torch.Tensor]]:
        """The tensors of each document's images, from merge() of them all: {} for a document without images.
        `documents`: the ids of each. The model runs its vision encoder to count the features of the images."""
        return [{} for _ in documents]

    def token_types(self, config: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a plain forward pass of this family must be told about `ids` with images, as its processor would."""
        return {}

    def sees_both_ways(self, config: Any) -> bool:
        """Whether the tokens of an image see each other: image_blocks() is not None."""
        return False

    def image_blocks(self, config: Any, ids: torch.Tensor) -> torch.Tensor | None:
        """int64 [rows, tokens]: a number for the tokens of each image, which see each other, and 0 for text. None:
        attention is causal in images, too."""
        return None

    def image_features(self, model: Any, images: int = 1) -> list[torch.Tensor]:
        """What the vision encoders and projectors make of small images, all alike: the tensors that the decoder gets.
        The model, without adapters or with adapters, must have weights."""
        return []

    def image_row(self, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A small row with one image on the model's device: ids [1, tokens], and the tensors of the image. The vision
        encoder must have weights."""
        raise NotImplementedError(f"{type(self).__name__} reads no images")

    def image_probe(self, model: Any) -> dict[str, torch.Tensor]:
        """The arguments of a plain forward pass over image_row(). Empty if the model reads no images, its vision
        encoder takes no small image, or its weights have no memory yet."""
        return {}

    def small_row(self, model: Any, tokens: int, spread: bool = True) -> dict[str, torch.Tensor]:
        """The inputs of a small row for proofs, on the model's device: `input_ids` int64 [1, tokens], and what else a
        forward pass needs beside positions and masks. `spread`: ids from all over the vocabulary; False: the first."""
        ids = torch.arange(tokens, device=next(model.parameters()).device)
        ids = (ids * 7919 + 3 if spread else ids) % model.config.get_text_config().vocab_size
        return {"input_ids": ids.unsqueeze(0)}

    def untrained_parts(self, config: Any) -> str:
        """A line on the parts that full fine-tuning leaves as they are; empty if there are none."""
        if config.get_text_config() is config:
            return ""
        return "its decoder and head are trained; parts for images or sound stay as they are"

    def write_beside(self, config: Any, folder: Path, source: Path | None = None) -> None:
        """Write into the folder of an exported whole model what it needs beside weights, config and tokenizer, from
        the folder `source` or, if that has none of it, from the model's own. Raises OSError."""
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
