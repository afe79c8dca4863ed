"""Measures the speed of a recipe by timing the training step itself (TrainStep).

`measure` builds what a run builds: the same checks, data path and optimizer. It takes warm-up steps, in which torch
compiles, tunes kernels and fills caches. The measured steps follow. `measure` does not evaluate, save, or make a run
folder. It waits for the device only where training does (every `train.log_every` steps), and before and after the
measured steps. The time of a step is the time between two events on the device's own stream. Tokens per second count
the tokens of documents; padding is counted separately. Each rank takes its part of every step, and the figures count
all ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, Optional

import numpy as np
import torch

from fxtune.config.root import Config
from fxtune.data.batches.loader import Loader, StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.system.machine.energy import EnergyMeter
from fxtune.system.process.profiler import kernel_times
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.startup import FIRST_STEPS, STARTUP
from fxtune.tracking.throughput import memory_gib
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.step import Metrics, TrainStep
from fxtune.training.step_monitor import StepStatistics
from fxtune.training.trial import steps_only, trial_data
from fxtune.tuning import trial

STEPS = 10
WARM_UP = 3
PROFILED = 2
"""Number of further steps whose kernels are timed, if a profile is requested."""
LEAST_WARM_UP = 1
"""The least number of warm-up steps. Only the first step compiles, and allocates gradients and moments."""


@dataclass
class Measured:
    """Figures of the measured steps, unless a field says otherwise. None: not known on this machine."""

    tokens_per_second: float
    """Tokens of documents on all ranks, from the end of the warm-up to the end of the last measured step."""
    ranks: int
    slowest_rank: Optional[int]
    """The rank whose forward and backward passes take the longest; None with one rank."""
    slowest_behind: Optional[float]
    """The share by which the slowest rank's passes take longer than the median of the other ranks."""
    supervised_tokens_per_second: float
    shared_per_second: float
    """Tokens of prompts that were computed for another answer (data.share_prompts); a part of `tokens_per_second`."""
    images_per_second: float
    """0 if the rows have no images. The tokens of images are part of `tokens_per_second`."""
    padding_per_second: float
    step_seconds: float
    """The median time of a step."""
    step_seconds_p5: float
    step_seconds_p95: float
    mfu: Optional[float]
    """Model FLOPs, with attention per document (fxtune/tracking/throughput.py), over the card's dense peak."""
    memory_gib: float
    """The peak of the fullest card since the process began, including building and compiling."""
    memory_reserved_gib: Optional[float]
    """The peak of the memory that the allocator has reserved."""
    step_memory_gib: float
    """The peak of the measured steps alone; on a CPU equal to memory_gib."""
    data_wait: float
    """The share of the time in which a rank waits for data, for the rank that waits longest."""
    joules_per_token: Optional[float]
    """The energy of all cards for a token of a document."""
    watts: Optional[float]
    energy: str
    """The source of the joules, or why there are none."""
    first_step_seconds: float
    """Seconds from the start of the process to the end of the first step. A second measurement in one process counts
    from its own start."""
    second_step_seconds: Optional[float]
    """The same, to the end of the second step. None if the second step was measured: nothing waits for its end."""
    startup_seconds: dict[str, float]
    """The parts of second_step_seconds; if that is None, of first_step_seconds (fxtune/system/terminal/startup.py)."""
    compile_seconds: Optional[float]
    """Seconds in torch.compile, for forward and backward pass. None: torch.compile is off."""
    loss: Optional[float]
    """The objective's mean loss."""
    losses: list[Optional[float]]
    """The loss of every step, warm-up included; None if it was not finite."""
    skipped_steps: int
    """Steps whose loss or gradient was not finite, warm-up included. They changed nothing."""
    steps: int
    warm_up: int
    rows: str
    """`4 x 4,096`: rows of the largest micro-batch, and their length."""
    decided: list[str]
    """What each `auto` became, and why."""
    techniques: dict[str, Any]
    """The options of the techniques that were on, with every `auto` resolved."""
    device: str
    packages: dict[str, str]
    """Versions of the installed packages."""
    kernels: Optional[list[tuple[str, float, float]]] = None
    """(name, seconds of a step, calls in a step) of each kernel, longest first. On a CPU: of each operator. None: no
    profile."""
    exchange_seconds: Optional[float] = None
    """Seconds of a step in which the first GPU does nothing but exchange data with other GPUs. None: no profile or no
    GPU."""


