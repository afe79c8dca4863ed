"""The forecast for several ranks: whether a run fits them, and what they send each other.

Each sum below counts what one rank sends in a step, by the algorithms of NCCL: to add up B bytes over n ranks, a rank
sends 2 (n - 1) / n B (a reduce-scatter and an all-gather, each half of it). Divided weights are gathered for the
forward and for the backward pass of each micro-batch. If rows are divided, ranks exchange queries, keys, values and
attention's output before and after attention, in the forward and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fxtune.distributed.parallel import Degrees
from fxtune.models.dims import Shape
from fxtune.techniques.attention.context import key_copies
from fxtune.techniques.estimate.memory import Need, linear_bytes, number_bytes, trained_parameters

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sends in an optimizer step."""

    gradients: int
    weights: int
    rows: int

    @property
    def total(self) -> int:
        return self.gradients + self.weights + self.rows


def with_degrees(facts: Facts, degrees: Degrees) -> Facts:
    """The facts of one of the ranks that share the work as `degrees` says, and their host's memory. `facts`: those of
    another number of ranks on the same hosts."""
    host = facts.host_memory * facts.degrees.ranks // degrees.ranks
    return replace(facts, degrees=degrees, host_memory=host)


def decided_with(facts: Facts, degrees: Degrees) -> Facts:
    """`facts` of one of several ranks. Each `auto` of the techniques is decided for it, and nothing is checked or
    measured. Reads no weight."""
    facts = with_degrees(facts, degrees)
    return replace(facts, techniques=facts.techniques.decided(facts)[0])


def need_with(facts: Facts, degrees: Degrees) -> Need:
    """The bytes that each rank needs for a training step with `degrees`; see decided_with()."""
    facts = decided_with(facts, degrees)
    return facts.techniques.memory_need(facts)


def fits(facts: Facts, degrees: Degrees) -> bool:
    """Whether weights, optimizer and activations with `degrees` fit the free memory of each card by the forecast."""
    return need_with(facts, degrees).device <= facts.free_memory


def possible(ranks: int) -> Iterator[Degrees]:
    """Each way to share the work of `ranks` ranks, the one that sends the least first: copies, then divided weights,
    then divided rows."""
    for context in _divisors(ranks):
        for shard in _divisors(ranks // context):
            yield Degrees(ranks // context // shard, shard, context)


def choose(facts: Facts, candidates: Iterable[Degrees]) -> tuple[Degrees, Need]:
    """The first of `candidates` that fits, or else the one that needs the least, and what each rank then needs."""
    tried: list[tuple[Degrees, Need]] = []
    for degrees in candidates:
        need = need_with(facts, degrees)
        if need.device <= facts.free_memory:
            return degrees, need
        tried.append((degrees, need))
    return min(tried, key=lambda one: one[1].device)


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


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
