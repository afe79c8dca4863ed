"""The search space of `fxtune tune`: the values worth a trial on each axis.

A candidate is the user's config with some keys changed. Three questions are answered before a trial, from facts and
without the GPU: whether the candidate can run (the check of each technique), whether it fits in memory
(fxtune/estimate/memory.py), and whether an earlier candidate has the same setting (an `auto` and its decision).

No axis changes what is computed: the global batch, the model and the adapters stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

import torch

from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.estimate.memory import forecast
from fxtune.facts.options import AUTO, CheckpointingOptions, LigerKernel, Policy
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.structure import decoder_layers, skeleton
from fxtune.settle.settled import settle
from fxtune.system.terminal.units import GIB
from fxtune.techniques.attention.backends.registry import BACKENDS
from fxtune.techniques.checkpointing import policy
from fxtune.tuning.trial import Outcome, TrialResult

Deltas = dict[str, Any]
"""The keys that a candidate changes, with plain values: {"techniques.attention.backend": "sdpa"}."""
MARGIN = 0.15
"""A forecast may exceed the free memory by this share, because it may be wrong by this share."""
MAX_EAGER_TOKENS = 2048
"""Eager attention stores all scores. It gets a trial only if rows are shorter than this."""
MAX_GRAPH_LAYERS = 16
"""One graph of the whole decoder gets a trial up to this many layers, because compile time grows with the layers."""
WORKERS = (0, 2, 4, 8)
MICRO_BATCH = "train.micro_batch_size"


@dataclass(frozen=True)
class SearchContext:
    facts: Facts
    precision: str
    """The precision of matmuls: float32, tf32, bfloat16 or float16."""
    data: str = ""
    """Fingerprint of the data; empty if the data was not read."""
    document: int = 0
    """Mean tokens of a document, rounded up to a power of two."""
    hf_config: Any = None
    """The model's Hugging Face config."""


@dataclass
class Candidate:
    deltas: Deltas
    identity: dict[str, Any]
    """Everything on which the speed depends, with every `auto` resolved. Equal identities are the same setting."""
    need: int = 0
    """The forecast of the candidate's memory on the device, in bytes."""
    fits: bool = True
    verdict: str = ""
    """The reason why the candidate was not run or cannot win; empty if it can win."""
    results: list[TrialResult] = field(default_factory=list)
    loss_error: float | None = None

    @property
    def speeds(self) -> list[float]:
        return [result.tokens_per_second for result in self.results if result.outcome is Outcome.measured]

    @property
    def speed(self) -> float:
        """Median tokens per second; 0 if the candidate cannot win."""
        return statistics.median(self.speeds) if self.speeds and not self.verdict else 0.0

    @property
    def title(self) -> str:
        short = (f"{key.partition('.')[2]}={hydra_value(value)}" for key, value in self.deltas.items())
        return ", ".join(short) or "the recipe as it is"


