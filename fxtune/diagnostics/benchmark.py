"""How fast a recipe is as it stands: the training step itself (TrainStep), timed.

`measure` builds what a run builds (the same refusals, proofs, data path, optimizer), takes warm-up steps, which compile, tune and
fill caches, and then the measured steps. Nothing is evaluated, asked or saved, and there is no run folder.
The device is waited for where training waits (every `train.log_every` steps) and at both ends, nowhere else; the time of each
step is that between two marks on the device's own stream.

Tokens are those of real documents. Slots of a row that hold none are padding, counted apart and never part of a rate.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from fxtune.config.root import Config, OutOfMemory
from fxtune.data.batches.loader import Loader, StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.diagnostics.energy import Energy
from fxtune.objectives.causal_lm import CausalLM
from fxtune.system.profiler import times
from fxtune.system.units import GIB
from fxtune.tracking.throughput import memory_gib
from fxtune.tracking.tracker import Display as DisplayKind
from fxtune.tracking.tracker import TrackingConfig
from fxtune.training.builder import RunBuilder
from fxtune.training.oom_advice import MemoryPhase
from fxtune.training.step import Metrics, TrainStep
from fxtune.training.step_monitor import StepStatistics
from fxtune.tuning import trial

STEPS = 10
"""Measured, unless told."""
WARM_UP = 3
PROFILED = 2
"""Steps whose kernels are timed, where that is asked for."""
LEAST_WARM_UP = 2
"""The first step compiles, the second finds the gradients and moments that the first one made."""

_COMMANDS: list[bool] = []
"""Filled by the first measurement of this process. A later one (a sweep's) starts with its own call, not with the process."""


@dataclass
class Measured:
    """Figures of the measured steps, unless a field says otherwise. None: cannot be known here."""

    tokens_per_second: float
    """Of real documents, over all of the time between the first and the last measured step's end."""
    supervised_tokens_per_second: float
    padding_per_second: float
    """Slots that hold no document."""
    step_seconds: float
    """Median."""
    step_seconds_p5: float
    step_seconds_p95: float
    mfu: Optional[float]
    """Model FLOPs, those of attention document by document (fxtune/tracking/throughput.py), over the card's dense peak."""
    memory_gib: float
    """Peak since the process began, building the model and compiling included: what has to fit."""
    memory_reserved_gib: Optional[float]
    """What the allocator held at most."""
    step_memory_gib: float
    """Peak of the measured steps alone; on a CPU the same as memory_gib."""
    data_wait: float
    """Share of the time in which the loop stood still for its data."""
    joules_per_token: Optional[float]
    watts: Optional[float]
    energy: str
    """What the joules are from, or why there are none."""
    first_step_seconds: float
    """From the start of the command to the end of its first step."""
    second_step_seconds: float
    compile_seconds: Optional[float]
    """Spent in torch.compile, forward and backward; None: it is off."""
    loss: Optional[float]
    """Mean over the measured steps, in nats a supervised token."""
    losses: list[Optional[float]]
    """Of every step, warm-up included; None where it was not finite."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite, warm-up included: they changed nothing."""
    steps: int
    warm_up: int
    rows: str
    """`4 x 4,096`: rows of a micro-batch and their length; the most there were."""
    decided: list[str]
    """What `auto` became, and why."""
    techniques: dict[str, Any]
    """The options of the techniques that were on, every `auto` decided."""
    device: str
    packages: dict[str, str]
    """Versions of what is installed."""
    kernels: Optional[list[tuple[str, float, float]]] = None
    """(name, seconds, calls) a step of what ran on the device, on a CPU of its operators; longest first. None: not asked for."""


def measure(
    config: Config,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    age: Optional[Callable[[], float]] = None,
    profile: bool = False,
) -> Measured:
    """Take `warm_up` steps of training and then `steps` that are measured. `config` stays as it is.

    `age`: seconds since what start-up time counts from; the start of this process by default. `profile`: take PROFILED steps more
    and tell where their time went. Raises as training does.
    """
    assert warm_up >= LEAST_WARM_UP
    assert steps >= 1
    began = time.perf_counter()
    age = age or ((lambda: time.perf_counter() - began) if _COMMANDS else process_age())
    _COMMANDS.append(True)
    builder = RunBuilder(alone(config, warm_up + steps + PROFILED * profile))
    plan = builder.read()[1].training
    model = builder.language_model(builder.build())
    builder.prove(model)
    train_step = builder.train_step(model, CausalLM())
    loader = Loader(plan, config.loader, builder.world.device)
    try:
        with builder.oom_context("Measuring", MemoryPhase.training):
            return _measured(builder, train_step, loader, steps, warm_up, age, profile)
    finally:
        loader.close()


def alone(config: Config, steps: int) -> Config:
    """A copy that takes so many steps over the same data and does nothing else: no evaluation, questions, checkpoints, trackers.

    `data.eval_fraction` stays, for it decides which documents are trained on.
    """
    config = copy.deepcopy(config)
    config.train.max_steps, config.train.epochs = steps, None
    config.train.out_of_memory = OutOfMemory.stop  # what is measured is what was asked for
    config.data.questions.path, config.data.eval_sources = None, []
    config.checkpoint.every = 0
    config.tracking = TrackingConfig(display=DisplayKind.none)
    return config


def _steps(builder: RunBuilder, train_step: TrainStep, loader: Loader) -> Iterator[tuple[StepBatches, Metrics]]:
    """Take the steps of the loader's plan, each when it is requested."""
    plan = loader.plan
    train_step.model.model.train()
    for step in loader.steps():
        yield step, train_step(plan, step, builder.learning_rate(step.index, plan.steps))


def _measured(
    builder: RunBuilder,
    train_step: TrainStep,
    loader: Loader,
    steps: int,
    warm_up: int,
    age: Callable[[], float],
    profile: bool,
) -> Measured:
    device, plan, log_every = builder.world.device, loader.plan, builder.config.train.log_every
    interval, marks = StepStatistics(scaled=train_step.loss_scale.active), Marks(device)
    meter = builder.meter(train_step.model.model, plan)
    taken, since_start = _steps(builder, train_step, loader), []
    for _, metrics in islice(taken, warm_up):
        interval.add(metrics)
        _wait(device)
        since_start.append(age())
    interval.settle()
    peak = memory_gib(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    energy = Energy(device)
    with energy:
        meter.read()  # begins anew
        marks.add()
        due = False
        for number, (step, metrics) in enumerate(islice(taken, steps), 1):
            if due:
                interval.settle()  # as training does: for the step before this one, which is under way
            interval.add(metrics)
            meter.add(step.index, step.wait_seconds)
            marks.add()
            due = number % log_every == 0
            if due:
                interval.post()
        _wait(device)
        figures = meter.read()
    interval.settle()
    kernels = (
        [
            (name, spent / PROFILED, calls / PROFILED)
            for name, (spent, calls) in sorted(times(lambda: list(taken)).items(), key=lambda one: -one[1][0])
        ]
        if profile
        else None
    )

    seconds = figures["train/step_seconds"] * steps
    counted = range(warm_up, warm_up + steps)
    tokens, supervised = (sum(count(step) for step in counted) for count in (plan.tokens, plan.supervised))
    low, middle, high = np.percentile(marks.seconds(), (5, 50, 95))
    losses = [record.loss if math.isfinite(record.loss) else None for record in interval.records]
    finite = [loss for loss in losses[warm_up:] if loss is not None]
    compiled = builder.techniques.compile
    step_peak = figures["train/memory_gib"]
    return Measured(
        tokens_per_second=tokens / seconds,
        supervised_tokens_per_second=supervised / seconds,
        padding_per_second=(sum(slots(plan, step) for step in counted) - tokens) / seconds,
        step_seconds=float(middle),
        step_seconds_p5=float(low),
        step_seconds_p95=float(high),
        mfu=figures.get("train/mfu"),
        memory_gib=max(peak, step_peak),
        memory_reserved_gib=_reserved(device),
        step_memory_gib=step_peak,
        data_wait=figures["train/data_wait"],
        joules_per_token=energy.joules / tokens if energy.joules else None,
        watts=energy.joules / seconds if energy.joules else None,
        energy=energy.how,
        first_step_seconds=since_start[0],
        second_step_seconds=since_start[1],
        compile_seconds=compiled.report().seconds if compiled.enabled else None,
        loss=sum(finite) / len(finite) if finite else None,
        losses=losses,
        skipped_steps=interval.skipped,
        steps=steps,
        warm_up=warm_up,
        rows=_rows(plan, counted),
        decided=builder.decided,
        techniques=json.loads(json.dumps(builder.techniques.options())),
        device=builder.facts.device_name,
        packages=builder.facts.packages,
        kernels=kernels,
    )


class Marks:
    """The time between the ends of steps, on the device's own clock: nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def add(self) -> None:
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next. To be called after the device was waited for."""
        return [
            before.elapsed_time(after) / 1e3 if self._cuda else after - before
            for before, after in pairwise(self._marks)
        ]


def slots(plan: Plan, step: int) -> int:
    """Tokens that the rows of a step have room for."""
    pieces = [plan.batch_spec(step, micro) for micro in range(plan.micro_batches(step))]
    return sum((len(each.offsets) - 1) * each.width for each in pieces)


def process_age() -> Callable[[], float]:
    """A clock of seconds since this process was started; on a system without /proc, since this call."""
    try:
        started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return lambda: time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        began = time.perf_counter()
        return lambda: time.perf_counter() - began


def apart(
    words: Sequence[str], steps: int = STEPS, warm_up: int = WARM_UP, limit: Optional[float] = None
) -> dict[str, Any]:
    """`fxtune bench WORDS` in a process of its own: the fields of Measured, or `{"error": why, in one line}`.

    Raises TimeoutError where it was not done after `limit` seconds.
    """
    result, found = trial.bench(list(words), steps, warm_up, limit)
    if result.outcome is trial.Outcome.hung:
        raise TimeoutError(result.reason)
    errors = {trial.Outcome.memory: "does not fit", trial.Outcome.refused: f"refused: {result.reason}"}
    return found or {"error": errors.get(result.outcome, f"failed: {result.reason}")[:300]}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reserved(device: torch.device) -> Optional[float]:
    return torch.cuda.max_memory_reserved(device) / GIB if device.type == "cuda" else None


def _rows(plan: Plan, steps: range) -> str:
    sizes = [
        (len(pieces.offsets) - 1, pieces.width)
        for step in steps
        for micro in range(plan.micro_batches(step))
        for pieces in [plan.batch_spec(step, micro)]
    ]
    rows, width = max(sizes, key=lambda size: size[0] * size[1])
    return f"{rows} x {width:,}"
