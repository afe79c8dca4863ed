"""Describes how a step is computed and what it keeps, for the forecasts of memory, time and traffic.

The forecasts know no technique by name. They start from a plain step: eager, with all weights trained in their own
dtype. Then each enabled technique says what it changes (`describe`), in the order of application.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fxtune.facts.recomputation import RecomputePlan


@dataclass(frozen=True)
class Adapters:
    """How many float32 numbers are trained beside frozen weights."""

    all: int
    experts: int
    images: int
    """Trained numbers beside the vision encoder and its projector."""
    rank: int
    rank_of: Callable[[str], int]
    """Returns the rank of a module's adapter. The argument is the module's path."""
    vision: bool = False
    """Whether gradients pass through the vision encoder."""
    projector: bool = False


@dataclass(frozen=True)
class Quantized:
    """The frozen weights that are stored in fewer bits."""

    bytes: float
    """Bytes of each weight, with its share of the scales."""
    multiplies: bool
    """Whether products run in this format (fp8). Otherwise weights are dequantized for each product."""
    linears: bool
    """Whether the linears of attention and of dense MLPs are quantized."""
    experts: bool
    head: bool
    embeddings: bool


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer keeps. Each optimizer declares it (optim/optimizer.py)."""

    moments: float = 2.0
    """Numbers that the optimizer keeps for each trained parameter."""
    others: float | None = None
    """Numbers for each trained parameter that is not in a hidden matrix: in embeddings, the head, norms, and experts
    (whose matrices are one tensor per layer). None: the number in `moments`."""
    size: int = 0
    """Bytes of each of these numbers. 0: the bytes of a number of the weight."""
    undo_limit: int = 0
    """The largest size, in bytes, of weights that the optimizer copies before it updates them together. It copies the
    weights, their gradients and their moments, to undo a bad step. 0: it never copies."""
    slots: int = 0
    """The number of weights of each size whose state is on the device at a time, while all state is in host memory.
    0: all state is on the device."""
    update_bytes: float = 0.0
    """The time to update a parameter, as the number of bytes that the device reads in this time. 0: the time follows
    from the bytes that the update reads and writes."""


@dataclass(frozen=True)
class Execution:
    """How a step is computed."""

    compiled: bool = False
    """Whether layers are compiled."""
    holds_gradients: bool = False
    """Whether gradients are held from step to step."""
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    repeats_keys: bool = False
    """Whether attention repeats keys and values for each query head."""
    fused: bool = False
    """Whether one operator computes a whole MLP with its adapters."""
    fused_norms: bool = False
    fused_gate: bool = False
    """Whether one kernel computes act(gate) * up."""
    fused_loss: bool = False
    """Whether head and loss are one operation, which never holds all logits."""
    fp8_products: float = 0.0
    """The share of trained linears' products that runs in fp8. If it is 1, linears also keep their inputs in fp8."""
    adapters: Adapters | None = None
    quantized: Quantized | None = None
