"""Advice after running out of memory: single changes of the recipe, each with an estimate of the memory that it saves
for this model and the rows that did not fit (estimate/memory.py). Changes that a technique's `check` refuses on this
machine are left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from fxtune.errors import ConfigError
from fxtune.estimate.memory import WORKSPACES, Need
from fxtune.facts.options import Offloaded, Policy, Switch, WeightFormat
from fxtune.facts.run import Facts
from fxtune.optim import config as optimizer_config
from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import state_of
from fxtune.system.terminal.units import GIB
from fxtune.techniques.pipeline import Pipeline
from fxtune.techniques.quantize.selection import takes_experts

MAX_CHANGES = 3
MIN_SAVED_SHARE = 0.01
"""A change that saves a smaller share of the needed memory is left out."""


class MemoryPhase(str, Enum):
    """The part of a run that ran out of memory. The parts differ in the kinds of memory that they hold."""

    weights = "weights"
    """Building, loading and updating the model: weights, gradients and moments."""
    forward = "forward"
    """Evaluation and answers: the memory of `weights`, and the loss."""
    training = "training"
    """A training step: the memory of `forward`, and the activations kept for the backward pass."""


@dataclass(frozen=True)
class Change:
    setting: str
    """`key=value`, as a user types it."""
    saved_bytes: int
    """An estimate of the device memory that this change saves."""


def advice(
    facts: Facts, techniques: Pipeline, config: OptimizerConfig, phase: MemoryPhase, in_backward_keys: str = ""
) -> tuple[int, list[Change]]:
    """The estimated bytes that `phase` needs, and up to three changes that save memory. The change that saves most
    comes first.

    `facts` has the rows and the row length that did not fit. In `techniques` every `auto` is decided.
    `in_backward_keys`: settings that would update weights in the backward pass, from change_for(); empty if there are
    none.
    """
    before = _phase_bytes(techniques.memory_need(facts), phase)
    needed = before - (WORKSPACES if facts.device == "cpu" else 0)  # libraries on a CPU have no such workspaces
    changes = []
    for setting, changed_facts, pipeline in _candidates(facts, techniques, config, phase, in_backward_keys):
        try:
            ready, _ = pipeline.resolved(changed_facts)
        except ConfigError:
            continue
        changes.append(Change(setting, before - _phase_bytes(ready.memory_need(changed_facts), phase)))
    changes = [change for change in changes if change.saved_bytes > MIN_SAVED_SHARE * needed]
    return needed, sorted(changes, key=lambda change: -change.saved_bytes)[:MAX_CHANGES]


def to_text(needed: int, changes: list[Change], phase: MemoryPhase, rows: int, row_length: int) -> str:
    """The result of advice() as lines for the user."""
    if not changes:
        return "What helps: shorter rows (data.sequence_length), a smaller model, or a device with more memory."
    column = max(len(change.setting) for change in changes)
    lines = [f"  {change.setting:<{column}}  about {change.saved_bytes / GIB:.2g} GiB less" for change in changes]
    held = f"this model and {rows} x {row_length:,} tokens"
    if phase is MemoryPhase.weights:
        held = "the weights, their gradients and moments"
    return (
        f"What would help most, each change alone (by arithmetic {held} need some {needed / GIB:.2g} GiB):\n"
        + "\n".join(lines)
    )


def _phase_bytes(need: Need, phase: MemoryPhase) -> int:
    if phase is not MemoryPhase.training:
        need = replace(need, kept=0, backward=0)
    if phase is MemoryPhase.weights:
        need = replace(need, loss=0, images=0, images_peak=0)
    return need.device


def _candidates(
    facts: Facts, techniques: Pipeline, config: OptimizerConfig, phase: MemoryPhase, in_backward_keys: str
) -> Iterator[tuple[str, Facts, Pipeline]]:
    """Yield each candidate change as (setting, changed facts, changed techniques)."""
    lora, quantize, liger = techniques.lora, techniques.quantize, techniques.liger
    half_rows, half_length = facts.micro_batch_size // 2, facts.row_length // 2
    if phase is MemoryPhase.training:
        if half_rows:
            yield f"train.micro_batch_size={half_rows}", replace(facts, micro_batch_size=half_rows), techniques
        yield from ((setting, facts, pipeline) for setting, pipeline in _more_checkpointing(techniques))
    if phase is not MemoryPhase.weights and half_length > 1:
        shorter = replace(facts, sequence_length=half_length, rows=(half_length,))
        yield f"data.sequence_length={half_length}", shorter, techniques
    if not lora.enabled:
        yield "techniques.lora.enabled=true", facts, replace(techniques, lora=replace(lora, enabled=True))
        adamw_8bit = replace(config, name=OptimizerName.adamw_8bit)
        if config.name is OptimizerName.adamw and not list(optimizer_config.refusals(adamw_8bit, facts)):
            yield "optimizer.name=adamw_8bit", replace(facts, optimizer=state_of(adamw_8bit)), techniques
        if in_backward_keys:
            yield in_backward_keys, replace(facts, in_backward=True), techniques
    elif not quantize.enabled or quantize.type is not WeightFormat.nf4:
        setting = "techniques.quantize.enabled=true" if not quantize.enabled else "techniques.quantize.type=nf4"
        nf4 = replace(quantize, enabled=True, type=WeightFormat.nf4, head=False, embeddings=False, experts=Switch.auto)
        nf4.experts = Switch.on if takes_experts(nf4, replace(facts, techniques=techniques)) else Switch.off
        yield setting, facts, replace(techniques, quantize=nf4)
    if lora.enabled and lora.vision:
        yield "techniques.lora.vision=off", facts, replace(techniques, lora=replace(lora, vision=False))
    if facts.trains_images:
        yield "optimizer.lr_vision=null", replace(facts, trains_images=False), techniques
    if not liger.enabled:
        yield "techniques.liger.enabled=true", facts, replace(techniques, liger=replace(liger, enabled=True))
    if facts.dtype == "float32":
        yield "model.dtype=bfloat16", replace(facts, dtype="bfloat16"), techniques


def _more_checkpointing(techniques: Pipeline) -> Iterator[tuple[str, Pipeline]]:
    """Yield settings that keep fewer activations for the backward pass, each with the changed techniques."""
    checkpointing, group = techniques.checkpointing, "techniques.checkpointing"
    full = replace(checkpointing, enabled=True, policy=Policy.full, every=1, save=[], recompute=[], mix={})
    settings = [f"{group}.enabled=true"] if not checkpointing.enabled else []
    settings += [f"{group}.policy=full"] if checkpointing.policy is not Policy.full else []
    settings += [f"{group}.every=1"] if checkpointing.every > 1 else []
    if settings:
        yield " ".join(settings), replace(techniques, checkpointing=full)
        return
    if checkpointing.offload is Offloaded.none:
        yield f"{group}.offload=inputs", replace(techniques, checkpointing=replace(full, offload=Offloaded.inputs))
    tiles = max(4, 2 * checkpointing.mlp_tiles)
    yield f"{group}.mlp_tiles={tiles}", replace(techniques, checkpointing=replace(checkpointing, mlp_tiles=tiles))
