"""FLOPs and memory of a vision encoder and its projector for the images of a step.

FLOPs are counted as in tracking/throughput.py. Frozen parts run forward only. If a weight of the vision encoder is
trained, gradients pass through the whole vision encoder except the patch embedding, whose inputs are pixels. If only
the projector is trained, gradients end in the projector.

Memory is counted in bytes for each position of the vision encoder. h, q and i are the widths of hidden states, heads
and MLP. A frozen vision encoder runs without gradients, on all images of a micro-batch at once, before the decoder
keeps activations. So the peak is one layer: four copies of the hidden states, and either queries, keys and values (an
eager layer of Qwen's vision encoders adds six copies in float32) or the intermediate results of the MLP. A vision
encoder with gradients keeps the inputs of linears, norms and activations in each layer until the decoder's backward
pass has ended; checkpointing keeps fewer. The pixels of two micro-batches and the features count for the whole step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxtune.facts.recomputation import LEVELS, RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.dims import matmul_sizes
from fxtune.models.kinds.image_decoder.tower_shape import TowerShape, TowerWork
from fxtune.models.kinds.known import images_of, kind_of
from fxtune.models.structure import beside_text, for_images, projectors, skeleton, towers

ATTENTION_PASSES = 3.5  # forward 1, backward 2.5
BATCHES = 2
"""Micro-batches with pixels on a GPU: the current one, and the next one, which is copied ahead."""


def weight_flops(trained: bool, forward_passes: int, backward: bool = True) -> float:
    """FLOPs of a weight for each row of its input: forward, gradient of the input, gradient of the weight.
    `forward_passes`: additional passes without gradients. `backward`: whether the input has a gradient."""
    return 2.0 * (1 + forward_passes + trained + backward)


@dataclass(frozen=True)
class TowerCost:
    """Model FLOPs of images, forward and backward."""

    shape: TowerShape
    per_position: float
    """Matmuls of the vision encoder, for each of its positions."""
    per_patch: float
    """The patch embedding."""
    per_feature: float
    """Matmuls of the projector."""
    per_pair: float
    """Attention of a layer, for each pair of a query and a key."""

    def flops(self, work: TowerWork) -> float:
        return (
            self.per_position * work.positions
            + self.per_patch * work.patches
            + self.per_feature * work.features
            + self.per_pair * work.pairs
        )


def tower_cost(model: nn.Module, forward_passes: int = 0) -> TowerCost | None:
    """The cost of images for a model, with adapters or without; None if the model reads no images. `forward_passes`:
    see training_cost()."""

    def is_trained(module: nn.Module) -> bool:
        return any(weight.requires_grad for weight in module.parameters(recurse=False))

    parts = ImageParts.of(model)
    if parts is None:
        return None
    return parts.cost(is_trained, any(map(is_trained, parts.tower)), forward_passes)


@dataclass(frozen=True)
class ImageParts:
    """The modules of a model that compute images only."""

    shape: TowerShape
    embedding: list[nn.Module]
    """The modules with the weights of the patch embedding."""
    tower: list[nn.Module]
    """The other modules of the vision encoder."""
    projector: list[nn.Module]

    @staticmethod
    def of(model: Any) -> ImageParts | None:
        """The parts of a model, with adapters or without; None if the model reads no images."""
        images = kind_of(model.config).images
        if images is None:
            return None
        projector = [module for part in projectors(model) for module in part.modules()]
        beside = {id(module) for module in projector}
        named = [(name, module) for part in towers(model) for name, module in part.named_modules()]
        own = [(name, module) for name, module in named if id(module) not in beside]
        embedding = [
            module
            for name, module in own
            if "patch_embed" in name
            or any(_is_kernel(*named_weight) for named_weight in module.named_parameters(recurse=False))
        ]
        at_pixels = {id(module) for module in embedding}
        tower = [module for _, module in own if id(module) not in at_pixels]
        return ImageParts(images.shape(model.config), embedding, tower, projector)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from (*self.embedding, *self.tower, *self.projector)

    def cost(self, is_trained: Callable[[nn.Module], bool], reached: bool, forward_passes: int) -> TowerCost:
        """`reached`: whether a module of the vision encoder is trained, so that gradients pass through it."""
        in_tower = reached or any(map(is_trained, self.embedding))
        in_projector = in_tower or any(map(is_trained, self.projector))

        def flops(modules: Iterable[nn.Module], backward: bool) -> float:
            counts = ((module, weight_count(module)) for module in modules)
            return sum(count * weight_flops(is_trained(module), forward_passes, backward) for module, count in counts)

        passes = 1 + forward_passes + (ATTENTION_PASSES - 1) * in_tower
        return TowerCost(
            self.shape,
            flops(self.tower, in_tower),
            flops(self.embedding, False),
            flops(self.projector, in_projector),
            passes * 4.0 * self.shape.heads_width,  # two matmuls of 2 FLOPs a pair and channel
        )


def weight_count(module: nn.Module) -> int:
    """Weights in the matrix product of a module of a vision encoder or a projector."""
    if (sizes := matmul_sizes(module)) is not None:
        return sizes[0] * sizes[1]
    # Gemma 3's projector has no linear: its matrix is a bare parameter.
    return sum(
        weight.numel()
        for name, weight in module.named_parameters(recurse=False)
        if "projection" in name or _is_kernel(name, weight)
    )


def _is_kernel(name: str, weight: nn.Parameter) -> bool:
    """Whether the parameter is the kernel of a patch embedding: [width, channels, *sides of a patch]."""
    return name == "weight" and weight.dim() > 3


@dataclass(frozen=True)
class ImageNumbers:
    """Sizes of the image parts for the forecasts, from a model without weights."""

    config: Any
    """The config of the model in transformers."""
    beside: int
    """Parameters that text does not use."""
    images: int
    """Parameters that images use and text does not."""
    pixels: int
    """Values in a patch."""
    is_gated: bool
    """Whether the MLPs of the vision encoder multiply two products."""
    multiplies: bool
    """Whether the activation of these MLPs has a product: a gate, or x sigmoid(1.7 x)."""
    joins_qkv: bool
    """Whether one product makes queries, keys and values, as in Qwen's vision encoders, which rotate in float32."""
    norms: int
    """Sum of the widths of a layer's RMS norms. torch's layer norms keep no copies."""
    parts: ImageParts | None
    """None: fxtune does not run the model's vision encoder, such as an encoder of sound."""


