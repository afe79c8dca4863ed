"""Decides when a run ends: after its last step, early because evaluations have stopped improving, by `fxtune finish
RUN`, or in time for a deadline (`train.max_minutes`).

With schedule.name=wsd a run that ends early still decays its learning rate, starting from the best weights of its
stable phase. It goes back to the checkpoint of these weights and takes the next steps of the data plan at a falling
rate. So it trains the same model as a shorter run. With other schedules the run ends at once.

Rank 0 takes the decisions that depend on a clock. A decision is part of the state and is saved at once. If the run is
killed after this save, it resumes and ends with the same bits. If it is killed before, it decides again.

A run with a deadline looks at the clock after each of its first two steps, which show how long a step takes. Each
look calculates how many steps are left until the last step at which the run can still decide in time. The next look
comes after half of these steps. So the run ends at most one step late. Each look writes a log line. So in a run of
N steps the host waits for the device about log2(N) times more often than without a deadline.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from fxtune.checkpoint.train_state import TrainState
from fxtune.config.root import Config, StopMetric
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.optim.schedule import EXTENDABLE, Schedule
from fxtune.training.monitors.clock import RunClock

FINISH = "finish"
"""A file of this name in the run's folder tells the run to end (`fxtune finish`)."""
EVALUATIONS = 20
"""How many evaluations a run has with train.stop and train.eval_every=0."""
FOREVER = 2**31
"""A number of steps that means "no limit"."""
SLACK = 0.1
"""A decay is cut off for the deadline only if more than this share of its steps would be late."""
LATE = 0.02
"""The run reports that it will be late only if it is late by more than this share of the deadline."""
EVAL_SHARE = 0.05
"""train.eval_share of a run with train.stop."""


class Reason(IntEnum):
    """Why a run ends before its last planned step. If there are several reasons, the highest number counts."""

    none = 0
    deadline = 1
    finish = 2
    early = 3


@dataclass(frozen=True)
class Decision:
    """The decision that the run follows `schedule` to its end. `origin`: the step of the checkpoint whose weights it
    starts from; None: the current weights."""

    reason: Reason
    schedule: Schedule
    origin: int | None
    text: str
    """What was decided and why, for the user."""


