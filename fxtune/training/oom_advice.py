"""Advice after running out of memory: single changes of the recipe, and how much memory each saves by the estimate of
techniques/estimate/memory.py.

Each change is evaluated alone, with the model's sizes and the rows that did not fit. A change that a technique's own
`check` refuses here is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from fxtune.errors import ConfigError
from fxtune.facts.options import Policy, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.optim import config as update_rule
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.system.units import GIB
from fxtune.techniques.estimate.memory import WORKSPACES, Need
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.selection import takes_experts

MAX_CHANGES = 3
MIN_SHARE = 0.01
"""A change that saves a smaller share of the memory is left out."""


class MemoryPhase(str, Enum):
    """The part of a run that ran out of memory, by the kinds of memory that it holds."""

    weights = "weights"
    """Weights, gradients and moments: building, loading, updating."""
    forward = "forward"
    """These and the loss: evaluation, answers."""
    training = "training"
    """These and the activations kept for the backward pass."""


@dataclass(frozen=True)
class Change:
    setting: str
    """As the user types it."""
    saves: int
    """Estimated bytes."""


def advice(
    facts: Facts, techniques: Pipeline, config: OptimizerConfig, phase: MemoryPhase, freeing: str = ""
) -> tuple[int, list[Change]]:
    """The estimated bytes that `phase` needs, and up to three changes that save memory, the best one first.

    `facts`: with the rows and the row length that did not fit. `techniques`: every `auto` decided. `freeing`: the keys
    that would free gradients in the backward pass; empty if no keys would.
    """
    before = _phase_bytes(techniques.memory_need(facts), phase)
    need = before - (WORKSPACES if facts.device == "cpu" else 0)
    changes = []
    for setting, changed_facts, pipeline in _candidates(facts, techniques, config, phase, freeing):
        try:
            ready, _ = pipeline.resolved(changed_facts)
        except ConfigError:
            continue
        changes.append(Change(setting, before - _phase_bytes(ready.memory_need(changed_facts), phase)))
    changes = [change for change in changes if change.saves > MIN_SHARE * need]
    return need, sorted(changes, key=lambda change: -change.saves)[:MAX_CHANGES]


def to_text(need: int, changes: list[Change], phase: MemoryPhase, rows: int, width: int) -> str:
    """advice() as lines for the user."""
    if not changes:
        return "What helps: shorter rows (data.sequence_length), a smaller model, or a device with more memory."
    column = max(len(change.setting) for change in changes)
    lines = [f"  {change.setting:<{column}}  about {change.saves / GIB:.2g} GiB less" for change in changes]
    of_weights = phase is MemoryPhase.weights
    of = "the weights, their gradients and moments" if of_weights else f"this model and {rows} x {width:,} tokens"
    return (
        f"What would help most, each alone, by arithmetic for {of}, which need some {need / GIB:.2g} GiB:\n"
        + "\n".join(lines)
    )


def _phase_bytes(need: Need, phase: MemoryPhase) -> int:
    if phase is not MemoryPhase.training:
        need = replace(need, kept=0, layer=0, loss=need.loss if phase is MemoryPhase.forward else 0)
    return need.device


def _candidates(
    facts: Facts, techniques: Pipeline, config: OptimizerConfig, phase: MemoryPhase, freeing: str
) -> Iterator[tuple[str, Facts, Pipeline]]:
    """Yield each candidate change as (setting, facts with it, techniques with it)."""
    lora, quantize, liger = techniques.lora, techniques.quantize, techniques.liger
    half, narrow = facts.micro_batch_size // 2, facts.row_length // 2
    if phase is MemoryPhase.training:
        if half:
            yield f"train.micro_batch_size={half}", replace(facts, micro_batch_size=half), techniques
        yield from ((setting, facts, pipeline) for setting, pipeline in _more_checkpointing(techniques))
    if phase is not MemoryPhase.weights and narrow > 1:
        yield f"data.sequence_length={narrow}", replace(facts, sequence_length=narrow, rows=(narrow,)), techniques
    if not lora.enabled:
        yield "techniques.lora.enabled=true", facts, replace(techniques, lora=replace(lora, enabled=True))
        eight = replace(config, name=OptimizerName.adamw_8bit)
        if config.name is OptimizerName.adamw and not list(update_rule.refusals(eight, facts)):
            yield "optimizer.name=adamw_8bit", replace(facts, optimizer=OptimizerName.adamw_8bit.value), techniques
        if freeing:
            yield freeing, replace(facts, in_backward=True), techniques
    elif not quantize.enabled or quantize.type is not WeightFormat.nf4:
        setting = "techniques.quantize.enabled=true" if not quantize.enabled else "techniques.quantize.type=nf4"
        nf4 = replace(quantize, enabled=True, type=WeightFormat.nf4, head=False, embeddings=False, experts=Switch.auto)
        nf4.experts = Switch.on if takes_experts(nf4, replace(facts, techniques=techniques)) else Switch.off
        yield setting, facts, replace(techniques, quantize=nf4)
    if not liger.enabled:
        yield "techniques.liger.enabled=true", facts, replace(techniques, liger=replace(liger, enabled=True))
    if facts.dtype == "float32":
        yield "model.dtype=bfloat16", replace(facts, dtype="bfloat16"), techniques


def _more_checkpointing(techniques: Pipeline) -> Iterator[tuple[str, Pipeline]]:
    """Settings that keep fewer activations for the backward pass."""
    checkpointing, group = techniques.checkpointing, "techniques.checkpointing"
    full = replace(checkpointing, enabled=True, policy=Policy.full, every=1, save=[], recompute=[], mix={})
    settings = [f"{group}.enabled=true"] if not checkpointing.enabled else []
    settings += [f"{group}.policy=full"] if checkpointing.policy is not Policy.full else []
    settings += [f"{group}.every=1"] if checkpointing.every > 1 else []
    if settings:
        yield " ".join(settings), replace(techniques, checkpointing=full)
        return
    if not checkpointing.offload:
        yield f"{group}.offload=true", replace(techniques, checkpointing=replace(full, offload=True))
    tiles = max(4, 2 * checkpointing.mlp_tiles)
    yield f"{group}.mlp_tiles={tiles}", replace(techniques, checkpointing=replace(checkpointing, mlp_tiles=tiles))
