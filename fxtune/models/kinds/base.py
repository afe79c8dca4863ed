"""What the rest of fxtune asks a kind of model: how it is read, where its parts are, and what a small input of it is.

A kind is what is alike in all families of one auto class of transformers: decoders of text are one kind, whether Llama
or Qwen. Decoders that also read images are another kind, with parts beside the decoder (image_decoder.py). A head that
gives a number for a document makes another kind, too (scorer.py): it has another auto class, and `architectures` in
its config names its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.models.kinds.tower_shape import TowerShape


class Kind(ABC):
    head: str
    """What the head gives: `lm`, log-probabilities of tokens, or `score`, a number for a document."""
    adapter_task: str
    """peft's name (TaskType) of what adapters of such models are for."""
    use: str = ""
    """Markdown for the model card: how to use a loaded model."""
    writes: bool = True
    """Whether models of this kind write text."""
    trains_head: bool = False
    """Whether the head is new, so that a run with adapters trains it, too, whole."""
    pads_by_token: bool = False
    """Whether a plain forward pass tells padding by its token, so that the config must name it."""
    auto_class: str
    """The name of transformers' auto class, which makes models of this kind from a config or a folder."""
    reads_images: bool = False
    """Whether models of this kind read images beside tokens."""
    tokenizer_class: str = "AutoTokenizer"
    """The name of the class that reads the tokenizer."""
    pipeline_tag: str
    """The hub's name of what models of this kind do."""

    @property
    @abstractmethod
    def families(self) -> Collection[str]:
        """The values of `model_type` that this transformers has."""

    @abstractmethod
    def why_not(self, family: str) -> str:
        """Why a model of this `model_type` is not of this kind, as the end of a sentence."""

    def is_in_own_code(self, config: Any) -> bool:
        """Whether the author of the model of this config ships code for it that is of this kind."""
        return self.auto_class in (getattr(config, "auto_map", None) or {})

    def takes(self, config: Any, own_code: bool = True) -> bool:
        """Whether a model of this config is of this kind. `own_code`: whether the author's code counts."""
        return config.model_type in self.families or (own_code and self.is_in_own_code(config))

    @property
    def auto(self) -> Any:
        """transformers' auto class."""
        import transformers

        return getattr(transformers, self.auto_class)

    @abstractmethod
    def model_class(self, config_class: type) -> Any:
        """The class of models with configs of this class. Raises KeyError if there is none."""

    def read_tokenizer(self, folder: Path, trust_remote_code: bool) -> Any:
        """The tokenizer in `folder`. Raises what transformers raises."""
        import transformers

        return getattr(transformers, self.tokenizer_class).from_pretrained(folder, trust_remote_code=trust_remote_code)

    @abstractmethod
    def backbone(self, model: Any) -> nn.Module:
        """The part of a model without adapters that makes hidden states of tokens: its decoder, without a head."""

    def body(self, model: Any) -> nn.Module:
        """The part of a model without adapters that makes hidden states of tokens and images: all but the head."""
        return self.backbone(model)

    @abstractmethod
    def layers(self, model: Any) -> list[nn.Module]:
        """The decoder layers of a model without adapters, first to last."""

    @abstractmethod
    def head_of(self, model: Any) -> nn.Module | None:
        """The head of a model without adapters; None if nothing comes after the backbone."""

    @abstractmethod
    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """What the head makes of each token, [rows, tokens, numbers]. `model`: with adapters or without."""

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
        """The modules of a model without adapters between its towers, or inside them, and its decoder."""
        return []

    def tower_configs(self, config: Any) -> list[Any]:
        """The configs of towers() in a model's config."""
        return []

    def tower_shape(self, config: Any) -> TowerShape | None:
        """What the tower of a model of this config computes for an image; None: the model reads no images."""
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
        `documents`: the ids of each. The model runs its tower to count the features of the images."""
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
        """What the towers and projectors make of small images, all alike: the tensors that the decoder gets. The
        model, without adapters or with adapters, must have weights."""
        return []

    def image_row(self, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A small row with one image on the model's device: ids [1, tokens], and the tensors of the image. The tower
        must have weights."""
        raise NotImplementedError(f"{type(self).__name__} reads no images")

    def image_probe(self, model: Any) -> dict[str, torch.Tensor]:
        """The arguments of a plain forward pass over image_row(). Empty if the model reads no images, its tower takes
        no small image, or its weights have no memory yet."""
        return {}

    @abstractmethod
    def small_row(self, model: Any, tokens: int, spread: bool = True) -> dict[str, torch.Tensor]:
        """The inputs of a small row for proofs, on the model's device: `input_ids` int64 [1, tokens], and what else a
        forward pass needs beside positions and masks. `spread`: ids from all over the vocabulary; False: the first."""

    @abstractmethod
    def untrained_parts(self, config: Any) -> str:
        """A line on the parts that full fine-tuning leaves as they are; empty if there are none."""

    @abstractmethod
    def write_beside(self, config: Any, folder: Path, source: Path | None = None) -> None:
        """Write into the folder of an exported whole model what it needs beside weights, config and tokenizer, from
        the folder `source` or, if that has none of it, from the model's own. Raises OSError."""
