"""What would help where memory ran out: single changes of a recipe, and how much less each would need by memory.py's arithmetic.

Each change is taken alone, from the recipe as it is, with the model's sizes and the rows that did not fit. One that cannot be had
here (a package that is not installed, a model that a technique does not serve) is left out: the techniques' own `check` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from fxtune.errors import ConfigError
from fxtune.optim import config as update_rule
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.system.units import GIB
from fxtune.techniques.checkpointing.technique import Policy
from fxtune.techniques.estimate.memory import CONTEXT, Need
from fxtune.techniques.facts import Facts
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize import Type

MOST = 3
WORTH = 0.01
"""Share of the need below which a change is not worth a line."""


class Stage(str, Enum):
    """What ran out of memory, for what it holds."""

    weights = "weights"
    """Building, loading, updating: weights, gradients, moments."""
    forward = "forward"
    """And the loss: evaluation, answers."""
    training = "training"
    """And what layers keep for a backward pass."""


@dataclass(frozen=True)
class Remedy:
    change: str
    """As it is typed."""
    saves: int
    """Bytes."""


def remedies(facts: Facts, techniques: Pipeline, config: OptimizerConfig, stage: Stage) -> tuple[int, list[Remedy]]:
    """The bytes that `stage` needs by the forecast, and up to three changes that make them fewer, the best one first.

    `facts`: with the rows and the row length that did not fit. `techniques`: every `auto` decided.
    """
    need = _bytes(techniques.memory_need(facts), stage) - (CONTEXT if facts.device == "cpu" else 0)
    found = []
    for change, other, pipeline in _ways(facts, techniques, config, stage):
        try:
            ready, _ = pipeline.resolved(other)
        except ConfigError:
            continue
        found.append(
            Remedy(change, _bytes(techniques.memory_need(facts), stage) - _bytes(ready.memory_need(other), stage))
        )
    worth = [remedy for remedy in found if remedy.saves > WORTH * need]
    return need, sorted(worth, key=lambda remedy: -remedy.saves)[:MOST]


def told(need: int, found: list[Remedy], stage: Stage, rows: int, width: int) -> str:
    """remedies() in words, some lines."""
    if not found:
        return "What helps: shorter rows (data.sequence_length), a smaller model, or a device with more memory."
    wide = max(len(remedy.change) for remedy in found)
    lines = [f"  {remedy.change:<{wide}}  about {remedy.saves / GIB:.2g} GiB less" for remedy in found]
    what = (
        "the weights, their gradients and moments"
        if stage is Stage.weights
        else f"this model and {rows} x {width:,} tokens"
    )
    return (
        f"What would help most, each alone, by arithmetic for {what}, which need some {need / GIB:.2g} GiB:\n"
        + "\n".join(lines)
    )


def _bytes(need: Need, stage: Stage) -> int:
    if stage is not Stage.training:
        need = replace(need, kept=0, layer=0, loss=need.loss if stage is Stage.forward else 0)
    return need.device


def _ways(
    facts: Facts, techniques: Pipeline, config: OptimizerConfig, stage: Stage
) -> Iterator[tuple[str, Facts, Pipeline]]:
    """(what to change, the facts then, the techniques then) of each change there is."""
    lora, quantize, liger = techniques.lora, techniques.quantize, techniques.liger
    width = facts.row_length
    if stage is Stage.training and facts.micro_batch_size > 1:
        less = facts.micro_batch_size // 2
        yield f"train.micro_batch_size={less}", replace(facts, micro_batch_size=less), techniques
    if stage is Stage.training:
        yield from ((change, facts, pipeline) for change, pipeline in _keeping_less(facts, techniques))
    if stage is not Stage.weights and width > 2:
        yield (
            f"data.sequence_length={width // 2}",
            replace(facts, sequence_length=width // 2, rows=(width // 2,)),
            techniques,
        )
    if not lora.enabled:
        yield "techniques.lora.enabled=true", facts, replace(techniques, lora=replace(lora, enabled=True))
        eight = OptimizerConfig(**{**vars(config), "name": OptimizerName.adamw_8bit})
        if config.name is OptimizerName.adamw and not list(update_rule.check(eight, facts)):
            yield "optimizer.name=adamw_8bit", replace(facts, optimizer=OptimizerName.adamw_8bit.value), techniques
    elif not quantize.enabled or quantize.type is not Type.nf4:
        change = "techniques.quantize.enabled=true" if not quantize.enabled else "techniques.quantize.type=nf4"
        yield (
            change,
            facts,
            replace(techniques, quantize=replace(quantize, enabled=True, type=Type.nf4, head=False, embeddings=False)),
        )
    if not liger.enabled:
        yield "techniques.liger.enabled=true", facts, replace(techniques, liger=replace(liger, enabled=True))
    if facts.dtype == "float32":
        yield "model.dtype=bfloat16", replace(facts, dtype="bfloat16"), techniques


def _keeping_less(facts: Facts, techniques: Pipeline) -> Iterator[tuple[str, Pipeline]]:
    """Changes of what layers keep for their backward pass."""
    keeps = techniques.checkpointing
    full = replace(keeps, enabled=True, policy=Policy.full, every=1, save=[], recompute=[], mix={})
    group = "techniques.checkpointing"
    changes = [f"{group}.enabled=true"] if not keeps.enabled else []
    changes += [f"{group}.policy=full"] if keeps.policy is not Policy.full else []
    changes += [f"{group}.every=1"] if keeps.every > 1 else []
    if changes:
        yield " ".join(changes), replace(techniques, checkpointing=full)
    else:
        if not keeps.offload:
            yield f"{group}.offload=true", replace(techniques, checkpointing=replace(full, offload=True))
        tiles = max(4, 2 * keeps.mlp_tiles)
        yield f"{group}.mlp_tiles={tiles}", replace(techniques, checkpointing=replace(keeps, mlp_tiles=tiles))
