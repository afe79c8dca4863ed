"""A forecast of the bytes that the ranks of a run send each other in an optimizer step.

With NCCL's algorithms a rank sends (n - 1) / n * B bytes in a reduce-scatter or an all-gather of B bytes over n ranks.
An all-reduce sends twice as much. Divided weights are gathered for the forward pass and for the backward pass of each
micro-batch. If rows are divided, ranks exchange queries, keys and values before attention and attention's output after
it, in both passes. Experts that are divided by expert are not gathered: tokens travel to the experts and back, in both
passes. If experts are recomputed, tokens travel once more. This forecast does not count that.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxtune.estimate import weights
from fxtune.facts.run import Facts
from fxtune.models.dims import Attention, Shape, key_copies


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in an optimizer step, by kind of data."""

    gradients: int
    weights: int
    rows: int
    """Bytes of the activations of divided rows."""
    tokens: int
    """Bytes of hidden states that travel to experts and back."""

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.rows + self.tokens


def step_traffic(facts: Facts, micro_batches: int = 1) -> Traffic:
    """The bytes that a rank sends in a step in which it computes `micro_batches` micro-batches."""
    shape, degrees = Shape.of(facts.model), facts.degrees
    number = weights.number_bytes(facts)
    gathered = weights.gathered_parameters(facts, shape) * weights.linear_bytes(facts)
    all_weights = gathered + shape.other_parameters * number
    # Gradients are scattered over the ranks that divide the weights. Then ranks that hold the same part add it up.
    copies, parts = degrees.replicate * degrees.context, degrees.shard
    if facts.execution.adapters:  # adapters are whole on each rank
        copies, parts = degrees.ranks, 1
    all_gradients = facts.sum_bytes * weights.trained_parameters(facts)
    scattered = facts.sum_bytes * weights.scattered_parameters(facts)
    gradients = _sent_share(parts) * scattered + 2 * _sent_share(copies) * all_gradients / parts
    widths = sum(count * _exchanged(attention, degrees.context) for attention, count in shape.attentions.items())
    activations = 2 * facts.tokens * number * widths
    mixtures = sum(count for kind, count in shape.counts if kind.experts > 1)
    states = 4 * mixtures * facts.tokens * number * shape.hidden
    return Traffic(
        int(gradients),
        int(2 * _sent_share(degrees.shard) * all_weights * micro_batches),
        int(_sent_share(degrees.context) * activations * micro_batches),
        int((degrees.shard * degrees.context - 1) * states * micro_batches) if weights.divides_experts(facts) else 0,
    )


def _exchanged(attention: Attention, ranks: int) -> int:
    """How many numbers of a token's queries, keys, values and output the ranks that divide rows exchange."""
    keys = attention.key_heads * key_copies(attention.heads, attention.key_heads, ranks)
    return (attention.heads + keys) * (attention.width + attention.value_width)


def _sent_share(ranks: int) -> float:
    """The share of a tensor that each rank sends in a reduce-scatter, an all-gather or an all-to-all."""
    return (ranks - 1) / ranks
