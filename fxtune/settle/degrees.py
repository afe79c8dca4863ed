"""Chooses how ranks share the work of a run: the first way that fits their memory by the forecast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fxtune.distributed.parallel import Degrees
from fxtune.estimate.memory import Need
from fxtune.facts.run import Facts
from fxtune.techniques.pipeline import Pipeline


def with_degrees(facts: Facts, degrees: Degrees) -> Facts:
    """A copy of `facts` for a rank of `degrees`, with its share of the host's memory. `facts` may be for another
    number of ranks on the same hosts."""
    host = facts.host_memory * facts.degrees.ranks // degrees.ranks
    return replace(facts, degrees=degrees, host_memory=host)


def memory_need(techniques: Pipeline, facts: Facts, degrees: Degrees) -> Need:
    """The bytes that each rank needs for a training step with `degrees`. Decides each `auto` of `techniques` for this
    forecast. Nothing is checked or measured, and no weight is read."""
    facts = with_degrees(facts, degrees)
    return techniques.decided(facts)[0].memory_need(facts)


def fits(techniques: Pipeline, facts: Facts, degrees: Degrees) -> bool:
    """Whether a training step with `degrees` fits the free memory of each card by the forecast."""
    return memory_need(techniques, facts, degrees).device <= facts.free_memory


def possible(ranks: int) -> Iterator[Degrees]:
    """Yield each way in which `ranks` ranks can share the work, in the order of their traffic: copies, then divided
    weights, then divided rows."""
    for context in _divisors(ranks):
        for shard in _divisors(ranks // context):
            yield Degrees(ranks // context // shard, shard, context)


def choose(techniques: Pipeline, facts: Facts, candidates: Iterable[Degrees]) -> tuple[Degrees, Need]:
    """The first of `candidates` that fits, and the memory that each rank needs with it. If none fits, the candidate
    with the least need."""
    tried: list[tuple[Degrees, Need]] = []
    for degrees in candidates:
        need = memory_need(techniques, facts, degrees)
        if need.device <= facts.free_memory:
            return degrees, need
        tried.append((degrees, need))
    return min(tried, key=lambda candidate: candidate[1].device)


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
