"""The config group `parallel`: how many ranks replicate, shard and cut rows, and how replicas add up their gradients.

The ranks of a run form a grid of replicate x shard x context. Context varies fastest, so ranks that exchange the most
are neighbours on one host:

- ranks along `replicate` have all weights and different rows;
- ranks along `shard` have a part of each weight and different rows;
- ranks along `context` have the same rows, and a part of each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from fxtune.errors import ConfigError
from fxtune.system.terminal.units import MIB

AUTO = "auto"
DEGREES = ("replicate", "shard", "context")
"""The dimensions of the mesh, outermost first."""

BUCKET = 100 * MIB
"""Full fine-tuning sums gradients in buckets of about this many bytes."""


class Compression(str, Enum):
    none = "none"
    bfloat16 = "bfloat16"
    powersgd = "powersgd"


def count_or_auto() -> str:
    """A field for a number of ranks or AUTO, kept as a text."""
    found: str = field(default=AUTO, metadata={"takes": "auto or a whole number from 1 on"})
    return found


@dataclass
class ParallelConfig:
    replicate: str = count_or_auto()
    """How many copies of the weights the ranks hold together, each trained on other rows. `auto`: the ranks that
    `shard` and `context` leave."""
    shard: str = count_or_auto()
    """Over how many ranks each weight, its gradient and its optimizer state are divided. `auto`: 1 where they fit one
    card."""
    context: str = count_or_auto()
    """Over how many ranks each row is divided. `auto`: 1, unless by the forecast nothing else fits a card."""
    compression: Compression = Compression.none
    """How replicas send their gradients over slow links between hosts (docs/distributed.md). `none`: in float32.
    `bfloat16`: half the bytes; each gradient and each partial sum is rounded to 8 significant bits. `powersgd`: from
    step 10 on two thin matrices of rank 4 in place of each gradient matrix (full fine-tuning only)."""
    average_every: int = field(default=1, metadata={"min": 1})
    """Each rank takes this many steps alone, then all average their weights (local SGD). 1: gradients are summed in
    each step. Weights are also averaged before each evaluation and each checkpoint."""

    def refusals(self, adapters: bool = False) -> Iterator[str]:
        """Yield a message for each degree that is neither `auto` nor a number, and for ways to sum gradients that
        cannot be used. `adapters`: whether only adapters are trained."""
        for name in DEGREES:
            value = getattr(self, name)
            if value != AUTO and not re.fullmatch(r"[1-9]\d{0,4}", value):
                yield f"`parallel.{name}={value}` must be `auto` or a whole number from 1 on"
        if len(keys := self.summed_otherwise) > 1:
            yield f"{' and '.join(f'`{option}`' for option in keys)} exclude each other: keep one of them"
        if self.compression is Compression.powersgd and adapters:
            yield (
                "`parallel.compression=powersgd` approximates large gradient matrices, and the gradients of adapters "
                "are small and of low rank. Set it to none, or techniques.lora.enabled=false"
            )

    @property
    def summed_otherwise(self) -> list[str]:
        """The keys that replace the plain sum of gradients in float32."""
        options = [
            ("compression", self.compression.value, self.compression is not Compression.none),
            ("average_every", self.average_every, self.average_every > 1),
        ]
        return [f"parallel.{name}={value}" for name, value, is_set in options if is_set]

    @property
    def sum_bytes(self) -> int:
        """The bytes that a replica needs to sum gradients, for each trained number, at the peak."""
        if self.average_every > 1:
            return 0  # averaging weights takes 64 MiB in all
        return {Compression.powersgd: 16, Compression.bfloat16: 2}.get(self.compression, 4)

    def bucket_bytes(self, adapters: bool) -> int:
        """Bytes of a bucket of gradients; 0: one bucket. `adapters`: whether only adapters are trained. The sums of
        several buckets start during the backward pass of a step's last micro-batch."""
        return 0 if adapters else BUCKET

    def degree_refusals(self, degrees: Degrees) -> Iterator[str]:
        """Yield a message for each key that a run with these `degrees` cannot have."""
        for key in self.summed_otherwise:
            if degrees.ranks == 1:
                yield f"{key}: says how ranks exchange gradients, and this run has one rank. Leave it out."
            elif degrees.shard > 1 or degrees.context > 1:
                yield (
                    f"{key}: is for replicas, and this run has {degrees}. Leave it out, or set parallel.shard=1 and "
                    "parallel.context=1."
                )


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
        """The number of ranks with different rows: replicate x shard."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return " x ".join(f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1) or "1 rank"


def agrees(config: ParallelConfig, degrees: Degrees) -> bool:
    """Whether `degrees` equal the numbers that `config` gives."""
    return all(getattr(config, name) in (AUTO, str(getattr(degrees, name))) for name in DEGREES)


def decide(config: ParallelConfig, ranks: int, shards: bool = False) -> Degrees:
    """The degrees of `config` for `ranks` ranks. Ranks that `config` does not divide replicate; with `shards` (the
    model does not fit one card) they shard.

    Raises ConfigError if the degrees of `config` do not divide the ranks.
    """
    fixed = {name: int(value) for name in DEGREES if (value := getattr(config, name)) != AUTO}
    placed = math.prod(fixed.values())
    free = [name for name in (("shard", "replicate") if shards else ("replicate", "shard")) if name not in fixed]
    if placed > ranks or ranks % placed or (placed != ranks and not free):
        keys = " and ".join(f"parallel.{name}={value}" for name, value in fixed.items())
        raise ConfigError(
            f"{keys} {'need' if len(fixed) > 1 else 'needs'} {'a multiple of ' * bool(free)}{placed} ranks, and this "
            f"run has {ranks}. Change {'them' if len(fixed) > 1 else 'it'}, or the number of ranks (run.gpus, or "
            "torchrun's --nproc-per-node and --nnodes)."
        )
    rest = {free[0]: ranks // placed} if free else {}
    return Degrees(**{**dict.fromkeys(DEGREES, 1), **fixed, **rest})
