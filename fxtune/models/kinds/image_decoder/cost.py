"""FLOPs and memory of a vision encoder and its projector for the images of a step.

FLOPs are counted as in tracking/throughput.py. Frozen parts run forward only. If a weight of the vision encoder is
trained, gradients pass through the whole vision encoder except the patch embedding, whose inputs are pixels. If only
the projector is trained, gradients end in the projector.

Memory is counted in bytes for each position of the vision encoder. h, q and i are the widths of hidden states, heads
and MLP. A frozen vision encoder runs without gradients, on all images of a micro-batch at once, before the decoder
keeps activations. So memory peaks within one layer: four copies of the hidden states, and either queries, keys and
values (an eager layer of Qwen's vision encoders adds six copies in float32) or the intermediate results of the MLP. A
vision encoder with gradients keeps the inputs of linears, norms and activations in each layer until the decoder's
backward pass has ended; with checkpointing it keeps fewer. Features, and the pixels of two micro-batches, stay in
memory for the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fxtune.facts.recomputation import LEVELS, RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.flops import ATTENTION_PASSES, matmul_sizes, weight_flops
from fxtune.models.kinds.beside import Beside, BesideMemory, BesideWork
from fxtune.models.kinds.image_decoder.encoder_shape import EncoderShape, ImageWork
from fxtune.models.kinds.image_decoder.images import Images

BATCHES = 2
"""How many micro-batches have their pixels on a GPU: the current one, and the next one, because it is copied early."""


@dataclass(frozen=True)
class ImageCost:
    """Model FLOPs of images, in forward and backward passes."""

    shape: EncoderShape
    per_position: float
    """FLOPs of the vision encoder's matmuls, for each of its positions."""
    per_patch: float
    """FLOPs of the patch embedding, for each patch."""
    per_feature: float
    """FLOPs of the projector's matmuls, for each feature."""
    per_pair: float
    """FLOPs of attention in one layer, for each pair of a query and a key."""

    def flops(self, work: ImageWork) -> float:
        return (
            self.per_position * work.positions
            + self.per_patch * work.patches
            + self.per_feature * work.features
            + self.per_pair * work.pairs
        )


