"""What `fxtune tune` varies: the values worth a trial on each axis, and what is known of one before it runs.

A point is the user's config with some keys changed. Before a trial is spent on it, three questions are answered from plain
facts: can it run here (every technique's own check), would it fit (fxtune/techniques/estimate/memory.py), and is it another name for a point that
was measured (an `auto` and what it becomes)? The process that searches asks them without touching the card, which belongs to
the trials.

None of the axes changes what is computed: the global batch, the model, the adapters and their numbers stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from fxtune.errors import ConfigError
from fxtune.models.structure import decoder_layers, skeleton
from fxtune.techniques.attention.backends import BACKENDS
from fxtune.techniques.base import Switch
from fxtune.techniques.checkpointing import policy
from fxtune.techniques.checkpointing.technique import Checkpointing, Policy
from fxtune.techniques.estimate.memory import forecast
from fxtune.techniques.facts import Facts
from fxtune.techniques.lora import fuse, gemm_choice

if TYPE_CHECKING:
    from fxtune.config.root import Config

Deltas = dict[str, Any]
"""Keys that a point changes, with plain values: {"techniques.attention.backend": "sdpa"}."""
MARGIN = 0.15
"""The forecast is right to this share: what needs more than that beyond the memory that is free is not tried."""
EAGER = 2048
"""Tokens in a row from which eager attention, which writes out all scores, is not worth a trial."""
ONE_GRAPH = 16
"""Layers up to which a trial of the decoder as one graph is worth its compile time, which grows with them."""
WORKERS = (0, 2, 4, 8)


@dataclass(frozen=True)
class SearchContext:
    """What a search stands on."""

    facts: Facts
    precision: str
    """What matmuls round to: float32, tf32, bfloat16 or float16."""
    data: str = ""
    """The fingerprint of the data; empty: it was not looked at."""
    document: int = 0
    """Tokens of a document, on average, up to the next power of two."""


@dataclass(frozen=True)
class Candidate:
    """What is known of a point before it is tried."""

    identity: dict[str, Any]
    """All that its speed depends on, each `auto` decided. Two points with the same one are the same trial."""
    need: int = 0
    """Bytes on the device, by the forecast."""
    refused: str = ""
    """Why it cannot run here."""
    fits: bool = True


def applied(config: Config, deltas: Deltas) -> Config:
    """A copy of `config` with the keys of `deltas` set."""
    made = copy.deepcopy(config)
    for key, value in deltas.items():
        owner: Any = made
        *path, name = key.split(".")
        for part in path:
            owner = getattr(owner, part)
        kind = type(getattr(owner, name))
        setattr(owner, name, kind(value) if issubclass(kind, Enum) else copy.deepcopy(value))
    return made


def plain(options: Any) -> dict[str, Any]:
    """A technique's options as plain values."""
    return {
        key: value.value if isinstance(value, Enum) else value for key, value in dataclasses.asdict(options).items()
    }


