"""What the images of a step cost: the FLOPs of a tower and its projector.

FLOPs are counted as tracking/throughput.py counts a decoder's. Frozen parts run forward only. If something in the
tower is trained, gradients pass through all of it but its patch embedding, whose input are pixels; if only the
projector is trained, they end in the projector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fxtune.models.kinds.known import kind_of
from fxtune.models.kinds.tower_shape import TowerShape, TowerWork
from fxtune.models.structure import projectors, towers
from fxtune.techniques.estimate.matmuls import matmul_sizes, weight_flops

ATTENTION_PASSES = 3.5  # forward 1, backward 2.5


@dataclass(frozen=True)
class TowerCost:
    """Model FLOPs of images, forward and backward."""

    shape: TowerShape
    per_position: float
    """Matmuls of the tower, for each of its positions."""
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
    """The cost of images for a model, with adapters or without; None if it reads none. `forward_passes`: as
    training_cost() has it."""

    def is_trained(module: nn.Module) -> bool:
        return any(weight.requires_grad for weight in module.parameters(recurse=False))

    parts = ImageParts.of(model)
    if parts is None:
        return None
    return parts.cost(is_trained, any(map(is_trained, parts.tower)), forward_passes)


@dataclass(frozen=True)
class ImageParts:
    """The modules of a model that images alone reach."""

    shape: TowerShape
    embedding: list[nn.Module]
    """The modules with the weights of the patch embedding."""
    tower: list[nn.Module]
    """All others of the tower."""
    projector: list[nn.Module]

    @staticmethod
    def of(model: Any) -> ImageParts | None:
        """The parts of a model, with adapters or without; None if it reads no images."""
        shape = kind_of(model.config).tower_shape(model.config)
        if shape is None:
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
        return ImageParts(shape, embedding, [module for _, module in own if id(module) not in at_pixels], projector)

    def __iter__(self) -> Iterator[nn.Module]:
        yield from (*self.embedding, *self.tower, *self.projector)

    def cost(self, is_trained: Callable[[nn.Module], bool], reached: bool, forward_passes: int) -> TowerCost:
        """`reached`: whether something in the tower is trained, so that gradients pass through it."""
        below = reached or any(map(is_trained, self.embedding))
        beyond = below or any(map(is_trained, self.projector))

        def flops(modules: Iterable[nn.Module], backward: bool) -> float:
            counts = ((module, weight_count(module)) for module in modules)
            return sum(count * weight_flops(is_trained(module), forward_passes, backward) for module, count in counts)

        passes = 1 + forward_passes + (ATTENTION_PASSES - 1) * below
        return TowerCost(
            self.shape,
            flops(self.tower, below),
            flops(self.embedding, False),
            flops(self.projector, beyond),
            passes * 4.0 * self.shape.heads_width,  # two matmuls of 2 FLOPs a pair and channel
        )


def weight_count(module: nn.Module) -> int:
    """Weights by which a module of a tower or a projector multiplies each row of its input."""
    if (sizes := matmul_sizes(module)) is not None:
        return sizes[0] * sizes[1]
    # Gemma 3's projector has its matrix as a parameter.
    return sum(
        weight.numel()
        for name, weight in module.named_parameters(recurse=False)
        if "projection" in name or _is_kernel(name, weight)
    )


def _is_kernel(name: str, weight: nn.Parameter) -> bool:
    """Whether the parameter is the kernel of a patch embedding: [width, channels, *sides of a patch]."""
    return name == "weight" and weight.dim() > 3
