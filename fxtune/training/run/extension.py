"""The schedule of a run that starts, resumes, or is given more steps (train.max_steps, train.epochs).

More steps extend the schedule. If the learning rate has decayed already, the run goes on from the checkpoint before
the decay. If the last step was short, it goes on from the checkpoint before that step.
"""

from __future__ import annotations

from typing import Any

from fxtune.checkpoint.run_folder import RunFolder
from fxtune.checkpoint.train_state import TrainState
from fxtune.config.root import Config
from fxtune.data.batches.plan import Plan
from fxtune.errors import ConfigError
from fxtune.optim.schedule import EXTENDABLE, Schedule
from fxtune.training.run.state import RunState


def require_extendable(folder: RunFolder, config: Config) -> None:
    """Raise ConfigError if the run's number of steps was changed and its recipe depends on a fixed number of steps."""
    if not folder.extends:
        return
    changed = f"{folder.path} holds this run with another train.epochs or train.max_steps, and"
    so = "laid out for a number of steps, so the run cannot be extended or shortened. Put these keys back, or start"
    if config.schedule.name not in EXTENDABLE:
        names = " or ".join(name.value for name in EXTENDABLE)
        raise ConfigError(
            f"{changed} schedule.name={config.schedule.name.value} is {so} another run: run.dir=NEW, with "
            f"model.adapter or model.path to start from these weights. Runs with "
            f"schedule.name={names} can be extended."
        )
    if config.train.batch_ramp or config.data.length_schedule:
        staged = "train.batch_ramp" if config.train.batch_ramp else "data.length_schedule"
        raise ConfigError(f"{changed} {staged} is {so} another run: run.dir=NEW.")


def schedule_of_run(run_state: RunState, planned: Schedule, plan: Plan, recipe: dict[str, Any]) -> Schedule:
    """The schedule of the run: `planned` from the config with the decisions since the run started. An extended run's
    schedule is extended to all steps of `plan`, and `recipe` is written to its folder. Raises ConfigError as
    extended() does."""
    folder, schedule = run_state.folder, run_state.schedule(planned)
    if not folder.extends and schedule.planned == plan.steps:
        return schedule
    if run_state.state.step:
        schedule, text = extended(run_state, schedule, planned, plan)
        run_state.note(text)
    folder.extend(recipe)
    return schedule


def extended(run_state: RunState, before: Schedule, new: Schedule, plan: Plan) -> tuple[Schedule, str]:
    """Extend the schedule `before` of a run that ended to the steps of `plan`, and store it in the run's state.
    Returns the schedule and a line about it. `new`: the schedule of a new run. If the learning rate has decayed or the
    last step was short, the run goes back to the checkpoint before the decay or before that step.

    Raises ConfigError if the run was not started for fewer steps, or if that checkpoint is missing.
    """
    state, steps, path = run_state.state, plan.steps, run_state.folder.path
    if steps <= before.planned:
        raise ConfigError(
            f"{path} was started for {before.planned} steps, and train.epochs and train.max_steps now ask for "
            f"{steps}. A run can be extended, not shortened: raise these keys, or put them back."
        )
    origin: TrainState | None = state
    decayed = before.branches and state.step > before.decay_start
    # The rows of the run before its extension may not have filled its last step.
    learned = plan.epoch(state.step - before.dropped)
    was_short = state.step == before.last and state.figures.get("train/epoch", learned) != learned
    before_what = "the decay" if decayed else "the short last step"
    if decayed or was_short:
        origin = run_state.go_back(state.branch_step) if state.branch_step else None
    if origin is None:
        raise ConfigError(
            f"{path} cannot be extended: the checkpoint from before {before_what} is missing. Start another run "
            "from its weights (model.adapter, or model.path)."
        )
    data_steps = origin.step - origin.schedule.get("dropped", 0)
    schedule = before.extended(steps, state.step, data_steps)
    state.schedule, state.branch_step = schedule.saved(), None
    for name in ("reason", "since", "reference", "branch_quality", "last_evaluation"):
        state.ending.pop(name, None)
    text = f"Extending {path} from {before.planned} to {steps} steps"
    if schedule.dropped > before.dropped:
        text += f". It goes on from its weights before {before_what}, after {data_steps} steps of the data"
    if (warmup := schedule.warmup) != new.warmup:
        text += (
            f". Its warm-up is not repeated and stays {warmup} steps long, as in a new run of {steps} steps "
            f"with schedule.warmup_steps={warmup}"
        )
    return schedule, f"{text}."