class RunEnd:
    """Decides where a run ends. It remembers figures and decisions in `state.ending`, which checkpoints save."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        world: World,
        clock: RunClock,
        state: TrainState,
        compiles: bool = False,
        evaluation_steps: float = 0.0,
    ) -> None:
        """`compiles`: whether the first step and the first evaluation include compilation. `evaluation_steps`: about
        how many steps take as long as one evaluation. This estimate is used until an evaluation was measured."""
        self.config, self.world, self.clock, self.state = config, world, clock, state
        self.compiles, self.evaluation_steps = compiles, evaluation_steps
        self.file = folder / FINISH
        train = config.train
        self.stop = train.stop
        self.deadline = None if train.max_minutes is None else 60 * train.max_minutes
        """The run must be finished after this number of seconds."""
        self.next_look = state.step + 1
        """With a deadline: the step after which to look at the clock, even if no other log line is due."""
        share = EVAL_SHARE if self.stop.patience and not config.run.strict else 0.0
        self.share = share if train.eval_share is None else train.eval_share
        """The largest share of the time that evaluations may take; 0: no limit."""

    def evaluation_due(self, step: int, schedule: Schedule) -> bool:
        interval = self.state.ending.get("interval") or self._least_interval(schedule)
        return step == schedule.last or (interval > 0 and step % interval == 0)

    def _least_interval(self, schedule: Schedule) -> int:
        every = self.config.train.eval_every
        return every or (max(1, schedule.planned // EVALUATIONS) if self.stop.patience else 0)

    def log_line_due(self, step: int) -> bool:
        """Whether a log line is due after `step` steps. The last step always has one and is not considered here."""
        return step % self.config.train.log_every == 0 or self.looks(step)

    def looks(self, step: int) -> bool:
        """Whether decide() must look at the clock after `step` steps. A log line is then due."""
        return self.deadline is not None and step == self.next_look

    def evaluated(self, figures: Mapping[str, float], schedule: Schedule) -> bool:
        """Record the figures of an evaluation. Returns whether the state must be saved, because these weights are the
        best so far or the interval of evaluations was decided."""
        state, ending = self.state, self.state.ending
        ending["evaluations"] = ending.get("evaluations", 0) + 1
        save = self._decide_interval(schedule, 2 if self.compiles else 1)
        # Of equal scores, the one with the lower loss is better.
        loss = -figures.get("eval/loss", math.inf)
        quality, tie = (figures[self.judged], loss) if self.judged else (loss, 0.0)
        best = state.best_match if self.judged else None if state.best_loss is None else -state.best_loss
        best_tie = -math.inf if state.best_loss is None else -state.best_loss
        if quality > (-math.inf if best is None else best) or (self.judged and quality == best and tie > best_tie):
            state.best_step, state.best_loss = state.step, figures.get("eval/loss")
            state.best_match = quality if self.judged else None
            save = save or self.config.checkpoint.keep_best
        ending["last_evaluation"] = state.step
        if self._decays(schedule):
            return save
        if quality > ending.get("branch_quality", -math.inf):
            ending["branch_quality"] = quality
            if schedule.branches and self.config.checkpoint.keep_best:
                state.branch_step, save = state.step, True
        if quality > ending.get("reference", -math.inf) + self.stop.min_delta:
            ending["reference"], ending["since"] = quality, 0
        else:
            ending["since"] = ending.get("since", 0) + 1
        return save

    def begins_end(self, schedule: Schedule, full_steps: int) -> bool:
        """Whether the planned decay or a short last step begins here. A longer run would not take these steps, so a
        checkpoint is then saved and kept. `full_steps`: the run's steps without a short last step."""
        origin = min(schedule.decay_start, full_steps)
        begins = schedule.config.name in EXTENDABLE and 0 < self.state.step == origin < schedule.steps
        if begins:
            self.state.branch_step = self.state.step
        return begins

    @property
    def judged(self) -> str | None:
        """The figure that is highest for the best weights; None: the best weights have the lowest held-out loss."""
        return self.stop.metric.figure if self.stop.patience > 0 else None

    @property
    def asks(self) -> bool:
        """Whether evaluations ask the questions, because the answers decide which weights are best."""
        return self.judged == StopMetric.exact_match.figure

    def _decide_interval(self, schedule: Schedule, evaluations: int) -> bool:
        """Lengthen the interval of evaluations once, so that all evaluations of the run, including the last, take no
        more than their share of the time. Returns whether the interval was decided."""
        ending, step_seconds = self.state.ending, self.clock.step_seconds
        if not self.share or "interval" in ending or ending["evaluations"] < evaluations:
            return False
        least, chosen = self._least_interval(schedule), 0
        if self.world.main and step_seconds is not None and least:
            each, before = self.clock.last_seconds["evaluation"], self.clock.figures()["time/evaluation_seconds"]
            seconds = self.share / (1 - self.share) * schedule.planned * step_seconds - before - each
            step, last = self.state.step, schedule.planned - 1
            intervals = range(least, last + least + 1, least)  # with the longest only the last step is evaluated
            fitting = (steps for steps in intervals if (last // steps - step // steps) * each <= max(seconds, 0.0))
            chosen = next(fitting, intervals[-1])
        chosen = self.world.agree(chosen, "deciding when to evaluate")
        if chosen:
            ending["interval"] = chosen
        return chosen > 0

    def _decays(self, schedule: Schedule) -> bool:
        return schedule.branches and self.state.step >= schedule.decay_start

    def decide(self, schedule: Schedule, evaluated: bool, looks: bool) -> Decision | None:
        """The decision to end the run in another way than `schedule`; None: go on. All ranks get the same decision.

        `evaluated`: whether an evaluation has just ended. `looks`: whether to look at the clock and for the file of
        `fxtune finish`.
        """
        if self.state.step >= schedule.last:
            return None
        reason, steps = Reason.none, FOREVER
        if looks or evaluated:
            reason, steps = self._look(schedule) if self.world.main else (Reason.none, 0)
            reason = Reason(self.world.agree(reason, "deciding whether to end"))
            steps = self.world.agree(steps, "deciding when to end")
            self.next_look = self._next_look(schedule, steps)
        patience = self.stop.patience
        if evaluated and patience and not self._decays(schedule) and self.state.ending.get("since", 0) >= patience:
            reason = Reason.early
        if reason is Reason.none:
            return None
        if not schedule.branches or (not steps and not self._decays(schedule)):
            # The last step of a run is evaluated. So the run takes one more step, unless the current weights have just
            # been evaluated.
            last = self.state.step + (0 if evaluated else 1)
            last = min(self.state.step + steps, schedule.last) if reason is Reason.deadline else last
            return self._decided(reason, schedule.ending(last), None, f": {self._unfinished(schedule, last)}")
        if not self._decays(schedule):
            return self._branch(schedule, reason, steps)
        last = min(self.state.step + steps, schedule.last)
        text = ", together with the decay that is under way" + " and becomes shorter" * (last < schedule.last)
        return self._decided(reason, schedule.ending(last), None, text)

    def _look(self, schedule: Schedule) -> tuple[Reason, int]:
        """(the reason to end now, for how many steps there is time). The number is FOREVER if it is not known."""
        decided = bool(self.state.ending.get("reason"))
        requested = Reason.finish if not decided and self.file.exists() else Reason.none
        if self.deadline is None:
            return requested, FOREVER
        seconds, step_seconds = self.deadline - self.clock.seconds - self.reserve, self._step_seconds(schedule)
        if step_seconds is None:
            # Only the first step was measured. Later steps are faster, so its time is an upper bound.
            first = self.clock.first_step_seconds
            enough = seconds > (0.0 if first is None or self.compiles or decided else first)
            return (requested, FOREVER) if enough else (max(requested, Reason.deadline), 0)
        steps = max(0, int(seconds / step_seconds))
        left = schedule.last - self.state.step
        if steps >= left:
            return requested, steps
        if decided or self._decays(schedule):  # small differences are ignored, as each decision is saved
            short = left - steps > max(1, SLACK * schedule.decay)
        else:
            # This is the last moment for a decision if, after one more step, there is no time for the decay.
            short = steps < 1 + (self._decay(schedule)[1] if schedule.branches else 1)
        return max(requested, Reason.deadline if short else Reason.none), steps

    def _step_seconds(self, schedule: Schedule) -> float | None:
        """Seconds of a step, including its share of the evaluations' time; None before a step was measured."""
        if (step_seconds := self.clock.step_seconds) is None:
            return None
        interval = self.state.ending.get("interval") or self._least_interval(schedule)
        return step_seconds + (self.clock.last_seconds["evaluation"] / interval if interval else 0.0)

    def _next_look(self, schedule: Schedule, steps: int) -> int:
        """The step after which to look again if there is time for `steps` steps. It is halfway to the last step at
        which the run can still decide in time, but no later than the start of the planned decay."""
        step = self.state.step
        if steps >= FOREVER:
            return step + 1
        waits = schedule.branches and not self._decays(schedule)
        spare = min(steps, schedule.last - step) - (self._decay(schedule)[1] if waits else 0)
        following = step + max(1, spare // 2)
        return min(following, schedule.decay_start) if waits else following

    @property
    def reserve(self) -> float:
        """Seconds that the run needs after its last step: for an evaluation, the questions, a checkpoint and the
        export."""
        last, step_seconds = self.clock.last_seconds, self.clock.step_seconds or self.clock.first_step_seconds or 0.0
        evaluation = last["evaluation"] or self.evaluation_steps * step_seconds
        return evaluation + last["questions"] + 2 * last["general"] + 2 * last["saving"] + 1.0

    def _decay(self, schedule: Schedule) -> tuple[int, int]:
        """(origin, steps) of a decay if it were decided now. origin: the step whose weights it starts from. The
        decay starts from the current step, unless the latest evaluation was not better than an earlier one."""
        best = self.state.branch_step
        origin = self.state.step if best in (None, self.state.ending.get("last_evaluation")) else best
        assert origin is not None
        return origin, schedule.decay_from(origin - schedule.dropped)

    def _branch(self, schedule: Schedule, reason: Reason, steps: int) -> Decision:
        """The decision to decay the learning rate over at most `steps` steps."""
        step, (origin, whole) = self.state.step, self._decay(schedule)
        decay = min(whole, steps)
        # The first step of a decay has the full rate.
        text = f": its learning rate decays over {decay} steps" if decay > 1 else ": its learning rate does not decay"
        if decay < whole:
            text += f", because there is no time for {whole}"
        if origin != step:
            text += (
                f", from the best weights, of step {origin}. Steps {origin + 1} to {step} are dropped, and "
                "training takes their rows again from there"
            )
        branch = schedule.decaying(step, origin - schedule.dropped, decay)
        return self._decided(reason, branch, None if origin == step else origin, text)

    def _decided(self, reason: Reason, schedule: Schedule, origin: int | None, text: str) -> Decision:
        step, count = self.state.step, self.state.ending.get("since", 0)
        if reason is Reason.early:
            judged = self.stop.metric.words
            why = f"Early stopping after step {step}: the {judged} has not become better in {count} evaluations"
        elif reason is Reason.finish:
            why = f"Told to finish after step {step}"
        else:
            assert self.deadline is not None
            minutes = f"train.max_minutes={self.config.train.max_minutes:g}"
            step_seconds = self.clock.step_seconds or self.clock.first_step_seconds or 0.0
            late = self.clock.seconds + (schedule.last - step) * step_seconds + self.reserve - self.deadline
            why = f"Ending in time for {minutes}"
            if late > max(1.0, LATE * self.deadline):
                why = f"{minutes} is too short by about {late:.0f} s"
        return Decision(reason, schedule, origin, f"{why}. The run ends after step {schedule.last}{text}.")

    def _unfinished(self, schedule: Schedule, last: int) -> str:
        name = schedule.config.name.value
        if schedule.branches:
            return "there is no time for the decay of its learning rate"
        if not schedule.decay or last >= schedule.steps:
            return f"schedule.name={name} has no decay to finish"
        return (
            f"schedule.name={name} was laid out for {schedule.steps - schedule.dropped} steps and is cut off at "
            f"{schedule.rate(last) / schedule.peak:.0%} of its peak. With schedule.name=wsd the decay would come first"
        )

    def take(self, decision: Decision) -> None:
        """Store the decision in the state. Call this after the weights of its origin were restored."""
        state, schedule = self.state, decision.schedule
        if schedule.branches and state.step == schedule.decay_start and decision.origin is None:
            state.branch_step = state.step
        state.ending["reason"] = decision.reason.name
        state.schedule = schedule.saved()

    def end_time(self, schedule: Schedule) -> float | None:
        """When the run will be done, in seconds since 1970; None if it has neither a deadline nor a decision to end
        early, or if no step was timed."""
        step_seconds = self.clock.step_seconds
        if step_seconds is None or (self.deadline is None and not self.state.ending.get("reason")):
            return None
        left = (schedule.last - self.state.step) * step_seconds + self.reserve
        if self.deadline is not None and not self.state.ending.get("reason"):
            left = min(left, max(self.deadline - self.clock.seconds, 0.0))
        return time.time() + left

    def done(self) -> None:
        """Remove the file that told the run to end. Call this when the run is finished."""
        if self.world.main:
            with contextlib.suppress(OSError):
                self.file.unlink(missing_ok=True)

    def require_time(self) -> None:
        """Raise ConfigError if the deadline has passed before the first step."""
        late = self.deadline is not None and self.state.step == 0 and self.clock.seconds >= self.deadline
        if self.world.agree(int(late), "looking at the deadline"):
            raise ConfigError(
                f"train.max_minutes={self.config.train.max_minutes:g} is over before the first step: start-up alone "
                f"took {self.clock.seconds / 60:.2g} minutes. Raise it."
            )
