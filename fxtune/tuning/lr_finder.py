"""A learning-rate range test (arXiv 1506.01186): one short run of a recipe, in which the rate grows from step to step.

The test takes training steps of the recipe (TrainStep): its data in its order, its model, adapters, optimizer and
clipping. In each step the rate grows by the same factor, from far too low to far too high, until the loss diverges.
Low rates change nothing, higher rates lower the loss, and still higher rates destroy the model. The suggestion is the
rate at which the loss falls fastest. The rate at the lowest loss would be too high for a whole run.

Nothing is written, and the weights are dropped. The same recipe and seed give the same curve.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxtune.config.root import Config, Spikes
from fxtune.data.batches.loader import Loader
from fxtune.errors import ConfigError
from fxtune.optim.config import OptimizerName, no_rule
from fxtune.optim.learning_rate import guess
from fxtune.system.terminal.progress import phase
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.trial import steps_only

STEPS = 50
SPAN = 100.0
"""The test begins at a guess of the rate divided by this number, and ends at the guess times this number."""
SMOOTHING = 0.8
"""Decay of the moving mean of the losses, which covers about five steps."""
START = 5
"""The mean of the first START losses is the untrained model's loss, because the first rates change nothing."""
DIVERGED = 0.15
"""The loss has diverged when its moving mean exceeds the untrained model's loss by this share of it, and also by four
standard errors of the untrained model's loss."""
REACH = 3
"""The slope at a rate is measured over REACH steps before and after it."""
LEAST_DISTANCE = 3.0
"""The suggestion is at most the rate of the lowest moving mean divided by this, because a moving mean lags behind."""
GAIN = 0.03
"""A curve whose mean falls by less than this share suggests nothing."""


@dataclass(frozen=True)
class RangeTest:
    rates: list[float]
    """The rates that were taken, ascending."""
    losses: list[float]
    """The objective's mean loss before the update with each rate; the last one may be NaN or infinite."""
    smoothed: list[float]
    """The moving means of `losses`."""
    diverged: bool
    """Whether the last loss ended the test."""
    epochs: float
    """How many epochs of the data the test took."""
    suggestion: float | None
    reason: str
    """The place of the suggestion on the curve, or the reason for no suggestion."""
    present: float
    """optimizer.lr of the recipe, with `auto` decided."""
    auto: float | None
    """The choice of optimizer.lr=auto; None without a rule for this recipe."""
    decided: list[str]
    """The decision for each `auto`, with the reason."""


def refusals(config: Config) -> Iterator[str]:
    """Yield each reason why the rates of `config` cannot be tested, and what to change."""
    if config.optimizer.name is OptimizerName.adamw_schedulefree:
        yield (
            "optimizer.name: adamw_schedulefree weights its average by the rates so far, so a growing rate says "
            "nothing about a constant one. Test with optimizer.name=adamw."
        )
    needs = config.objective.needs
    if needs.reads_groups and needs.head == "lm":
        yield (
            f"objective={config.objective.name} compares answers, and its loss also falls at rates that break the "
            "model, so this test would suggest such a rate. Compare two or three rates by their answers "
            "(docs/preferences.md)."
        )


def range_test(config: Config, steps: int = STEPS, low: float | None = None, high: float | None = None) -> RangeTest:
    """Take up to `steps` steps at rates that grow from `low` to `high`. An end of None is SPAN away from the guess of
    optimizer.lr=auto, or from the recipe's rate if no guess exists. `config` is not changed. Raises ConfigError for a
    recipe that cannot be tested, and the errors of training."""
    if reasons := list(refusals(config)):
        raise ConfigError("\n".join(reasons))
    config = steps_only(config, steps)
    config.train.spikes = Spikes.off  # the test looks for spikes, so none may be skipped
    builder = RunBuilder(config)
    plan = builder.read()[1].training
    present, auto = builder.config.optimizer.lr, None
    if not list(no_rule(config.optimizer, builder.facts)):
        auto = guess(config.optimizer, builder.facts, plan.documents_per_step)[0]
    low, high = low or (auto or present) / SPAN, high or (auto or present) * SPAN
    if low >= high:
        raise ConfigError(f"The test begins at {low:g} and ends at {high:g}: --lowest must be below --highest.")
    planned = [low * (high / low) ** (number / (steps - 1)) for number in range(steps)]
    model, _ = builder.proven_model(plan)
    train_step = builder.train_step(model, builder.config.objective)
    model.model.train()
    losses: list[float] = []
    diverged = False
    with (
        contextlib.closing(Loader(builder.own(plan), config.loader, builder.world.device)) as loader,
        builder.oom_context("Testing learning rates", MemoryPhase.training),
        phase("Testing learning rates", steps, "steps") as work,
    ):
        for step, rate in zip(work.over(loader.steps()), planned, strict=False):
            metrics = train_step(plan, step, rate)
            losses.append(metrics["loss"].item())
            if diverged := has_diverged(losses):
                break
    rates, epochs = planned[: len(losses)], plan.epoch(len(losses))
    suggestion, reason = suggest(rates, losses)
    means = smooth(losses)
    return RangeTest(rates, losses, means, diverged, epochs, suggestion, reason, present, auto, list(builder.notes))


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential moving means. As in Adam, the first means are corrected for the start at 0."""
    means, total = [], 0.0
    for count, loss in enumerate(losses, 1):
        total = SMOOTHING * total + (1 - SMOOTHING) * loss
        means.append(total / (1 - SMOOTHING**count))
    return means


def has_diverged(losses: Sequence[float]) -> bool:
    """Whether the last loss is not finite, or the mean of the last losses is far above the mean of the first."""
    if not math.isfinite(losses[-1]):
        return True
    if len(losses) <= START:
        return False
    first = losses[:START]
    error = statistics.stdev(first) / math.sqrt(START)
    start = statistics.mean(first)
    return smooth(losses)[-1] > start + max(DIVERGED * abs(start), 4 * error)


def suggest(rates: Sequence[float], losses: Sequence[float]) -> tuple[float | None, str]:
    """(the suggested rate to two digits, its place on the curve), or (None, the reason for no suggestion)."""
    finite = losses if math.isfinite(losses[-1]) else losses[:-1]  # an infinite loss or NaN ended the test
    means = smooth(finite)
    if len(means) <= 2 * START:
        return None, "the loss diverged at once: test lower rates (--lowest)"
    start = statistics.mean(finite[:START])
    lowest = min(range(len(means)), key=means.__getitem__)
    if means[lowest] > start - GAIN * abs(start):
        return None, f"the mean loss never fell by {GAIN:.0%}: test higher rates (--highest), or take more --steps"
    # The slope over the logarithm of the rate, by least squares over 2 x REACH + 1 steps.
    logs = [math.log(rate) for rate in rates]
    slopes = {
        at: statistics.linear_regression(logs[at - REACH : at + REACH + 1], means[at - REACH : at + REACH + 1]).slope
        for at in range(REACH, lowest - REACH + 1)
    }
    steepest = rates[min(slopes, key=slopes.__getitem__)] if slopes else rates[lowest] / LEAST_DISTANCE
    found = min(steepest, rates[lowest] / LEAST_DISTANCE)
    where = f"its mean is lowest at {rates[lowest]:.2g}"
    why = (
        f"the loss falls fastest there; {where}"
        if found == steepest
        else (f"{where}, and the suggestion is a third of that")
    )
    if lowest == len(losses) - 1:
        why += ", where the test ended: higher rates may be better (--highest)"
    return float(f"{found:.2g}"), why
