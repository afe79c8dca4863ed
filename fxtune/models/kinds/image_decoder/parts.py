"""The parts for images of a model, with adapters or without. Each list is empty for a model that reads no images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fxtune.models.kinds.image_decoder.images import Images
from fxtune.models.kinds.known import kind_of


def vision_encoders(model: nn.Module) -> list[nn.Module]:
    """The modules that make features of images."""
    return _ask(model, lambda images, base: images.vision_encoders(base))


def encoder_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of vision_encoders(), first to last."""
    return _ask(model, lambda images, base: images.layers(base))


def projectors(model: nn.Module) -> list[nn.Module]:
    """The modules between the vision encoders and the decoder. They may be inside a vision encoder."""
    return _ask(model, lambda images, base: images.projectors(base))


def image_modules(model: nn.Module) -> list[nn.Module]:
    """vision_encoders(), projectors() and all modules inside them."""
    return [module for part in (*vision_encoders(model), *projectors(model)) for module in part.modules()]


def for_images(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that images alone reach. Those of an encoder of sound are not among them."""
    return _ask(model, lambda images, base: images.parameters(base))


def _ask(model: Any, question: Callable[[Images, Any], list[Any]]) -> list[Any]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    images = kind_of(base.config).images
    return question(images, base) if images else []