def image_numbers(facts: Facts) -> ImageNumbers | None:
    """None for a model without parts beside its text model."""
    if not any(name.endswith("_config") and name != "text_config" for name in facts.model):
        return None
    model = skeleton(facts.model)
    return None if model is None else _numbers(model)


@functools.lru_cache(maxsize=4)
def _numbers(model: nn.Module) -> ImageNumbers:
    parts = ImageParts.of(model)
    named = [*(part for tower in towers(model) for part in tower.named_modules())]
    is_gated = any(path.endswith(".gate_proj") for path, _ in named)
    configs = images_of(model.config).configs(model.config) if parts else []
    in_tower = {id(module) for module in parts.tower} if parts else set()
    norms = (module for _, module in named if "RMSNorm" in type(module).__name__ and id(module) in in_tower)
    # A norm without a weight counts as 0.
    widths = [next((weight.numel() for weight in norm.parameters()), 0) for norm in norms]
    return ImageNumbers(
        model.config,
        sum(weight.numel() for weight in beside_text(model)),
        sum(weight.numel() for weight in for_images(model)),
        max(map(_patch_numbers, parts.embedding)) if parts else 0,
        is_gated,
        is_gated or "quick_gelu" in (getattr(config, "hidden_act", "") for config in configs),
        any(path.endswith(".qkv") for path, _ in named),
        sum(widths) // parts.shape.layers if parts else 0,
        parts,
    )


def _patch_numbers(embedding: nn.Module) -> int:
    """Values of a patch that enter the product of a module of the patch embedding; 0 for a module without products."""
    if sizes := matmul_sizes(embedding):
        return sizes[0]
    own = embedding.named_parameters(recurse=False)
    return max((weight[0].numel() for name, weight in own if _is_kernel(name, weight)), default=0)


def tower_shape(facts: Facts) -> TowerShape | None:
    """None for a model that reads no images."""
    numbers = image_numbers(facts)
    return None if numbers is None or numbers.parts is None else numbers.parts.shape


