"""Runs that end early: by early stopping, by `fxtune finish`, and for a deadline."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support.bad_steps import disturb
from support.cases import slow_but
from support.endings import timeless
from support.runs import history, same_export

from fxtune.checkpoint.train_state import TrainState
from fxtune.config.compose import load
from fxtune.config.root import Config, Export, StopMetric
from fxtune.data.config import OnOverlap, SourceConfig
from fxtune.distributed.world import World
from fxtune.errors import ConfigError
from fxtune.optim.schedule import Schedule, ScheduleName
from fxtune.training import trainer as train
from fxtune.training.evaluation import HeldOutEvaluation
from fxtune.training.monitors.clock import RunClock
from fxtune.training.run.end import RunEnd
from fxtune.training.run.state import weights_note

SCRIPT = {2: 3.0, 4: 2.0, 6: 1.0, 8: 1.5, 10: 1.5, 12: 0.9}
"""Held-out losses by step: step 6 is the best one until the decay."""


@pytest.fixture
def stopping(narrow, chats) -> Config:
    """A run that evaluates every two steps of twenty and stops after two evaluations that are not better."""
    narrow.data.eval_sources = [SourceConfig(path=str(chats), limit=6)]
    narrow.data.on_overlap = OnOverlap.keep
    narrow.train.max_steps, narrow.train.eval_every, narrow.train.stop.patience = 20, 2, 2
    narrow.train.eval_share = 0.999
    narrow.train.log_every = 3
    narrow.schedule.name, narrow.schedule.decay_steps = ScheduleName.wsd, 0.25
    narrow.run.dir = "run"
    return narrow


@pytest.fixture
def scripted(monkeypatch):
    """Evaluations give the losses of SCRIPT."""
    evaluated = RunEnd.evaluated

    def replace(self, figures, schedule):
        return evaluated(self, {**figures, "eval/loss": SCRIPT.get(self.state.step, 9.0)}, schedule)

    monkeypatch.setattr(RunEnd, "evaluated", replace)


def rates(folder: str) -> dict[int, float]:
    return {line["train/step"]: line["train/lr"] for line in history(Path(folder)) if "train/lr" in line}


def test_early_stop_decays_from_the_best_weights_like_a_shorter_run(stopping, scripted, cwd, said):
    stopping.train.log_every = 1
    result = train.run(stopping)
    assert [result[name] for name in ("train/step", "eval/best_step", "train/ended_early")] == [12, 12, "early"]
    assert any(
        "Early stopping after step 10" in line and "from the best weights, of step 6. Steps 7 to 10" in line
        for line in said
    )
    stopping.run.dir, stopping.train.max_steps, stopping.train.stop.patience = "plain", 8, 0
    stopping.run.export = Export.last
    train.run(stopping)
    assert list(rates("run").values())[10:] == list(rates("plain").values())[6:] == [1e-3, 5e-4]
    assert same_export("run", "plain")


def test_early_stop_without_a_decay_exports_the_best_weights(stopping, scripted, cwd, said):
    stopping.schedule.name = ScheduleName.cosine
    result = train.run(stopping)
    assert [result[name] for name in ("train/step", "export/step", "train/ended_early")] == [10, 6, "early"]
    assert any("laid out for 20 steps and is cut off at" in line and "schedule.name=wsd" in line for line in said)
    assert {line["train/step"] for line in history(Path("run")) if "train/loss" in line} == {2, 3, 4, 6, 8, 9, 10}
    assert result == json.loads(Path("run/result.json").read_text())
    assert train.run(stopping) == result, "the same command finds the run finished"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["evaluated", "take", "go_back"])
def test_run_killed_at_its_early_stop_ends_with_the_same_bits(stopping, scripted, cwd, monkeypatch, place):
    stopping.checkpoint.every = 5
    stopping.run.dir = "undisturbed"
    undisturbed = train.run(stopping)
    stopping.run.dir = "killed"
    owner = train.RunState if place == "go_back" else RunEnd
    usual, calls = getattr(owner, place), []

    def killing(self, *arguments):
        result = usual(self, *arguments)
        calls.append(self.state.step)
        if calls.count(10) == 1 and calls[-1] == 10:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, place, killing)
    with pytest.raises(KeyboardInterrupt):
        train.run(stopping)
    taken = train.Steps.take
    monkeypatch.setattr(train.Steps, "take", lambda self, step, lr: _kill_once(taken, calls, self, step, lr))
    with pytest.raises(KeyboardInterrupt):
        train.run(stopping)
    result = train.run(stopping)
    assert same_export("killed", "undisturbed")
    assert timeless(result) == timeless(undisturbed)
    steps = [
        [line["train/step"] for line in history(Path(run)) if "train/loss" in line]
        for run in ("killed", "undisturbed")
    ]
    assert steps[0] == steps[1]


def _kill_once(step_of, calls, trainer, step, lr):
    """Kill the run in its second step of the decay."""
    if step.index == 11 and "decay" not in calls:
        calls.append("decay")
        raise KeyboardInterrupt
    return step_of(trainer, step, lr)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.eval_sources", [], "nothing is held out to judge by"),
        ("train.stop.metric", StopMetric.exact_match, "there are no questions to ask"),
        ("train.stop.metric", StopMetric.reward_accuracy, "objective=causal_lm` has no such metric"),
        ("checkpoint.keep_best", False, "needs checkpoint.keep_best=true"),
        ("run.deterministic", True, "leave train.eval_share out"),
        ("train.stop.patience", 0, ""),
    ],
)
def test_early_stopping_without_its_needs_is_refused(stopping, key, value, message):
    *sections, name = key.split(".")
    target = stopping
    for section in sections:
        target = getattr(target, section)
    setattr(target, name, value)
    stopping.train.eval_every = 0 if name == "eval_sources" else 2
    found = list(stopping.refusals())
    assert len(found) == (1 if message else 0)
    assert not message or message in found[0]


def test_run_with_a_finish_file_decays_from_where_it_is(stopping, cwd, monkeypatch, said):
    """The latest evaluation, of step 4, is the best one, so nothing is dropped."""
    stopping.train.stop.patience, stopping.train.eval_share, stopping.train.log_every = 0, None, 1
    step_of = train.Steps.take

    def tell(self, step, lr):
        if step.index == 5:
            Path("run/finish").touch()
        return step_of(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", tell)
    monkeypatch.setitem(SCRIPT, 6, 1.0)
    result = train.run(stopping)
    assert [result[name] for name in ("train/step", "train/dropped_steps", "train/ended_early")] == [8, 0, "finish"]
    assert list(rates("run").values())[6:] == [1e-3, 5e-4]
    assert not Path("run/finish").exists()


class Time:
    """A clock that stands still unless it is moved."""

    now = 0.0
    startup = 0.0
    """Seconds that a run's start takes."""
    step = 10.0
    """Seconds that a step takes."""

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch) -> Time:
    """The clock of runs, by which each step takes ten seconds and nothing else takes any."""
    time, step_of = Time(), train.Steps.take
    monkeypatch.setattr(train, "RunClock", lambda before: RunClock(time.startup, time))

    def count(self, step, lr):
        time.now += time.step
        return step_of(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", count)
    return time


@pytest.fixture
def timed(stopping) -> Config:
    """A run of twenty steps that evaluates at its end alone and logs its last step alone."""
    stopping.train.stop.patience, stopping.train.eval_share, stopping.train.log_every = 0, None, 100
    stopping.data.eval_sources, stopping.train.eval_every = [], 0
    return stopping


def test_deadline_leaves_time_for_the_decay(timed, cwd, time, said):
    timed.train.max_minutes = 121 / 60
    result = train.run(timed)
    # After step 9 there is time for 3 steps, just what the decay of a run of 12 takes.
    assert [result[name] for name in ("train/step", "train/last_step", "train/ended_early")] == [12, 12, "deadline"]
    assert list(rates("run").values())[-3:] == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert all("train/end_time" in line for line in history(Path("run"))[1:] if "train/loss" in line)
    timed.run.dir, timed.schedule.name, time.now = "cosine", ScheduleName.cosine, 0.0
    assert train.run(timed)["train/step"] == 12
    assert any("laid out for 20 steps and is cut off" in line for line in said)
    timed.run.dir, time.startup = "late", 121.0
    with pytest.raises(ConfigError, match=r"train.max_minutes=2.01667 is over before the first step"):
        train.run(timed)


@pytest.mark.slow
def test_interval_of_evaluations_is_decided_once_and_saved(stopping, cwd, monkeypatch, time):
    """Evaluations may take half of the time, and take 45 s each; a step takes 10 s until the run is killed, then 40 s."""
    stopping.train.stop.patience, stopping.train.eval_share, stopping.train.log_every = 0, 0.5, 1
    measure, step_of = HeldOutEvaluation.measure, train.Steps.take

    def slow(self, *arguments):
        time.now += 45.0
        return measure(self, *arguments)

    monkeypatch.setattr(HeldOutEvaluation, "measure", slow)

    def once(self, step, lr):
        if step.index == 3:
            monkeypatch.setattr(train.Steps, "take", step_of)
            raise KeyboardInterrupt
        return step_of(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", once)
    with pytest.raises(KeyboardInterrupt):
        train.run(stopping)
    time.step = 40.0
    train.run(stopping)
    lines = [line for line in history(Path("run")) if "eval/loss" in line]
    # Of 20 steps of 10 s each there is time for four evaluations. The first one came before the decision.
    assert [line["train/step"] for line in lines] == [2, 8, 16, 20]
    assert 0 < lines[-1]["eval/share_of_time"] < 0.5


@pytest.mark.parametrize(
    ("name", "seconds", "steps"),
    slow_but([("wsd", 14, 1), ("wsd", 25, 2), ("cosine", 35, 3)], ("wsd", 25, 2)),
)
def test_deadline_of_a_few_steps_is_kept_to_a_step(timed, cwd, time, name, seconds, steps):
    """Long before the first log line. The held-out data is evaluated at the end all the same."""
    timed.schedule.name, timed.train.max_minutes, timed.data.eval_fraction = ScheduleName(name), seconds / 60, 0.2
    result = train.run(timed)
    assert (result["train/step"], time.now) == (steps, 10.0 * steps)
    assert result["eval/loss"] > 0
    assert train.run(timed) == result, "the same command finds the run finished"


def test_deadline_that_is_missed_is_called_too_short(timed, cwd, time, said):
    timed.train.max_minutes = 5 / 60
    assert train.run(timed)["train/step"] == 1
    assert any(
        "train.max_minutes=0.0833333 is too short by about 6 s. The run ends after step 1" in line for line in said
    )


@pytest.mark.parametrize("name", ScheduleName)
@pytest.mark.parametrize("step_seconds", [0.5, 7.0, 90.0])
@pytest.mark.parametrize("compiles", [False, True])
def test_looks_at_the_clock_are_few_and_the_end_is_on_time(tmp_path, name, step_seconds, compiles):
    """A run of an hour, whose first step takes a minute more where it compiles, by a clock that the test moves."""
    config, planned = Config(), 20_000
    config.train.max_minutes, config.schedule.name = 60.0, name
    time, state = Time(), TrainState()
    clock = RunClock(20.0, time)
    end = RunEnd(config, tmp_path, World(torch.device("cpu")), clock, state, compiles)
    schedule, looks = Schedule.of(config.schedule, 1e-3, planned), 0
    clock.start(0)
    time.now += 60.0 * compiles
    while state.step < schedule.last:
        state.step += 1
        time.now += step_seconds
        if end.looks(state.step):
            looks += 1
            clock.reached(state.step)
            if decision := end.decide(schedule, evaluated=False, looks=True):
                end.take(decision)
                schedule = decision.schedule
    assert 3600.0 - 2 * step_seconds <= clock.seconds + end.reserve <= 3600.0
    assert looks <= 2 + 2 * math.log2(state.step)
    if schedule.branches:
        assert schedule.decay == pytest.approx(0.2 * schedule.last, abs=2)


def test_reward_accuracy_says_which_weights_are_best_and_the_loss_breaks_ties(tmp_path):
    config = Config()
    config.train.stop.patience, config.train.stop.metric = 2, StopMetric.reward_accuracy
    state = TrainState()
    end = RunEnd(config, tmp_path, World(torch.device("cpu")), RunClock(20.0, Time()), state)
    schedule = Schedule.of(config.schedule, 1e-3, 100)
    for step, accuracy, loss in ((2, 0.5, 0.6), (4, 0.9, 0.7), (6, 0.9, 0.5), (8, 0.8, 0.1), (10, 0.8, 0.2)):
        state.step = step
        end.evaluated({"eval/reward_accuracy": accuracy, "eval/loss": loss}, schedule)
    assert (state.best_step, state.best_match, state.best_loss) == (6, 0.9, 0.5)
    note = weights_note(6, state, config)
    assert note == "weights of step 6, which have the highest held-out reward_accuracy, 90.0%"
    of_rewards = load(["+recipe=rl_quickstart"])
    note = weights_note(6, TrainState(step=6, best_step=6, best_loss=-0.0615), of_rewards)
    assert "highest held-out reward, 0.0615" in note
    assert end.decide(schedule, evaluated=True, looks=False) is not None


@pytest.mark.parametrize("name", slow_but([ScheduleName.wsd, ScheduleName.constant], ScheduleName.wsd))
def test_extended_run_equals_one_that_was_longer_from_the_start(stopping, cwd, monkeypatch, said, name):
    stopping.train.stop.patience, stopping.train.eval_share, stopping.train.log_every = 0, None, 1
    stopping.schedule.name, stopping.run.export, stopping.techniques.lora.dropout = name, Export.last, 0.1
    stopping.run.dir, stopping.train.max_steps, stopping.schedule.warmup_steps = "long", 12, 2
    train.run(stopping)
    # A run of 8 steps warms up in 2 of them, a run of 12 steps in 3.
    stopping.run.dir, stopping.train.max_steps = "run", 8
    stopping.schedule.warmup_steps = 0.2
    short = train.run(stopping)
    stopping.train.max_steps = 12
    step_of = train.Steps.take

    def kill(self, step, lr):
        if step.index == 9:
            monkeypatch.setattr(train.Steps, "take", step_of)
            raise KeyboardInterrupt
        return step_of(self, step, lr)

    monkeypatch.setattr(train.Steps, "take", kill)
    with pytest.raises(KeyboardInterrupt):  # before the extended run has saved anything
        train.run(stopping)
    result = train.run(stopping)
    assert same_export("run", "long")
    dropped = 2 if name is ScheduleName.wsd else 0  # the decay of the short run
    assert result["train/step"] == 12 + dropped
    assert any("from 8 to 12 steps" in line and "schedule.warmup_steps=2" in line for line in said)
    assert json.loads(Path("run/result-1.json").read_text()) == short
    assert train.run(stopping) == result, "the same command finds the extended run finished"
    stopping.train.max_steps = 8
    with pytest.raises(ConfigError, match="can be extended, not shortened"):
        train.run(stopping)
    assert train.run(with_steps(stopping, 12)) == result, "a refused command changes nothing"


@pytest.mark.slow
def test_extended_run_takes_a_short_last_step_again_with_all_of_its_rows(stopping, cwd):
    stopping.train.stop.patience, stopping.train.eval_share, stopping.train.eval_every = 0, None, 0
    stopping.data.eval_sources, stopping.schedule.name = [], ScheduleName.constant
    stopping.techniques.lora.dropout = 0.1
    stopping.train.max_steps, stopping.schedule.warmup_steps, stopping.run.export = None, 1, Export.last
    stopping.run.dir, stopping.train.epochs = "long", 2.0
    long = train.run(stopping)
    stopping.run.dir, stopping.train.epochs = "run", 0.9  # 43 rows in steps of 8
    train.run(stopping)
    stopping.train.epochs = 2.0
    result = train.run(stopping)
    assert result["train/step"] == long["train/step"] + 1
    assert same_export("run", "long")
    # A run of one short step has no checkpoint from before it.
    stopping.run.dir, stopping.train.epochs = "one", 1.0
    stopping.train.micro_batch_size = stopping.train.global_batch_size = 128
    assert train.run(stopping)["train/step"] == 1
    stopping.train.epochs = 4.0
    with pytest.raises(ConfigError, match="before the short last step is missing"):
        train.run(stopping)


def with_steps(config: Config, steps: int) -> Config:
    config.train.max_steps = steps
    return config


def test_run_with_another_schedule_is_not_extended(stopping, cwd):
    stopping.train.stop.patience, stopping.train.eval_share, stopping.train.max_steps = 0, None, 3
    stopping.schedule.name = ScheduleName.cosine
    train.run(stopping)
    with pytest.raises(
        ConfigError, match=r"schedule.name=cosine is laid out for a number of steps.*schedule.name=wsd"
    ):
        train.run(with_steps(stopping, 6))
    assert train.run(with_steps(stopping, 3))["train/step"] == 3


def test_bad_step_keeps_its_own_samples_when_the_run_is_then_cut(stopping, scripted, build, monkeypatch):
    """The finish file comes at step 8. From then on the plan has other rows for that step than those it was taken with."""
    stopping.train.stop.patience, stopping.train.log_every = 0, 20
    disturb(monkeypatch, {7: math.nan})
    trainer = build(stopping)
    plan, evaluated = trainer.plan, RunEnd.evaluated

    def told(self, *given):
        if self.state.step == 8:
            (trainer.folder.path / "finish").touch()
        return evaluated(self, *given)

    monkeypatch.setattr(RunEnd, "evaluated", told)
    assert trainer.run()["train/dropped_steps"] == 2
    samples = json.loads((trainer.folder.path / "skipped" / "step-00000008" / "samples.json").read_text())
    for micro, rows in enumerate(samples["micro_batches"]):
        assert [(0, piece["document"] - 1) for row in rows for piece in row] == plan.documents(7, micro)
