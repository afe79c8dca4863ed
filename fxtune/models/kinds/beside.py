"""The cost of the parts of a model beside its decoder and head, for forecasts.

Each kind of model returns a `Beside` (Decoder.beside). The class itself describes parts that no step computes, such as
an encoder of sound. They take memory for their weights and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxtune.facts.recomputation import RecomputePlan
from fxtune.facts.run import Facts
from fxtune.models.kinds.image_decoder.encoder_shape import EncoderShape, ImageWork


@dataclass(frozen=True)
class BesideMemory:
    """Bytes on one rank."""

    held: int = 0
    """Bytes for a whole step: inputs, features, and the activations of parts with gradients."""
    peak: int = 0
    """Additional bytes while the parts run forward or backward."""


@dataclass(frozen=True)
class BesideWork:
    """The numbers that are computed, read and written for some images."""

    products: float
    """FLOPs of products."""
    attention: float
    """FLOPs of attention."""
    numbers: float
    """Numbers that a pass reads and writes, without the activations of MLPs."""
    inner: float
    """Numbers in the activations of MLPs."""
    layers: int
    backward: bool
    """Whether gradients pass through the layers."""


@dataclass(frozen=True)
class Beside:
    """The parts of a model beside its decoder and head."""

    parameters: int = 0
    trainable: int = 0
    """How many of these parameters are trained if Facts.trains_images."""

    @property
    def shape(self) -> EncoderShape | None:
        """The shape of the vision encoder; None for a model that reads no images."""
        return None

    def trained(self, facts: Facts) -> int:
        """How many of these parameters a run without adapters trains."""
        return self.trainable if facts.trains_images else 0

    def has_gradients(self, facts: Facts) -> bool:
        """Whether gradients pass through these parts."""
        return False

    def recomputes(self, facts: Facts, plan: RecomputePlan) -> bool:
        """Whether the backward pass runs these parts again."""
        return False

    def memory(self, facts: Facts, plan: RecomputePlan, number: int, hidden: int) -> BesideMemory:
        """Memory of these parts on one rank. `number`: bytes of a number; `hidden`: width of the decoder."""
        return BesideMemory()

    def work(self, facts: Facts, images: ImageWork, trains: bool = True) -> BesideWork | None:
        """The work for `images`, without the products of adapters. `trains`: also count the backward pass. Returns
        None if no step computes these parts."""
        return None
