"""Divides the time of a run, as the run recorded it, into start-up, parts of the steps, evaluations and saves.

The time of a part of the steps is the part's mean time in a step, times the number of steps. A log line counts in the
mean by its number of steps. A log line that a resumed run repeated counts once, so steps that a kill lost do not
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxtune.reports.run_files import RunFiles

STEP_SECONDS = "train/step_seconds"
PASSES = "train/forward_backward_seconds"
UPDATE = "train/update_seconds"
WAIT = "train/data_wait"
FIRST_STEPS = "startup/first_steps_seconds"


@dataclass(frozen=True)
class TimeShare:
    key: str
    name: str
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a mean step; None if they were not recorded."""

    steps: int
    """The number of steps in the means."""
    seconds: float
    waiting: float
    """Seconds in which the step waits for data and the device has no other work."""
    passes: float | None
    update: float | None
    saving: float
    """Seconds for which checkpoints stopped the loop."""
    sampling: float | None = None
    """Seconds in which rollouts are written."""
    rewards: float | None = None
    """Seconds in which rollouts are scored."""
    sync: float | None = None
    """Seconds in which the sampler of rollouts gets the weights."""


def step_times(run: RunFiles) -> StepTimes | None:
    """The mean step of a run; None before its first log line."""
    curves, weights = run.curves, _steps_of_lines(run.curves.get(STEP_SECONDS, {}))
    if not weights:
        return None

    def mean(metric: str) -> float | None:
        curve = curves.get(metric, {})
        counts = {step: count for step, count in weights.items() if step in curve}
        return sum(curve[step] * count for step, count in counts.items()) / sum(counts.values()) if counts else None

    steps, seconds = sum(weights.values()), mean(STEP_SECONDS)
    assert seconds is not None
    waits, lengths = curves.get(WAIT, {}), curves[STEP_SECONDS]
    waiting = sum(waits.get(step, 0.0) * lengths[step] * count for step, count in weights.items()) / steps
    passes, update = mean(PASSES), mean(UPDATE)
    stalls = curves.get("checkpoint/stall_seconds", {})
    saving = sum(seconds for step, seconds in stalls.items() if step in weights) / steps
    if passes is not None:
        # A GPU that still computes earlier steps does not wait while the host waits for data.
        waiting = min(waiting, max(seconds - passes - (update or 0.0), 0.0))
    sync, sampling, rewards = (mean(f"rollout/{part}_seconds") for part in ("sync", "sampling", "reward"))
    if (waited := mean("rollout/wait_seconds")) is not None:  # answers were sampled and scored during training
        sync, sampling, rewards = None, waited, None
    return StepTimes(steps, seconds, waiting, passes, update, saving, sampling, rewards, sync)


def time_shares(run: RunFiles) -> list[TimeShare]:
    """The parts of a run's time in the order in which they happen. The list is empty if the run has not recorded its
    total time."""
    last = run.last
    if (total := last.get("time/total_seconds")) is None:
        return []
    loop, evaluations = last.get("time/training_seconds", 0.0), last.get("time/evaluation_seconds", 0.0)
    parts = [TimeShare("startup", "start-up", sum(startup_stages(run).values()))]
    left = loop - evaluations
    if (step := step_times(run)) is not None:
        steps = step.steps
        pieces = [("sync", "weights for the sampler", step.sync), ("sampling", "sampling answers", step.sampling)]
        pieces += [("rewards", "rewards", step.rewards)]
        pieces += [("data", "waiting for data", step.waiting), ("passes", "forward and backward", step.passes)]
        pieces += [("update", "optimizer", step.update), ("saving", "checkpoints", step.saving)]
        for key, name, seconds in pieces:
            if seconds is not None:
                parts.append(TimeShare(key, name, seconds * steps))
                left -= seconds * steps
    if left > 0:
        parts.append(TimeShare("rest", "rest of the steps", left))
    parts.append(TimeShare("evaluation", "evaluations", evaluations))
    parts.append(TimeShare("other", "questions, export and the rest", total - loop - parts[0].seconds))
    return [part for part in parts if part.seconds > 0]


def startup_stages(run: RunFiles) -> dict[str, float]:
    """The seconds of each stage before the first steps, summed over the run's first start and its resumes."""
    return {
        name.removeprefix("startup/").removesuffix("_seconds").replace("_", " "): sum(curve.values())
        for name, curve in run.curves.items()
        if name.startswith("startup/") and name != FIRST_STEPS
    }


def _steps_of_lines(curve: Mapping[int, float]) -> dict[int, int]:
    """The number of steps since the line before, for each log line. A log line is named by its step."""
    steps = sorted(curve)
    return {step: step - before for step, before in zip(steps, [0, *steps], strict=False) if step > before}
