"""What the rest of fxtune asks a kind of model: how it is read, where its parts are, and what a small input of it is.

All families of one auto class of transformers are one kind. Decoders that predict the next token of a text
(AutoModelForCausalLM) are one kind, whether Llama or Qwen; their class is the base of the others. Decoders that also
read images are another kind, with parts beside the decoder (image_decoder/). A head that gives a number for a document
makes a third kind (scorer.py): it has its own auto class, and `architectures` in its config names its class.

Some checkpoints of AutoModelForCausalLM also hold an encoder of images or sound (Gemma 3n). Their text model is
trained, and the files that prepare images go into an export as they are.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError
from fxtune.models.kinds.beside import Beside
from fxtune.models.kinds.image_decoder.families import FAMILIES as IMAGE_FAMILIES
from fxtune.models.kinds.image_decoder.images import Images

PROCESSORS = "*processor_config.json"
"""The files with which a model prepares images."""


class Decoder:
    head: str = "lm"
    """The name of the head that objectives need (Needs.head): `lm` gives log-probabilities of tokens, `score` a number
    for a document."""
    adapter_task: str = "CAUSAL_LM"
    """peft's name (TaskType) of what adapters of such models are for."""
    gives: str = "log-probabilities of tokens"
    """What the head gives, for messages."""
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
    mapping: str = "MODEL_FOR_CAUSAL_LM_MAPPING"
    """The name of transformers' table of their classes."""
    images: Images | None = None
    """What such models know about images; None: they read tokens alone."""
    tokenizer_class: str = "AutoTokenizer"
    """The name of the class that reads the tokenizer."""
    pipeline_tag: str = "text-generation"
    """The hub's name of what models of this kind do."""

    @property
    def classes(self) -> dict[str, str]:
        """The names of transformers' classes of such models, by `model_type`."""
        from transformers.models.auto import modeling_auto

        return dict(getattr(modeling_auto, f"{self.mapping}_NAMES"))

    @property
    def families(self) -> Collection[str]:
        """The values of `model_type` that this transformers has."""
        return self.classes

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

    def check(self, config: Any, name: str) -> None:
        """Raise ConfigError, which begins with `name`, for a model of this kind that fxtune cannot train."""

    def made_from(self, config: Any, kind: Decoder, name: str) -> Any:
        """A config of this kind for the body of a model of another `kind`. Raises ConfigError, which begins with
        `name`, if there is none."""
        raise ConfigError(
            f"{name} gives {kind.gives} ({config.architectures[0]}) and no log-probabilities of tokens. Use the model "
            f"that it was made from, or an objective for its head: {kind.head}."
        )

    @property
    def auto(self) -> Any:
        """transformers' auto class."""
        import transformers

        return getattr(transformers, self.auto_class)

    def model_class(self, config_class: type) -> Any:
        """The class of models with configs of this class. Raises KeyError if there is none."""
        import transformers

        return getattr(transformers, self.mapping)[config_class]

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

    def beside_text(self, model: Any) -> list[nn.Parameter]:
        """The parameters of a model without adapters that no text reaches: outside of its decoder and head."""
        parts = [part for part in (self.backbone(model), self.head_of(model)) if part is not None]
        reached = {id(parameter) for part in parts for parameter in part.parameters()}
        return [parameter for parameter in model.parameters() if id(parameter) not in reached]

    def beside(self, model: Any) -> Beside:
        """What the parts of a model without adapters beside its decoder and head cost."""
        return Beside(sum(weight.numel() for weight in self.beside_text(model)))

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """What the head makes of each token, [rows, tokens, numbers]. `model`: with adapters or without."""
        logits: torch.Tensor = model(**inputs).logits
        return logits

    def drawn_weights(self, missing: Collection[str]) -> list[str]:
        """The weights, of those `missing` in a base's files, that training draws at random."""
        return []

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        """The weights that this kind leaves out, of the `unexpected` weights that only a base's files have."""
        return []

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
        the folder `source`, or from the model's own folder if `source` lacks the files. Raises OSError."""
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
