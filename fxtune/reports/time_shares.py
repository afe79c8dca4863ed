"""Divides the time of a run, as the run recorded it, into start-up, parts of the steps, evaluations and saves.

The time of a part of the steps is the part's mean time in a step, times the number of steps. A log line counts in the
mean by its number of steps. A log line that a resumed run repeated counts once, so steps that a kill lost do not
count.
"""

from __future__ import annotations

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


def step_parts(run: RunFiles) -> list[TimeShare]:
    """The parts of all steps in a run's log lines, as far as they were recorded."""
    curves = run.curves
    logged = sorted(curves.get(STEP_SECONDS, {}))
    # A log line is named by its step, and stands for the steps since the line before.
    weights = {step: step - before for step, before in zip(logged, [0, *logged], strict=False) if step > before}
    if not weights:
        return []

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
    parts = (
        ("sync", "weights for the sampler", sync),
        ("sampling", "sampling answers", sampling),
        ("rewards", "rewards", rewards),
        ("data", "waiting for data", waiting),  # and the device has no other work
        ("passes", "forward and backward", passes),
        ("update", "optimizer", update),
        ("saving", "checkpoints", saving),  # while they stop the loop
    )
    return [TimeShare(key, name, seconds * steps) for key, name, seconds in parts if seconds is not None]


def time_shares(run: RunFiles) -> list[TimeShare]:
    """The parts of a run's time in the order in which they happen. The list is empty if the run has not recorded its
    total time."""
    last = run.last
    if (total := last.get("time/total_seconds")) is None:
        return []
    loop, evaluations = last.get("time/training_seconds", 0.0), last.get("time/evaluation_seconds", 0.0)
    parts = [TimeShare("startup", "start-up", sum(startup_stages(run).values()))]
    parts += (of_steps := step_parts(run))
    if (left := loop - evaluations - sum(part.seconds for part in of_steps)) > 0:
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
