"""How the ranks of a run share its work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Degrees:
    """How many ranks share each part of the work. Their product is the number of ranks."""

    replicate: int = 1
    """Copies of the weights. Each copy sees other rows of a step."""
    shard: int = 1
    """Parts that the weights, gradients and moments of a copy are cut into. Each part sees other rows of a step."""
    context: int = 1
    """Parts that a row is cut into."""

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.context

    @property
    def rows(self) -> int:
        """How many ranks see different rows of a step."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        parts = [f"{name} {size}" for name, size in vars(self).items() if size > 1]
        return ", ".join(parts) or "one rank"


def possible_degrees(ranks: int) -> Iterator[Degrees]:
    """Each way to share the work of `ranks` ranks, the one that sends the least first: copies, then cut weights, then
    cut rows."""
    for context in _divisors(ranks):
        for shard in _divisors(ranks // context):
            yield Degrees(ranks // context // shard, shard, context)


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
