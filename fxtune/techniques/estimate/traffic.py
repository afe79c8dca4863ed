"""What the ranks of a run send each other in a step, by the forecast.

Each sum below counts what one rank sends in a step, by the algorithms of NCCL: to add up B bytes over n ranks, a rank
sends 2 (n - 1) / n B (a reduce-scatter and an all-gather, each half of it). Divided weights are gathered for the
forward and for the backward pass of each micro-batch. If rows are divided, ranks exchange queries, keys, values and
attention's output before and after attention, in the forward and in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.techniques.attention.context import key_copies
from fxtune.techniques.estimate.memory import linear_bytes, number_bytes, trained_parameters


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in an optimizer step."""

    gradients: int
    weights: int
    rows: int

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.rows


def sent(facts: Facts, micro_batches: int = 1) -> Sent:
    """What a rank sends in a step of `micro_batches` micro-batches of its own."""
    shape, degrees = Shape.of(facts.text), facts.degrees
    number = number_bytes(facts)
    all_weights = shape.linear_parameters * linear_bytes(facts) + shape.other_parameters * number
    # A replica adds up the part of the gradient that its rank has. Ranks that share rows add up the whole one.
    copies, parts = degrees.replicate * degrees.context, degrees.shard
    if facts.techniques.lora.enabled:  # adapters are whole on each rank
        copies, parts = degrees.ranks, 1
    gradients = facts.sum_bytes * trained_parameters(facts)
    between = _all_but_own(parts) * gradients + 2 * _all_but_own(copies) * gradients / parts
    keys = shape.k * key_copies(shape.heads, shape.key_heads, degrees.context)
    exchanged = 2 * shape.layers * facts.tokens * number * (2 * shape.q + 2 * keys)
    return Sent(
        int(between),
        int(2 * _all_but_own(degrees.shard) * all_weights * micro_batches),
        int(_all_but_own(degrees.context) * exchanged * micro_batches),
    )


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks
