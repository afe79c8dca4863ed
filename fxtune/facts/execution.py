"""How a step is computed and what it keeps, in the words of the forecasts of memory, time and traffic.

The forecasts know no technique by name. Each enabled technique says what it changes (`describe`), in the order of
application, from a plain step on: eager, all weights trained, each of them in its own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fxtune.facts.recomputation import RecomputePlan


@dataclass(frozen=True)
class Adapters:
    """Trained numbers beside frozen weights, float32."""

    all: int
    experts: int
    images: int
    """Of the vision encoder and its projector."""
    rank: int
    rank_of: Callable[[str], int]
    """The rank of the adapter of a module, by its path."""
    vision: bool = False
    """Whether gradients pass through the vision encoder."""
    projector: bool = False


@dataclass(frozen=True)
class Quantized:
    """Frozen weights in fewer bits."""

    bytes: float
    """Of each weight, scales included."""
    multiplies: bool
    """Whether products are in this format (fp8); otherwise weights are dequantized for each product."""
    linears: bool
    """Whether the linears of attention and of a dense MLP are among them."""
    experts: bool
    head: bool
    embeddings: bool


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps, as it says itself (optim/optimizer.py)."""

    moments: float = 2.0
    """Numbers for each trained parameter."""
    others: float | None = None
    """The same for parameters that are no hidden matrix: embeddings, the head, norms and experts (one tensor a layer);
    None: `moments`."""
    size: int = 0
    """Bytes of each number; 0: as many as the weight's have."""
    undo_limit: int = 0
    """The optimizer copies the weights that it updates together, their gradients and their moments before a step if
    the weights have at most this many bytes, so that it can undo a bad step. 0: it never copies."""
    update_bytes: float = 0.0
    """Updating a parameter takes as long as reading so many bytes; 0: what is read and written decides."""


@dataclass(frozen=True)
class Execution:
    compiled: bool = False
    """Whether layers are compiled."""
    holds_gradients: bool = False
    """Whether gradients are held from step to step."""
    recompute: RecomputePlan = field(default_factory=RecomputePlan)
    repeats_keys: bool = False
    """Whether attention repeats keys and values for each query head."""
    fused: bool = False
    """Whether an operator computes a whole MLP with its adapters."""
    fused_norms: bool = False
    fused_gate: bool = False
    """Whether one kernel computes act(gate) * up."""
    fused_loss: bool = False
    """Whether loss and head are one operation that never holds all logits."""
    fp8_products: float = 0.0
    """The share of the products of trained linears that runs in fp8. At 1 linears also keep their inputs in fp8."""
    adapters: Adapters | None = None
    quantized: Quantized | None = None
