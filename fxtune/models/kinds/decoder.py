"""The kinds of models: how models of a kind are read, where their parts are, and what a small input looks like.

All families of one auto class of transformers are one kind. Decoders that predict the next token of a text
(AutoModelForCausalLM) are one kind, whether Llama or Qwen. Their class here, Decoder, is the base class of the other
kinds. Decoders that also read images are another kind, with parts beside the decoder (image_decoder/). Models whose
head gives a number for a document are a third kind (scorer.py), with an auto class of their own.

Some checkpoints of AutoModelForCausalLM also hold an encoder of images or sound (Gemma 3n). Their text model is
trained, and the files that prepare images go into an export as they are.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection
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
    for a document, `pool` a vector for a document."""
    adapter_task: str = "CAUSAL_LM"
    """peft's name (TaskType) for the task of adapters on such models."""
    gives: str = "log-probabilities of tokens"
    """The output of the head, for messages."""
    writes: bool = True
    """Whether models of this kind write text."""
    bidirectional: bool = False
    """Whether each token of a document also attends to the later ones."""
    task_tells_head: bool = False
    """Whether peft's task in an adapter's files tells that the model has this head. The adapter then needs no
    config.json for it. transformers loads no adapter beside a config.json."""
    trains_head: bool = False
    """Whether the head is new. A run with adapters then also trains the whole head."""
    pads_by_token: bool = False
    """Whether a plain forward pass recognizes padding by its token. The config must then name the padding token."""
    auto_class: str = "AutoModelForCausalLM"
    """The name of transformers' auto class that makes models of this kind from a config or a folder."""
    mapping: str = "MODEL_FOR_CAUSAL_LM_MAPPING"
    """The name of transformers' table of the classes of such models."""
    images: Images | None = None
    """How such models read images; None: they read tokens alone."""
    tokenizer_class: str = "AutoTokenizer"
    """The name of the class that reads the tokenizer."""
    pipeline_tag: str = "text-generation"
    """The hub's name for the task of models of this kind."""

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
        """Whether a model of this config is of this kind. `own_code`: whether a model that runs only with code of its
        author counts."""
        in_own_code = self.auto_class in (getattr(config, "auto_map", None) or {})
        return config.model_type in self.families or (own_code and in_own_code)

    def check(self, config: Any, name: str) -> None:
        """Raise ConfigError for a model of this kind that fxtune cannot train. The message begins with `name`."""

    def made_from(self, config: Any, kind: Decoder, name: str) -> Any:
        """A config of this kind for the body of a model of another `kind`. Raises ConfigError if such a body has no
        config of this kind. The message begins with `name`."""
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
        """The class of models with configs of `config_class`. Raises KeyError if no model of this kind has such
        configs."""
        import transformers

        return getattr(transformers, self.mapping)[config_class]

    def read_tokenizer(self, folder: Path, trust_remote_code: bool, **options: Any) -> Any:
        """The tokenizer in `folder`, with these `options`. Raises whatever error transformers raises."""
        import transformers

        read = getattr(transformers, self.tokenizer_class).from_pretrained
        return read(folder, trust_remote_code=trust_remote_code, **options)

    def backbone(self, model: Any) -> nn.Module:
        """The part of a model without adapters that makes hidden states of tokens: its decoder, without a head."""
        decoder = _decoder(model)
        if decoder is model:  # get_decoder() of Llama 4 returns the whole model
            layers = layer_lists(model, model.config)[0]
            decoder = next(module for module in model.modules() if layers in module.children())
        return decoder

    def body(self, model: Any) -> nn.Module:
        """The part of a model without adapters that makes hidden states of tokens and images: everything except the
        head."""
        return self.backbone(model)

    def layers(self, model: Any) -> list[nn.Module]:
        """The decoder layers of a model without adapters, first to last."""
        return [layer for layers in layer_lists(_decoder(model), model.config) for layer in layers]

    def head_of(self, model: Any) -> nn.Module | None:
        """The head of a model without adapters; None if nothing comes after the backbone."""
        return model.get_output_embeddings()

    def beside_text(self, model: Any) -> list[nn.Parameter]:
        """The parameters of a model without adapters that no text reaches. They are outside of its decoder and
        head."""
        parts = [part for part in (self.backbone(model), self.head_of(model)) if part is not None]
        reached = {id(parameter) for part in parts for parameter in part.parameters()}
        return [parameter for parameter in model.parameters() if id(parameter) not in reached]

    def beside(self, model: Any) -> Beside:
        """The cost of the parts of `model` beside its decoder and head. `model`: without adapters."""
        return Beside(sum(weight.numel() for weight in self.beside_text(model)))

    def head_modules(self, config: Any) -> tuple[str, ...]:
        """The names of modules that are trained whole beside adapters. `score` is among them without being named."""
        return ()

    def first_position(self, config: Any) -> int:
        """The position of a document's first token."""
        return 0

    def masks(self, config: Any, mask: Callable[[int], torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor]:
        """The `attention_mask` of a bidirectional model for packed documents. `mask`: returns the mask for a window
        (0: no window), in tokens to each side, the token itself included."""
        return mask(0)

    def numbers(self, model: Any, states: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The numbers of a `score` head for documents, float32 [documents, numbers].

        `states` [tokens, d]: the backbone's result. `first`, `last`: int64 [documents], the index of each document's
        first and last token. `model`: the base model inside adapters.
        """
        raise NotImplementedError

    def outputs(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The head's numbers for each token, [rows, tokens, numbers]. `model`: with adapters or without."""
        return model(**inputs).logits

    def drawn_weights(self, missing: Collection[str]) -> list[str]:
        """The weights that training draws at random, among the weights `missing` in a base's files."""
        return []

    def unused_weights(self, unexpected: Collection[str]) -> list[str]:
        """The weights that this kind leaves out, among the `unexpected` weights: those in a base's files that the
        model lacks."""
        return []

    def use(self, labels: list[str]) -> str:
        """Markdown for the model card: how to use a loaded model. `labels`: the names of the head's numbers."""
        return ""

    def small_row(self, model: Any, tokens: int, spread: bool = True) -> dict[str, torch.Tensor]:
        """The inputs of a small row for proofs, on the model's device: `input_ids` int64 [1, tokens], and other inputs
        that a forward pass needs, except positions and masks. `spread`: ids from the whole vocabulary; False: the
        first ids."""
        ids = torch.arange(tokens, device=next(model.parameters()).device)
        ids = (ids * 7919 + 3 if spread else ids) % model.config.get_text_config().vocab_size
        return {"input_ids": ids.unsqueeze(0)}

    def untrained_parts(self, config: Any) -> str:
        """A line on the parts that full fine-tuning does not change; empty if it changes all parts."""
        if config.get_text_config() is config:
            return ""
        return "its decoder and head are trained; parts for images or sound stay as they are"

    def write_beside(self, config: Any, folder: Path, source: Path | None = None) -> None:
        """Copy the files that an exported whole model needs beside weights, config and tokenizer. They come from the
        folder `source`, or from the model's own folder if `source` lacks them. Raises OSError."""
        own = Path(str(getattr(config, "name_or_path", "") or ""))
        folders = [*([source] if source else []), *([own] if (own / "config.json").is_file() else [])]
        files = next((found for each in folders if (found := list(each.glob(PROCESSORS)))), [])
        for file in files:
            shutil.copyfile(file, folder / file.name)


class OtherHead(Decoder):
    """Decoders of text with another head. transformers has a class of such models, which `architectures` names."""

    @property
    def families(self) -> Collection[str]:
        return self.classes.keys() & Decoder().families

    def takes(self, config: Any, own_code: bool = True) -> bool:
        known = self.classes.get(config.model_type)
        return config.model_type in self.families and known in (config.architectures or ())

    def made_from(self, config: Any, kind: Decoder, name: str) -> Any:
        family = config.model_type
        if family not in self.families:
            raise ConfigError(f"{name} is a {family} model, {self.why_not(family)}. Use another.")
        config = copy.deepcopy(config)
        config.architectures = [self.classes[family]]
        return config


def layer_lists(decoder: nn.Module, config: Any) -> list[nn.ModuleList]:
    """The lists of layers in a decoder: the list with `num_hidden_layers` entries. If no list has that length, the
    largest list and the lists with layers of the same class. HRM counts passes through a layer there, LongCat counts
    attentions."""
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
    """The module of `get_decoder()`, or the base model if `get_decoder()` returns the head (ModernBERT)."""
    decoder: nn.Module = model.get_decoder()
    has_layers = any(isinstance(module, nn.ModuleList) for module in decoder.modules())
    return decoder if has_layers else model.base_model