def planned_cost(facts: Facts, trains: bool = True) -> TowerCost | None:
    """The cost of images in a run, without the products of adapters; None if the model reads no images. `trains`:
    count the backward pass, too."""
    numbers, adapters = image_numbers(facts), facts.execution.adapters
    if numbers is None or numbers.parts is None:
        return None
    in_tower = trains and has_gradients(facts)
    cost = numbers.parts.cost(lambda _: in_tower and adapters is None, in_tower, 0)
    if trains and adapters and adapters.projector and not in_tower:  # gradients of inputs
        return replace(cost, per_feature=2 * cost.per_feature)
    return cost


def has_gradients(facts: Facts) -> bool:
    """Whether gradients pass through the vision encoder."""
    adapters = facts.execution.adapters
    return adapters.vision if adapters else facts.trains_images


@dataclass(frozen=True)
class ImageMemory:
    """Bytes on one rank."""

    held: int = 0
    """For a whole step: pixels, features, and the activations of a vision encoder with gradients."""
    peak: int = 0
    """In addition, while the vision encoder runs forward or backward."""


def tower_level(plan: RecomputePlan) -> str:
    """The checkpointing level of a vision encoder with gradients: the level of the decoder layer that keeps the least.
    With a budget, which is the compiler's, the vision encoder keeps everything (see Checkpointing)."""
    if plan.mix:
        return min((level for level, count in plan.mix if count), key=LEVELS.index, default="input")
    return "everything" if plan.level == "budget" else plan.level


def image_memory(facts: Facts, plan: RecomputePlan, number: int, hidden: int) -> ImageMemory:
    """Memory of the images of a micro-batch, if each row has as many images as the fullest row. `number`: bytes of a
    number; `hidden`: width of the decoder."""
    numbers = image_numbers(facts)
    features = min(facts.image_features * facts.micro_batch_size, facts.tokens)
    if not features or numbers is None or numbers.parts is None:
        return ImageMemory()
    shape = numbers.parts.shape
    positions, pixels = shape.positions(features), features * shape.merged * numbers.pixels
    dtype = images_of(numbers.config).pixel_dtype(numbers.config, getattr(torch, facts.dtype))
    held = pixels * dtype.itemsize * (BATCHES if facts.device == "cuda" else 1)
    held += features * hidden * number * shape.levels
    compiled = facts.execution.compiled and facts.device == "cuda"
    working = positions * _working_bytes(numbers, number, compiled)
    if has_gradients(facts):
        kept = _kept_bytes(numbers, number, compiled)
        level = tower_level(plan)
        again = kept["everything"] if level != "everything" else 0
        return ImageMemory(int(held + positions * shape.layers * kept[level]), int(2 * working + positions * again))
    return ImageMemory(int(held), int(max(working, pixels * number)))


def _working_bytes(numbers: ImageNumbers, number: int, compiled: bool) -> float:
    """Bytes for each position while a layer runs without gradients."""
    assert numbers.parts is not None
    h, q, i = numbers.parts.shape.width, numbers.parts.shape.heads_width, numbers.parts.shape.inner
    attention = number * (4 * h + 5 * q)
    if numbers.joins_qkv and not compiled:
        attention = number * (4 * h + 3 * q) + 4 * (6 if number < 4 else 4) * q
    return max(attention, number * (4 * h + (3 if numbers.multiplies else 2) * i))


def _kept_bytes(numbers: ImageNumbers, number: int, compiled: bool) -> dict[str, int]:
    """Bytes for each position that a layer with gradients keeps, by level. The levels `wide` and `narrow` keep the
    results of products and of attention."""
    assert numbers.parts is not None
    h, q, i = numbers.parts.shape.width, numbers.parts.shape.heads_width, numbers.parts.shape.inner
    copies = 0 if compiled else 4 * numbers.norms + number * max(numbers.norms - 2 * h, 0)
    joined = 2 * q * numbers.joins_qkv  # the whole product stays, because the values are a part of it
    activation = 1 + numbers.is_gated + (numbers.multiplies and not compiled)
    products = number * (3 * h + 4 * q + (1 + numbers.is_gated) * i)
    return {
        "everything": number * (4 * h + 4 * q + joined + (1 + activation) * i) + copies,
        "wide": products,
        "narrow": products,
        "attention": number * (h + q),
        "input": number * h,
    }