@dataclass(frozen=True)
class ImageParts:
    """The modules of a model that compute images only."""

    shape: EncoderShape
    embedding: list[nn.Module]
    """The modules with the weights of the patch embedding."""
    encoder: list[nn.Module]
    """The other modules of the vision encoder."""
    projector: list[nn.Module]

    @staticmethod
    def of(images: Images, model: Any) -> ImageParts:
        """The parts for images of `model`. It must not be wrapped in a PeftModel, but its modules may have
        adapters."""
        projector = [module for part in images.projectors(model) for module in part.modules()]
        beside = {id(module) for module in projector}
        named = [pair for part in images.vision_encoders(model) for pair in part.named_modules()]
        own = [(name, module) for name, module in named if id(module) not in beside]
        embedding = [
            module
            for name, module in own
            if "patch_embed" in name
            or any(_is_kernel(*named_weight) for named_weight in module.named_parameters(recurse=False))
        ]
        at_pixels = {id(module) for module in embedding}
        encoder = [module for _, module in own if id(module) not in at_pixels]
        return ImageParts(images.shape(model.config), embedding, encoder, projector)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from (*self.embedding, *self.encoder, *self.projector)

    def training_cost(self, forward_passes: int = 0) -> ImageCost:
        """The cost of images in training. Only weights with a gradient are trained. `forward_passes`: see
        tracking.throughput.training_cost()."""

        def is_trained(module: nn.Module) -> bool:
            return any(weight.requires_grad for weight in module.parameters(recurse=False))

        return self.cost(is_trained, any(map(is_trained, self.encoder)), forward_passes)

    def cost(self, is_trained: Callable[[nn.Module], bool], reached: bool, forward_passes: int) -> ImageCost:
        """`reached`: whether gradients pass through the vision encoder, because one of its modules is trained."""
        in_encoder = reached or any(map(is_trained, self.embedding))
        in_projector = in_encoder or any(map(is_trained, self.projector))

        def flops(modules: Iterable[nn.Module], backward: bool) -> float:
            counts = ((module, weight_count(module)) for module in modules)
            return sum(count * weight_flops(is_trained(module), forward_passes, backward) for module, count in counts)

        passes = 1 + forward_passes + (ATTENTION_PASSES - 1) * in_encoder
        return ImageCost(
            self.shape,
            flops(self.encoder, in_encoder),
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
class BesideOfImages(Beside):
    """The parts for images of a model without weights."""

    images: Images = field(kw_only=True)
    config: Any = field(kw_only=True)
    """The config of the model in transformers."""
    parts: ImageParts = field(kw_only=True)
    pixels: int = 0
    """Values in a patch."""
    is_gated: bool = False
    """Whether the MLPs of the vision encoder multiply two products."""
    multiplies: bool = False
    """Whether the activation of these MLPs has a product: a gate, or x sigmoid(1.7 x)."""
    joins_qkv: bool = False
    """Whether one product makes queries, keys and values. Qwen's vision encoders do so, and rotate in float32."""
    norms: int = 0
    """Sum of the widths of a layer's RMS norms. Layer norms do not count: torch's layer norms keep no copies."""

    @staticmethod
    def of(images: Images, model: Any, parameters: int) -> BesideOfImages:
        """`parameters`: the number of parameters outside the decoder and the head."""
        parts = ImageParts.of(images, model)
        names = [name for part in images.vision_encoders(model) for name, _ in part.named_modules()]
        is_gated = any(name.endswith(".gate_proj") for name in names)
        norms = (module for module in parts.encoder if "RMSNorm" in type(module).__name__)
        # A norm without a weight counts as 0.
        widths = [next((weight.numel() for weight in norm.parameters()), 0) for norm in norms]
        return BesideOfImages(
            parameters,
            sum(weight.numel() for weight in images.parameters(model)),
            images=images,
            config=model.config,
            parts=parts,
            pixels=max(map(_patch_numbers, parts.embedding)),
            is_gated=is_gated,
            multiplies=is_gated or getattr(model.config.vision_config, "hidden_act", "") == "quick_gelu",
            joins_qkv=any(name.endswith(".qkv") for name in names),
            norms=sum(widths) // parts.shape.layers,
        )

    @property
    def shape(self) -> EncoderShape:
        return self.parts.shape

    def has_gradients(self, facts: Facts) -> bool:
        adapters = facts.execution.adapters
        return adapters.vision if adapters else facts.trains_images

    def recomputes(self, facts: Facts, plan: RecomputePlan) -> bool:
        return self.has_gradients(facts) and encoder_level(plan) in ("input", "attention")

    def memory(self, facts: Facts, plan: RecomputePlan, number: int, hidden: int) -> BesideMemory:
        """Memory of the images of a micro-batch, if each row has as many images as the fullest row."""
        features = min(facts.image_features * facts.micro_batch_size, facts.tokens)
        if not features:
            return BesideMemory()
        shape = self.shape
        batches, held = BATCHES if facts.device == "cuda" else 1, float(features * hidden * number * shape.levels)
        if facts.stores_images:
            return BesideMemory(int(batches * held))
        positions, pixels = shape.positions(features), features * shape.merged * self.pixels
        dtype = self.images.pixel_dtype(self.config, getattr(torch, facts.dtype))
        held += pixels * dtype.itemsize * batches
        compiled = facts.execution.compiled and facts.device == "cuda"
        working = positions * self._working_bytes(number, compiled)
        if self.has_gradients(facts):
            kept = self._kept_bytes(number, compiled)
            level = encoder_level(plan)
            again = kept["everything"] if level != "everything" else 0
            held += positions * shape.layers * kept[level]
            return BesideMemory(int(held), int(2 * working + positions * again))
        return BesideMemory(int(held), int(max(working, pixels * number)))

    def _working_bytes(self, number: int, compiled: bool) -> float:
        """Bytes for each position while a layer runs without gradients."""
        h, q, i = self.shape.width, self.shape.heads_width, self.shape.inner
        attention = number * (4 * h + 5 * q)
        if self.joins_qkv and not compiled:
            attention = number * (4 * h + 3 * q) + 4 * (6 if number < 4 else 4) * q
        return max(attention, number * (4 * h + (3 if self.multiplies else 2) * i))

    def _kept_bytes(self, number: int, compiled: bool) -> dict[str, int]:
        """Bytes for each position that a layer with gradients keeps, by level. The levels `wide` and `narrow` keep the
        results of products and of attention."""
        h, q, i = self.shape.width, self.shape.heads_width, self.shape.inner
        copies = 0 if compiled else 4 * self.norms + number * max(self.norms - 2 * h, 0)
        joined = 2 * q * self.joins_qkv  # the whole product stays, because the values are a part of it
        activation = 1 + self.is_gated + (self.multiplies and not compiled)
        products = number * (3 * h + 4 * q + (1 + self.is_gated) * i)
        return {
            "everything": number * (4 * h + 4 * q + joined + (1 + activation) * i) + copies,
            "wide": products,
            "narrow": products,
            "attention": number * (h + q),
            "input": number * h,
        }

    def work(self, facts: Facts, images: ImageWork, trains: bool = True) -> BesideWork:
        shape, adapters, backward = self.shape, facts.execution.adapters, trains and self.has_gradients(facts)
        cost = self.parts.cost(lambda _: backward and adapters is None, backward, 0)
        if trains and adapters and adapters.projector and not backward:  # gradients of inputs
            cost = replace(cost, per_feature=2 * cost.per_feature)
        attention, positions = cost.per_pair * images.pairs, images.positions * shape.layers
        numbers = positions * (4 * shape.width + 4 * shape.heads_width + 3 * shape.inner)
        products = cost.flops(images) - attention
        return BesideWork(products, attention, numbers, positions * shape.inner, shape.layers, backward)


def _patch_numbers(embedding: nn.Module) -> int:
    """How many values of a patch a module of the patch embedding multiplies; 0 for a module without a product."""
    if sizes := matmul_sizes(embedding):
        return sizes[0]
    own = embedding.named_parameters(recurse=False)
    return max((weight[0].numel() for name, weight in own if _is_kernel(name, weight)), default=0)


def encoder_level(plan: RecomputePlan) -> str:
    """The checkpointing level of a vision encoder with gradients: the level of the decoder layer that keeps the least.
    A budget applies to the compiler, so with a budget the vision encoder keeps everything (see Checkpointing)."""
    if plan.mix:
        return min((level for level, count in plan.mix if count), key=LEVELS.index, default="input")
    return "everything" if plan.level == "budget" else plan.level
