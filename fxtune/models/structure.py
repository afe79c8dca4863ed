"""The parts of a Hugging Face model: its decoder, its layers, and the same model without weights."""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxtune.distributed.chunks import LinearWeights
from fxtune.errors import ConfigError, first_line
from fxtune.models.kinds.known import kind_of
from fxtune.system.process.oom import out_of_memory_reason


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model, with or without adapters, first to last."""
    base = _base(model)
    return kind_of(base.config).layers(base)


def backbone(model: nn.Module) -> nn.Module:
    """The decoder of a model, with or without adapters. It makes hidden states and includes neither head nor vision
    encoder."""
    base = _base(model)
    return kind_of(base.config).backbone(base)


def body(model: nn.Module) -> nn.Module:
    """All of a model except its head, with or without adapters. It makes hidden states of tokens and images."""
    base = _base(model)
    return kind_of(base.config).body(base)


def output_head(model: nn.Module) -> nn.Module | None:
    """The head of a model, with or without adapters: the part after its backbone()."""
    base = _base(model)
    return kind_of(base.config).head_of(base)


def head_parts(model: Any) -> set[nn.Module]:
    """All modules inside Decoder.head_modules(). `model`: without adapters."""
    names = kind_of(model.config).head_modules(model.config)
    heads = [module for path, module in model.named_modules() if any(is_named(path, name) for name in names)]
    return {part for head in heads for part in head.modules()}


def outputs(model: Any, **inputs: Any) -> torch.Tensor:
    """The head's numbers for each token, [rows, tokens, numbers]: logits of the vocabulary, or a score. `model`: with
    or without adapters."""
    return kind_of(model.config).outputs(model, inputs)


def document_numbers(model: Any, states: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The numbers of a `score` head for documents, from the backbone()'s `states`; see Decoder.numbers(). `model`:
    with or without adapters."""
    base = _base(model)
    return kind_of(base.config).numbers(base, states, first, last)


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_named(path: str, name: str) -> bool:
    """Whether `name` is a module's `path` or the end of that path."""
    return f".{path}".endswith(f".{name}")


def skeleton(config: dict[str, Any]) -> nn.Module | None:
    """The model of this config (`Facts.model`) on the meta device; None if transformers has no code for it.

    Do not change the model: every caller with the same config gets the same object. Raises ConfigError if transformers
    cannot build it.
    """
    if (model := next((model for known, model in _LATEST if known is config), None)) is not None:
        return model
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return None
    model = _skeleton(json.dumps(config, sort_keys=True, default=str))
    _LATEST.appendleft((config, model))
    return model


_LATEST = deque[tuple[dict[str, Any], nn.Module]](maxlen=4)
"""The latest configs and their skeletons. A forecast asks for a skeleton thousands of times."""


@functools.lru_cache(maxsize=16)
def _skeleton(architecture: str) -> nn.Module:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    values = json.loads(architecture)
    family = values.pop("model_type")
    try:
        config = CONFIG_MAPPING[family](**values)
        with torch.device("meta"):
            model: nn.Module = kind_of(config).auto.from_config(config)
    except ImportError as error:
        raise ConfigError(f"model.path: {family} in transformers needs a package: {first_line(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, StrictDataclassError) as error:
        what = f"{family} of transformers builds no model from this config ({first_line(error)})"
        raise ConfigError(f"model.path, model.architecture: {what}. Name the sizes that it needs.") from error
    return model


def cache_keyword(model: nn.Module) -> str:
    """The name of the KV cache among a model's arguments and results: `past_key_values` up to transformers 5.23."""
    return "cache" if "cache" in inspect.signature(_base(model).forward).parameters else "past_key_values"


def is_adapter(parameter: str) -> bool:
    """Whether the parameter of this name belongs to peft: to an adapter, a module trained in full, or trained rows."""
    return any(part in parameter for part in ("lora_", "modules_to_save", "trainable_tokens"))


def device_of(model: nn.Module) -> torch.device:
    """The device of the decoder. A vision encoder whose features are stored may be on another."""
    return next(backbone(model).parameters()).device


def base_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of the model's weights. Packed weights and adapters may have others."""
    parameters = model.named_parameters()
    return next(weight.dtype for name, weight in parameters if weight.is_floating_point() and not is_adapter(name))


def image_arguments(
    model: nn.Module, images: dict[str, torch.Tensor], device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of images, moved to `device` (None: not moved), with pixels in the dtype of the model's weights."""
    dtype = base_dtype(model)
    return {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in images.items()}


def beside_text(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that no text reaches, outside of the decoder and the head, such as a vision encoder's."""
    base = _base(model)
    return kind_of(base.config).beside_text(base)


def parameter_counts(model: nn.Module) -> dict[str, int]:
    """The number of weights that each parameter represents, by the parameter's name.

    The number differs from the parameter's size if bitsandbytes packs two weights into a byte, or if a fused group of
    adapted linears reserves rows for the adapters next to its weights (techniques/lora/frozen_weights.py).
    """
    known: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            packed = getattr(parameter, "quant_state", None)
            size = math.prod(packed.shape) if packed is not None else parameter.numel()
            known.setdefault(id(parameter), module.weight_count if isinstance(module, LinearWeights) else size)
    return {name: known[id(parameter)] for name, parameter in model.named_parameters()}


@contextmanager
def running_on_text(model: nn.Module) -> Iterator[None]:
    """Raise ConfigError if the model's code fails in this context. Some models need more inputs than tokens (a
    language, images) or cannot run under autocast."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if out_of_memory_reason(error):
            raise
        kind = model.config.model_type  # type: ignore[union-attr]
        raise ConfigError(
            f"model.path: the code of {kind} in transformers does not run on a row of tokens alone: "
            f"{first_line(error)}. Use another model."
        ) from error


def without_dropout(model: nn.Module) -> AbstractContextManager[None]:
    return in_mode(model, training=False)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the training flag, which switches dropout, and restore the flag and the random state afterwards."""
    was_training = model.training
    with torch.random.fork_rng(devices={weight.device for weight in model.parameters() if weight.is_cuda}):
        model.train(training)
        try:
            yield
        finally:
            model.train(was_training)


@contextmanager
def observing(model: nn.Module, gradients: bool = False) -> Iterator[None]:
    """A context for a pass that is only observed: no dropout, no compiled code, and gradients only if `gradients`."""
    with without_dropout(model), torch.set_grad_enabled(gradients), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove these hooks at the end of the context."""
    registered = list(hooks)
    try:
        yield
    finally:
        for hook in registered:
            hook.remove()