def value_of(config: Config, key: str) -> Any:
    """What `config` says under a dotted key, as a plain value."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found.value if isinstance(found, Enum) else found


def differing(config: Config, deltas: Deltas) -> Deltas:
    """Those of `deltas` that change something in `config`."""
    return {key: value for key, value in deltas.items() if value_of(config, key) != value}


def outlook(config: Config, ground: SearchContext) -> Candidate:
    """What the point `config` would meet on `ground`."""
    facts = replace(ground.facts, micro_batch_size=config.train.micro_batch_size)
    try:
        # The card belongs to the trials, so the search times no kernel on it. The forecast does not depend on those.
        techniques, _ = config.techniques.resolved(facts, measure=False)
        workers = config.loader.resolved(torch.device(facts.device)).num_workers
    except ConfigError as error:
        first, *reasons = str(error).splitlines()
        told = (reasons[0] if reasons else first).strip().removeprefix("techniques.")
        return Candidate({}, refused=told + (f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""))
    asked = techniques.options()
    everything = Checkpointing(policy=Policy.none).keeping()
    keeping = techniques.checkpointing.keeping() if techniques.checkpointing.enabled else everything
    need = forecast(replace(facts, techniques=techniques), keeping).device
    if facts.device == "cuda" and techniques.compile.enabled and config.techniques.liger.enabled:
        asked["liger"] = dataclasses.asdict(
            config.techniques.liger
        )  # which of its kernels `auto` takes is measured in the trial
    if keeping == everything:
        asked.pop("checkpointing", None)  # policy=none is no checkpointing
    return Candidate(
        {"micro_batch_size": config.train.micro_batch_size, "workers": workers, "techniques": asked},
        need,
        fits=need <= facts.free_memory * (1 + MARGIN),
    )


def micro_batch(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """Divisors of the global batch, each at least twice the one before: upwards from the present one, then downwards."""
    whole, mine = config.train.global_batch_size, config.train.micro_batch_size
    sizes, thinned = [size for size in range(1, whole + 1) if whole % size == 0], [mine]
    for size in sizes:
        if size >= 2 * thinned[-1]:
            thinned.append(size)
    down = [mine]
    for size in reversed(sizes):
        if 2 * size <= down[-1]:
            down.append(size)
    yield from ({"train.micro_batch_size": size} for size in [*thinned[1:], *down[1:]])


def checkpointing(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """From what keeps the most to what keeps the least, and `auto`. What a layer does not name is left out."""
    layers = skeleton(ground.facts.model)
    mlp = getattr(decoder_layers(layers)[0], "mlp", None) if layers is not None else None
    wide = (
        [name for name, (inward, outward) in policy.linears(mlp).items() if outward > inward]
        if mlp is not None
        else []
    )
    off = {**plain(Checkpointing()), "enabled": True, "policy": "none"}
    ways: list[Deltas] = [
        {},
        {"policy": "selective"},
        *([{"policy": "selective", "recompute": wide}] if wide else []),
        {"policy": "selective", "save": ["attention"]},
        {"policy": "full"},
        {"policy": "auto"},
    ]
    if config.techniques.compile.enabled:
        ways.insert(3, {"policy": "budget", "budget": 0.5})
    for way in ways:
        yield {f"techniques.checkpointing.{key}": value for key, value in {**off, **way}.items()}


def attention(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """Each backend that may be of use."""
    for name in BACKENDS:
        if name != "eager" or ground.facts.sequence_length < EAGER:
            yield {"techniques.attention.backend": name}


def compiling(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """Off, by layer, by layer with each matmul's kernels timed, and as a whole where that compiles in reasonable time."""
    yield {"techniques.compile.enabled": False}
    ways = [("layers", "default"), ("layers", "max_autotune")]
    if (ground.facts.text.get("num_hidden_layers") or 0) <= ONE_GRAPH:
        ways += [("model", "default"), ("model", "reduce_overhead")]
    for scope, mode in ways:
        if ground.facts.device == "cuda" or mode == "default":
            yield {
                "techniques.compile.enabled": True,
                "techniques.compile.scope": scope,
                "techniques.compile.mode": mode,
            }


def liger(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """On a GPU: off, all as it chooses, all but the head, and the head alone. Elsewhere its kernels are not to be had."""
    if ground.facts.device != "cuda":
        return
    key = "techniques.liger."
    kernels = ("rms_norm", "layer_norm", "rope", "swiglu", "geglu")
    yield {key + "enabled": False}
    for kernel, head in (("auto", "auto"), ("auto", "off"), ("off", "on")):
        yield {
            key + "enabled": True,
            **{key + name: kernel for name in kernels},
            key + "fused_linear_cross_entropy": head,
        }


def fused_lora(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """Adapters inside the matmuls of their base, and apart from them."""
    if config.techniques.lora.enabled and hasattr(config.techniques.lora, "fused"):
        yield from ({"techniques.lora.fused": switch} for switch in ("on", "off"))


def matmul(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """Whose kernel multiplies by the weights of fused adapters, on a card that has two."""
    if not config.techniques.lora.enabled or config.techniques.lora.fused is Switch.off:
        return
    facts = replace(ground.facts, micro_batch_size=config.train.micro_batch_size, techniques=config.techniques)
    if not (fuse.hindrance(facts) or gemm_choice.hindrance(facts)):
        yield from ({"techniques.lora.matmul": kernel} for kernel in ("cute", "cublas"))


def workers(config: Config, ground: SearchContext) -> Iterator[Deltas]:
    """Processes that build batches, as many as there are cores besides the one that trains."""
    yield from ({"loader.num_workers": number} for number in WORKERS if number < ground.facts.cores)


AXES: dict[str, Callable[[Config, SearchContext], Iterator[Deltas]]] = {
    "attention": attention,
    "compile": compiling,
    "liger": liger,
    "fused_lora": fused_lora,
    "matmul": matmul,
    "checkpointing": checkpointing,
    "micro_batch": micro_batch,
    "workers": workers,
}
"""Kernels first, for what they take decides what fits; the loader last, for it shows when all else is fast."""


def fitting(config: Config, deltas: Deltas, ground: SearchContext) -> Deltas:
    """`deltas`, with the largest smaller micro-batch at which they fit, if they do not at the present one and one is there."""
    if outlook(applied(config, deltas), ground).fits:
        return deltas
    whole, mine = config.train.global_batch_size, config.train.micro_batch_size
    for size in range(mine - 1, 0, -1):
        smaller = {**deltas, "train.micro_batch_size": size}
        if whole % size == 0 and outlook(applied(config, smaller), ground).fits:
            return smaller
    return deltas
