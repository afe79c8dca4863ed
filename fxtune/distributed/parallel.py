"""How many ranks replicate, shard and cut rows: the config group `parallel`, and the degrees that it means for a run.

The ranks of a run form a grid of replicate x shard x context, and context varies fastest, so that ranks which exchange
the most are neighbours of one host:

- ranks along `replicate` have all weights and other rows;
- ranks along `shard` have a part of each weight and other rows;
- ranks along `context` have the same rows, and a part of each row.

decide() is a pure function of the config and the number of ranks, so it is tested without either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fxtune.errors import ConfigError

AUTO = "auto"
DEGREES = ("replicate", "shard", "context")
"""The dimensions of the mesh, outermost first."""


@dataclass
class ParallelConfig:
    replicate: str = AUTO
    """How many copies of the weights the ranks hold together, each trained on other rows. `auto`: the ranks that
    `shard` and `context` leave."""
    shard: str = AUTO
    """Over how many ranks each weight, its gradient and its optimizer state are divided. `auto`: 1 where they fit one
    card."""
    context: str = AUTO
    """Over how many ranks each row is divided. `auto`: 1."""

    def conflicts(self) -> Iterator[str]:
        """Yield each degree that is neither `auto` nor a number."""
        for name in DEGREES:
            value = getattr(self, name)
            if value != AUTO and not re.fullmatch(r"[1-9]\d{0,4}", value):
                yield f"`parallel.{name}={value}` must be `auto` or a whole number from 1 on"


@dataclass(frozen=True)
class Degrees:
    """The number of ranks along each dimension. Their product is the number of ranks of the run."""

    replicate: int = 1
    shard: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.context

    @property
    def data_ranks(self) -> int:
        """How many groups of ranks have different rows."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return " x ".join(f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1) or "1 rank"


def decide(config: ParallelConfig, ranks: int, shards: bool = False) -> Degrees:
    """The degrees that `config` means for `ranks` ranks. Ranks that no number of the config places replicate, or
    shard if `shards`: the model does not fit one card.

    Raises ConfigError if there are no such degrees.
    """
    given = {name: int(value) for name in DEGREES if (value := getattr(config, name)) != AUTO}
    placed = math.prod(given.values())
    free = [name for name in (("shard", "replicate") if shards else ("replicate", "shard")) if name not in given]
    if placed > ranks or ranks % placed or (placed != ranks and not free):
        asked = " and ".join(f"parallel.{name}={value}" for name, value in given.items())
        raise ConfigError(
            f"{asked} {'need' if len(given) > 1 else 'needs'} {'a multiple of ' * bool(free)}{placed} ranks, and this "
            f"run has {ranks}. Change {'them' if len(given) > 1 else 'it'}, or the number of ranks (run.gpus, or "
            "torchrun's --nproc-per-node and --nnodes)."
        )
    rest = {free[0]: ranks // placed} if free else {}
    return Degrees(**{**dict.fromkeys(DEGREES, 1), **given, **rest})