def measure(config: Config, steps: int = STEPS, warm_up: int = WARM_UP, profile: bool = False) -> Measured:
    """Take `warm_up` training steps, measure `steps` further steps, and return the figures. `config` is not changed.

    `profile`: after that, take PROFILED steps and time their kernels. Raises the errors of training.
    """
    assert warm_up >= LEAST_WARM_UP
    assert steps >= 1
    STARTUP.begin_run()
    builder = RunBuilder(steps_only(config, warm_up + steps + PROFILED * profile))
    plan = trial_data(builder)[1].training
    model, _ = builder.proven_model(plan)
    train_step = builder.train_step(model, builder.config.objective)
    model.model.train()
    with (
        contextlib.closing(Loader(builder.own(plan), config.loader, builder.world.device)) as loader,
        builder.oom_context("Measuring", MemoryPhase.training),
        phase("Measuring", plan.steps, "steps", part=FIRST_STEPS) as work,
    ):
        rates = [builder.learning_rate(index, plan.steps) for index in range(plan.steps)]
        taken = work.over((step, train_step(plan, step, rates[step.index])) for step in loader.steps())
        return _measure(builder, train_step, plan, taken, steps, warm_up, profile)


def _measure(
    builder: RunBuilder,
    train_step: TrainStep,
    plan: Plan,
    taken: Iterator[tuple[StepBatches, Metrics]],
    steps: int,
    warm_up: int,
    profile: bool,
) -> Measured:
    world, device = builder.world, builder.world.device
    statistics, starts = StepStatistics(scaled=train_step.loss_scale.active), list[dict[str, float]]()
    for _, metrics in islice(taken, warm_up):
        statistics.add(metrics)
        _synchronize(device)
        starts.append(STARTUP.read())
    statistics.settle()
    peak = memory_gib(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    figures, step_seconds, own_joules, source = _time_steps(
        builder, train_step, plan, statistics, islice(taken, steps)
    )
    peaks, all_joules = zip(*world.gather((peak, own_joules), "collecting figures"), strict=True)
    joules = None if None in all_joules else sum(all_joules)
    kernels = exchanging = None
    if profile:
        times = kernel_times(lambda: list(taken))
        exchanging = None if times.exchanging is None else times.exchanging / PROFILED
        kernels = [(name, seconds / PROFILED, calls / PROFILED) for name, (seconds, calls) in times.by_name.items()]
        kernels.sort(key=lambda kernel: -kernel[1])

    seconds = figures["train/step_seconds"] * steps
    measured = range(warm_up, warm_up + steps)
    tokens, supervised = (sum(map(count, measured)) for count in (plan.tokens, plan.supervised))
    shared = sum(int(plan.shared(step).sum()) for step in measured)
    specs = [
        plan.batch_spec(step, micro_batch) for step in measured for micro_batch in range(plan.micro_batches(step))
    ]
    shapes = [(len(spec.offsets) - 1, spec.width) for spec in specs]
    rows, width = max(shapes, key=math.prod)
    low, middle, high = np.percentile(step_seconds, (5, 50, 95))
    losses = [record.loss if math.isfinite(record.loss) else None for record in statistics.records]
    finite = [loss for loss in losses[warm_up:] if loss is not None]
    compiled = builder.techniques.compile
    return Measured(
        tokens_per_second=tokens / seconds,
        ranks=world.size,
        slowest_rank=int(figures["train/slowest_rank"]) if "train/slowest_rank" in figures else None,
        slowest_behind=figures.get("train/slowest_behind"),
        supervised_tokens_per_second=supervised / seconds,
        shared_per_second=shared / seconds,
        images_per_second=figures.get("train/images_per_second", 0.0),
        padding_per_second=(sum(map(math.prod, shapes)) - tokens + shared) / seconds,
        step_seconds=float(middle),
        step_seconds_p5=float(low),
        step_seconds_p95=float(high),
        mfu=figures.get("train/mfu"),
        memory_gib=max(*peaks, figures["train/memory_gib"]),
        memory_reserved_gib=figures.get("train/memory_reserved_gib"),
        step_memory_gib=figures["train/memory_gib"],
        data_wait=figures["train/data_wait"],
        joules_per_token=joules / tokens if joules else None,
        watts=joules / seconds if joules else None,
        energy=source,
        first_step_seconds=sum(starts[0].values()),
        second_step_seconds=sum(starts[1].values()) if warm_up > 1 else None,
        startup_seconds=starts[:2][-1],
        compile_seconds=compiled.report().seconds if compiled.enabled else None,
        loss=sum(finite) / len(finite) if finite else None,
        losses=losses,
        skipped_steps=statistics.skipped,
        steps=steps,
        warm_up=warm_up,
        rows=f"{rows} x {width:,}",
        decided=list(builder.notes),
        techniques=json.loads(json.dumps(builder.techniques.options())),
        device=builder.facts.device_name,
        packages=builder.facts.packages,
        kernels=kernels,
        exchange_seconds=exchanging,
    )


def _time_steps(
    builder: RunBuilder,
    train_step: TrainStep,
    plan: Plan,
    statistics: StepStatistics,
    taken: Iterator[tuple[StepBatches, Metrics]],
) -> tuple[dict[str, Any], list[float], float | None, str]:
    """Take all steps of `taken`. Returns the figures of a log line over these steps, the seconds of each step, the
    joules of this rank's card, and their source."""
    meter, clock = builder.meter(train_step.model.model, plan), StepClock(builder.world.device)
    report, due = train_step.rank_report, False
    builder.world.agree(0, "beginning the measured steps together")
    with contextlib.closing(EnergyMeter(builder.world.device, hosts=False)) as energy:
        energy.start()
        meter.read()  # resets the meter
        report.restart()
        clock.mark()
        for number, (step, metrics) in enumerate(taken, 1):
            if due:
                statistics.settle()  # reads the previous step's numbers while this step runs, as training does
            statistics.add(metrics)
            meter.add(step.index, step.wait_seconds)
            report.waited += step.wait_seconds
            clock.mark()
            due = number % builder.config.train.log_every == 0
            if due:
                statistics.post()
        _synchronize(builder.world.device)
        figures = meter.read()
        joules, source = energy.read().gpu_joules, energy.source
    statistics.settle()
    if builder.world.size > 1:
        report.agree(0)
        waited = (report.longest_wait() or 0.0) / (figures["train/step_seconds"] * number)
        figures["train/data_wait"] = min(waited, 1.0)
    return figures | report.figures(), clock.seconds(), joules, source


class StepClock:
    """Measures the times between ends of steps by the device's own clock, so that nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between each mark and the next. The caller waits for the device before the call."""
        pairs = pairwise(self._marks)
        return [start.elapsed_time(end) / 1e3 if self._cuda else end - start for start, end in pairs]


def measure_in_process(
    overrides: Sequence[str], steps: int = STEPS, warm_up: int = WARM_UP, limit: Optional[float] = None
) -> dict[str, Any]:
    """Run `fxtune bench` in a separate process. Returns the fields of Measured, or `{"error": reason in one line}`.

    Raises TimeoutError after `limit` seconds.
    """
    result, figures = trial.bench(list(overrides), steps, warm_up, limit)
    if result.outcome is trial.Outcome.hung:
        raise TimeoutError(result.reason)
    errors = {trial.Outcome.memory: "does not fit", trial.Outcome.refused: f"refused: {result.reason}"}
    return figures or {"error": errors.get(result.outcome, f"failed: {result.reason}")[:300]}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