def hydra_value(value: Any) -> str:
    """A plain value in the syntax of Hydra's command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(hydra_value, value))}]"
    return f"'{value}'" if value in ("on", "off") else "null" if value is None else str(value)


def apply_deltas(config: Config, deltas: Deltas) -> Config:
    changed = copy.deepcopy(config)
    for key, value in deltas.items():
        section, _, name = key.rpartition(".")
        owner = attrgetter(section)(changed)
        kind = type(getattr(owner, name))
        setattr(owner, name, kind(value) if issubclass(kind, Enum) else copy.deepcopy(value))
    return changed


def changed_keys(config: Config, deltas: Deltas) -> Deltas:
    """The `deltas` whose value differs from `config`. (A choice is a `str` Enum, equal to its text.)"""
    return {key: value for key, value in deltas.items() if attrgetter(key)(config) != value}


def candidate(config: Config, deltas: Deltas, context: SearchContext) -> Candidate:
    """The candidate that changes `config` by `deltas`, with what is known before a trial."""
    changed = apply_deltas(config, deltas)
    ranks = context.facts.degrees.ranks
    try:
        settled = settle(changed, context.facts, ranks, present=ranks, hf_config=context.hf_config)
        workers = changed.loader.resolved(torch.device(settled.facts.device)).num_workers
    except ConfigError as error:
        first, *reasons = str(error).splitlines()
        reason = (reasons[0] if reasons else first).strip().removeprefix("techniques.")
        reason += f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return Candidate(deltas, {"refused": reason}, verdict=f"{Outcome.refused.value}: {reason}")
    facts, techniques = settled.facts, settled.techniques
    options = techniques.options()
    keep_all = CheckpointingOptions(policy=Policy.none).plan
    plan = techniques.checkpointing.plan if techniques.checkpointing.enabled else keep_all
    need = forecast(facts, plan).device
    if plan == keep_all:
        options.pop("checkpointing", None)  # policy=none is the same as no checkpointing
    identity = {
        "micro_batch_size": facts.micro_batch_size,
        "workers": workers,
        "techniques": options,
        "ranks": str(facts.degrees),
    }
    fits = need <= facts.free_memory * (1 + MARGIN)
    verdict = "" if fits else f"left out: forecast {need / GIB:.1f} GiB, {facts.free_memory / GIB:.1f} GiB free"
    return Candidate(deltas, identity, need, fits, verdict)


def shrink_to_fit(config: Config, deltas: Deltas, context: SearchContext) -> Deltas:
    """`deltas` with the largest micro-batch that fits in memory, because a larger micro-batch and less recomputation
    compete for the same memory. `deltas` are unchanged if they fit already, or if no micro-batch fits."""
    if candidate(config, deltas, context).fits:
        return deltas
    for size in range(deltas.get(MICRO_BATCH, config.train.micro_batch_size) - 1, 0, -1):
        smaller = {**deltas, MICRO_BATCH: size}
        if config.train.global_batch_size % size == 0 and candidate(config, smaller, context).fits:
            return smaller
    return deltas


def micro_batch(config: Config, context: SearchContext) -> Iterator[Deltas]:
    """Yield divisors of the global batch, each a factor of 2 or more from the last: first upwards, then downwards."""
    present, total = config.train.micro_batch_size, config.train.global_batch_size
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    for sizes in (divisors, divisors[::-1]):
        last = present
        for size in sizes:
            if (size >= 2 * last) if sizes is divisors else (2 * size <= last):
                last = size
                yield {MICRO_BATCH: size}


def checkpointing(config: Config, context: SearchContext) -> Iterator[Deltas]:
    """Yield policies, from the policy that keeps most to the policy that keeps least, then `auto`."""
    layers = skeleton(context.facts.model)
    mlp = getattr(decoder_layers(layers)[0], "mlp", None) if layers is not None else None
    linears = policy.linears(mlp) if mlp is not None else {}
    wide = [name for name, (inward, outward) in linears.items() if outward > inward]
    options: list[Deltas] = [
        {"policy": "none"},
        {"policy": "selective"},
        *([{"policy": "selective", "recompute": wide}] if wide else []),
        *([{"policy": "budget", "budget": 0.5}] if config.techniques.compile.enabled else []),
        {"policy": "selective", "save": ["attention"]},
        {"policy": "full"},
        {"policy": "auto"},
    ]
    defaults = {**dataclasses.asdict(CheckpointingOptions()), "enabled": True}
    for chosen in options:
        settings = {**defaults, **chosen}.items()
        yield {f"techniques.checkpointing.{key}": getattr(value, "value", value) for key, value in settings}


def attention(config: Config, context: SearchContext) -> Iterator[Deltas]:
    for name, backend in BACKENDS.items():
        if backend.fused or context.facts.sequence_length < MAX_EAGER_TOKENS:
            yield {"techniques.attention.backend": name}


def compiling(config: Config, context: SearchContext) -> Iterator[Deltas]:
    key = "techniques.compile."
    yield {key + "enabled": False}
    options = [("layers", "default"), ("layers", "max_autotune")]
    if Shape.of(context.facts.model).layers <= MAX_GRAPH_LAYERS:
        options += [("model", "default"), ("model", "reduce_overhead")]
    for scope, mode in options:
        if context.facts.device == "cuda" or mode == "default":
            yield {key + "enabled": True, key + "scope": scope, key + "mode": mode}


def liger(config: Config, context: SearchContext) -> Iterator[Deltas]:
    """On a GPU yield three settings: Liger off, the kernels that `auto` chooses, and the fused loss alone."""
    if context.facts.device != "cuda":
        return
    key = "techniques.liger."
    yield {key + "enabled": False}
    for kernels in (AUTO, [LigerKernel.fused_linear_cross_entropy.value]):
        yield {key + "enabled": True, key + "kernels": kernels}


def fused_lora(config: Config, context: SearchContext) -> Iterator[Deltas]:
    if config.techniques.lora.enabled:
        yield from ({"techniques.lora.fused": switch} for switch in ("on", "off"))


def workers(config: Config, context: SearchContext) -> Iterator[Deltas]:
    yield from ({"loader.num_workers": number} for number in WORKERS if number < context.facts.cores)


AXES: dict[str, Callable[[Config, SearchContext], Iterator[Deltas]]] = {
    "attention": attention,
    "compile": compiling,
    "liger": liger,
    "fused_lora": fused_lora,
    "checkpointing": checkpointing,
    "micro_batch": micro_batch,
    "workers": workers,
}
"""The axes in the order of the search. Kernels come first, because they decide what fits in memory. The loader's
workers come last, because they limit only a fast setting."""
