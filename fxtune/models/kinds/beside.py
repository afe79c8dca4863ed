"""What the parts of a model beside its decoder and head cost, as the forecasts ask for it.

A kind of model answers with a `Beside` (Decoder.beside). The class itself answers for parts that no step computes,
such as an encoder of sound: they take memory for their weights, and nothing else.
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
    """For a whole step: inputs, features, and the activations of parts with gradients."""
    peak: int = 0
    """In addition, while the parts run forward or backward."""


@dataclass(frozen=True)
class BesideWork:
    """What is computed, read and written for some images."""

    products: float
    """FLOPs of products."""
    attention: float
    """FLOPs of attention."""
    numbers: float
    """Numbers that a pass reads and writes, without the activations of MLPs."""
    inner: float
    """Numbers in the MLPs."""
    layers: int
    backward: bool
    """Whether gradients pass through the layers."""


@dataclass(frozen=True)
class Beside:
    """The parts of a model beside its decoder and head."""

    parameters: int = 0
    trainable: int = 0
    """Of these, the parameters that Facts.trains_images trains."""

    @property
    def shape(self) -> EncoderShape | None:
        """The vision encoder's; None for a model that reads no images."""
        return None

    def trained(self, facts: Facts) -> int:
        """The parameters that a run without adapters trains."""
        return self.trainable if facts.trains_images else 0

    def has_gradients(self, facts: Facts) -> bool:
        """Whether gradients pass through these parts."""
        return False

    def recomputes(self, facts: Facts, plan: RecomputePlan) -> bool:
        """Whether the backward pass runs these parts again."""
        return False

    def memory(self, facts: Facts, plan: RecomputePlan, number: int, hidden: int) -> BesideMemory:
        """`number`: bytes of a number; `hidden`: width of the decoder."""
        return BesideMemory()

    def work(self, facts: Facts, images: ImageWork, trains: bool = True) -> BesideWork | None:
        """The work for `images`, without the products of adapters. `trains`: count the backward pass, too. None: these
        parts are not computed."""
        return None
