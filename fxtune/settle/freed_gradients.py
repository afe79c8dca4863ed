"""Decides whether weights are updated in the backward pass (training/in_backward.py), from the recipe and from reasons
against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.facts.options import Autocast, Scope, Switch
from fxtune.facts.run import Facts
from fxtune.optim.config import OptimizerName
from fxtune.system.terminal.units import GIB, counted

COUNTS_FOR_ALL = (OptimizerName.apex_adamw, OptimizerName.adamw_schedulefree)
"""Optimizers that count steps once for all weights, so they cannot update weights one by one."""
UNCLIPPED, UNRECORDED = "train.max_grad_norm=0", "techniques.compile.cuda_graphs=off"


def refusals(config: Config, facts: Facts) -> Iterator[str]:
    """If the recipe asks for updates in the backward pass, yield each reason why they are impossible, with what to
    change."""
    if config.optimizer.in_backward is Switch.on:
        for why, change in _reasons(config, facts):
            if change != UNRECORDED:  # the compile technique refuses this
                yield f"optimizer.in_backward: {why}. Set {change}, or in_backward=off."


def change_for(config: Config, facts: Facts) -> str:
    """The keys, as a user types them, that would turn on updates in the backward pass. Empty if they are on, or if
    these keys would not be enough."""
    if facts.in_backward:
        return ""
    changes = [change for _, change in _reasons(config, facts)]
    return " ".join(["optimizer.in_backward=on", *changes]) if changes in ([], [UNCLIPPED]) else ""


def refuse_halved(asked: Switch, rows: int) -> str:
    """A note that `auto` is off in a resumed run. The run halved its micro-batches to `rows` rows, so a step has
    several micro-batches. Raises ConfigError if the recipe asks for `on`."""
    halved = f"the run halved its micro-batches to {counted(rows, 'rows')} when memory ran out"
    why = f"{halved}, so its steps add up gradients"
    if asked is Switch.on:
        raise ConfigError(
            f"optimizer.in_backward: {why}, and keep all gradients. Set it to off, or start another run: run.dir=NEW."
        )
    return f"optimizer: weights are not updated in the backward pass, because {why}"


def decide(config: Config, facts: Facts) -> tuple[Facts, str]:
    """A copy of `facts` with optimizer.in_backward decided, and a line if `auto` has switched it on, else an empty
    text. Each `auto` of the techniques in `facts` may still be undecided."""
    asked = config.optimizer.in_backward
    if asked is not Switch.auto:
        return replace(facts, in_backward=asked is Switch.on), ""
    if facts.device != "cuda" or any(_reasons(config, facts)):
        return facts, ""
    needs = []
    for freed in (False, True):
        variant = replace(facts, in_backward=freed)
        needs.append(config.techniques.decided(variant)[0].memory_need(variant).device)
    if needs[0] <= facts.free_memory or needs[1] >= needs[0]:
        return facts, ""
    kept, least, free = (bytes_ / GIB for bytes_ in (*needs, facts.free_memory))
    why = f"{least:.1f} of {free:.1f} GiB free by the forecast, and {kept:.1f} with all gradients at once"
    return replace(facts, in_backward=True), f"optimizer: each weight is updated in the backward pass ({why})"


def _reasons(config: Config, facts: Facts) -> Iterator[tuple[str, str]]:
    """Yield (why, what to set instead) for each reason why weights cannot be updated in the backward pass."""
    train, techniques, optimizer = config.train, facts.techniques, config.optimizer
    if techniques.lora.enabled:
        yield "adapters' gradients are small, so nothing would be saved", "techniques.lora.enabled=false"
    if train.max_grad_norm:
        yield (
            f"train.max_grad_norm={train.max_grad_norm:g} clips by the norm of all gradients, which then never exist "
            "together",
            UNCLIPPED,
        )
    if train.largest_batch != train.micro_batch_size:
        yield (
            f"steps of {train.largest_batch} rows in micro-batches of {train.micro_batch_size} add up gradients, so "
            "all gradients are kept",
            "train.batch_ramp=[]" if train.batch_ramp else f"train.global_batch_size={train.micro_batch_size}",
        )
    if facts.degrees.ranks > 1:
        yield f"this run has {facts.degrees}, which add up gradients before the update", "run.gpus=1"
    if optimizer.name in COUNTS_FOR_ALL:
        yield f"{optimizer.name.value} counts steps for all weights together", "optimizer.name=adamw"
    if techniques.precision.enabled and techniques.precision.autocast is Autocast.float16:
        yield (
            "float16's loss scale is divided out of all gradients after the backward pass",
            "techniques.precision.autocast=bfloat16",
        )
    if techniques.compile.enabled and techniques.compile.scope is Scope.model:
        yield (
            "techniques.compile.scope=model is one graph, which returns all gradients at once",
            "techniques.compile.scope=layers",
        )
    if techniques.compile.enabled and techniques.compile.cuda_graphs is Switch.on:
        yield "CUDA graphs keep all gradients", UNRECORDED
    if train.noise_scale:
        yield "train.noise_scale compares several micro-batches", "train.noise_scale=false"
