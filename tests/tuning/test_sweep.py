"""The engine of `fxtune sweep`. A stand-in for its processes answers here: it trains, or it writes the metrics of a run
whose losses follow from its learning rate.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from support.runs import history

from fxtune.config.compose import load
from fxtune.errors import ConfigError, Stopped, StorageError
from fxtune.training import trainer as train
from fxtune.tuning import sweep as engine
from fxtune.tuning import sweep_worker
from fxtune.tuning.race import Entrant, EntrantState
from fxtune.tuning.sampling import Sampler
from fxtune.tuning.sweep import Method, Sweep, SweepPlan, refuse
from fxtune.tuning.sweep_space import parse

SPACE = ["sweep.lr=loguniform(1e-4,1e-1)", "sweep.r=choice(2,4)"]


class InlineWorker:
    """Answers as SweepWorker does, in this process."""

    before: Callable[[list[str]], None] = staticmethod(lambda overrides: None)
    work = staticmethod(sweep_worker._answer)

    def __init__(self, environment) -> None:
        self.read, self.write = os.pipe()
        self.busy = False

    def send(self, call, overrides, log) -> None:
        self.busy = True
        self.before(overrides)
        self.answer = self.work(call, overrides)
        os.write(self.write, b".")

    def receive(self):
        os.read(self.read, 1)
        self.busy = False
        return self.answer

    def fileno(self) -> int:
        return self.read

    def interrupt(self) -> None: ...

    def end(self) -> None:
        os.close(self.read)
        os.close(self.write)


def pretend(call, overrides) -> dict:
    """The answer of a run of six steps, whose loss falls to what its learning rate allows."""
    values = dict(word.split("=", 1) for word in overrides)
    if call == "plan":
        return {"steps": 6}
    every, last = int(values["train.eval_every"]), int(values.get("train.pause_after", 6))
    folder = Path(values["run.dir"].strip("'"))
    folder.mkdir(exist_ok=True)
    least = abs(math.log(float(values["optimizer.lr"])) - math.log(1e-2))
    lines = [
        {"train/step": step, "eval/loss": least + 1 / step}
        for step in range(1, last + 1)
        if step % every == 0 or step == 6
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "checkpoints").mkdir(exist_ok=True)
    return {"figures": {}}


@pytest.fixture
def recipe(real, monkeypatch) -> list[str]:
    monkeypatch.setattr(InlineWorker, "work", staticmethod(pretend))
    return real


@pytest.fixture
def real(chats, cwd, monkeypatch) -> list[str]:
    monkeypatch.setattr(engine, "SweepWorker", InlineWorker)
    monkeypatch.setattr(InlineWorker, "before", staticmethod(lambda overrides: None))
    shape = "hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4"
    return [
        f"data.sources=[{{path: '{chats}'}}]",
        "data.sequence_length=256",
        "data.cache_dir=cache",
        "data.eval_fraction=0.2",
        "model.init=random",
        f"model.architecture={{{shape}, num_key_value_heads: 2, head_dim: 16}}",
        "techniques.lora.enabled=true",
        "train.max_steps=6",
        "train.epochs=100",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "schedule.warmup_steps=1",
    ]


def sweep_of(recipe, method=Method.halving, trials=4, space=SPACE, parts=4, sampler=Sampler.spread, seed=0) -> Sweep:
    plan = SweepPlan(tuple(parse(space)), method, trials, parts, 2, sampler, seed)
    return Sweep(load(recipe), recipe, plan, Path("sweep"), [{}], lambda text: None)


def race(recipe, **options) -> Sweep:
    made = sweep_of(recipe, **options)
    with made.opened():
        made.run(lambda: None)
    return made


def adapter(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


def curve(folder: Path) -> list[tuple]:
    names = ("train/step", "train/loss", "train/lr", "train/grad_norm", "eval/loss")
    return [tuple(line.get(name) for name in names) for line in history(folder)]


def outcome(made: Sweep) -> list[tuple]:
    return [(trial.entrant.number, trial.entrant.state, trial.entrant.losses, trial.values) for trial in made.trials]


@pytest.mark.slow
def test_winner_has_the_bits_of_its_run_alone(real):
    made = race(real)
    best = made.winner()
    assert [trial.entrant.state for trial in made.trials].count(EntrantState.stopped) == 3
    assert {rung: best.step_of(rung) for rung in best.entrant.losses} == {1: 2, 2: 4, 4: 6}
    assert made.runs == pytest.approx((4 * 2 + 2 * 2 + 2) / 6)
    assert len({step for step, _ in best.curve()}) == 3
    alone = load([*made.words(best), "run.dir=alone"])
    train.run(alone)
    assert adapter(best.folder) == adapter(Path("alone"))
    assert [line for line in curve(best.folder) if line[1] is not None or line[4] is not None] == [
        line for line in curve(Path("alone")) if line[1] is not None or line[4] is not None
    ]
    losers = [trial for trial in made.trials if trial.entrant.state is EntrantState.stopped]
    assert not any((trial.folder / "checkpoints").exists() for trial in losers), "they do not go on"
    study = optuna.load_study(study_name="run", storage="sqlite:///sweep/optuna.db")
    assert study.best_trial.number == best.entrant.number
    assert study.best_value == best.entrant.loss
    states = [trial.state.name for trial in study.trials]
    assert sorted(states) == ["COMPLETE", "PRUNED", "PRUNED", "PRUNED"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [Method.halving, Method.median, Method.hyperband])
def test_killed_sweep_goes_on_to_the_same_end(recipe, monkeypatch, method):
    options = {"method": method, "trials": 4, "parts": 2, "sampler": Sampler.tpe}
    whole = race(recipe, **options)
    Path("sweep").rename("whole")
    killed = 0

    def kill(overrides):
        nonlocal killed
        killed += 1
        if killed % 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(InlineWorker, "before", staticmethod(kill))
    made = None
    while made is None:
        try:
            made = race(recipe, **options)
        except KeyboardInterrupt:
            assert killed < 40
    assert outcome(made) == outcome(whole)
    assert killed > 8
    monkeypatch.setattr(InlineWorker, "before", staticmethod(lambda overrides: pytest.fail("nothing is left to do")))
    assert outcome(race(recipe, **options)) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["set_trial_intermediate_value", "tell"])
def test_killed_between_two_records_of_a_result(recipe, monkeypatch, place):
    options = {"trials": 2, "parts": 2, "space": SPACE[:1]}
    whole = race(recipe, **options)
    Path("sweep").rename("whole")
    owner = engine.RDBStorage if place.startswith("set") else optuna.Study
    usual, calls = getattr(owner, place), []

    def killing(self, *arguments, **keywords):
        calls.append(arguments)
        if len(calls) in (1, 3):
            raise KeyboardInterrupt
        return usual(self, *arguments, **keywords)

    monkeypatch.setattr(owner, place, killing)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            race(recipe, **options)
    assert outcome(race(recipe, **options)) == outcome(whole)


def test_failed_configuration_loses_and_says_why(recipe):
    space = ["sweep.global_batch_size=choice(4,6)", "sweep.lr=choice(1e-2,1e-3)"]
    made = race(recipe, trials=4, parts=2, space=space)
    failed = [trial for trial in made.trials if trial.entrant.state is EntrantState.failed]
    assert len(failed) == 2
    assert "must be a multiple of" in failed[0].entrant.reason
    assert made.winner().values == {"train.global_batch_size": 4, "optimizer.lr": 1e-2}


def test_sweep_whose_configurations_all_fail_is_an_error(recipe):
    with pytest.raises(ConfigError, match=r"Every configuration failed. The first of them: .*must be a multiple"):
        race([*recipe, "train.micro_batch_size=4"], trials=2, space=["sweep.global_batch_size=choice(5,6)"])


def test_full_disk_ends_the_sweep_and_not_a_configuration(recipe, monkeypatch):
    full = {"error": "the disk is full", "kind": "StorageError"}
    monkeypatch.setattr(
        InlineWorker, "work", staticmethod(lambda call, words: full if call == "train" else pretend(call, words))
    )
    with pytest.raises(StorageError, match="the disk is full"):
        race(recipe)
    monkeypatch.setattr(InlineWorker, "work", staticmethod(pretend))
    assert race(recipe).winner() is not None


def test_configuration_that_cannot_go_on_ends_the_sweep_and_is_not_lost(recipe, monkeypatch):
    """Its data or its packages have changed since it was paused. They can be put back."""
    changed = {"error": "cannot be resumed with the same bits", "kind": "ConfigError"}
    begun = set()

    def work(call, words):
        folder = next((word for word in words if word.startswith("run.dir=")), "")
        again = call == "train" and folder in begun
        if call == "train":
            begun.add(folder)
        return changed if again else pretend(call, words)

    monkeypatch.setattr(InlineWorker, "work", staticmethod(work))
    with pytest.raises(ConfigError, match="cannot be resumed with the same bits"):
        race(recipe)
    monkeypatch.setattr(InlineWorker, "work", staticmethod(pretend))
    made = race(recipe)
    assert made.winner() is not None
    assert not [trial for trial in made.trials if trial.entrant.state is EntrantState.failed]


def test_signal_saves_the_runs_and_says_so(recipe, monkeypatch):
    def stop(overrides):
        if any(word.startswith("train.pause_after") for word in overrides) and not Path("stopped").exists():
            Path("stopped").touch()
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(InlineWorker, "before", staticmethod(stop))
    with engine.SIGNALS, pytest.raises(Stopped) as stopped:
        race(recipe, trials=2, parts=2, space=SPACE[:1])
    assert "The same command goes on" in str(stopped.value)
    assert race(recipe, trials=2, parts=2, space=SPACE[:1]).winner() is not None


def test_folder_of_another_sweep_or_of_a_run_is_refused(recipe):
    recipe = [*recipe, "train.max_steps=1"]
    with (
        sweep_of(recipe).opened(),
        pytest.raises(StorageError, match="in use by a sweep that is alive"),
        sweep_of(recipe).opened(),
    ):
        pass
    for other, told in (
        (
            {"space": ["sweep.lr=loguniform(1e-4,1e-2)", SPACE[1]]},
            r"space.optimizer.lr: .* -> loguniform\(1e-4,1e-2\)",
        ),
        ({"trials": 8}, "trials: 4 -> 8"),
        ({"method": Method.hyperband}, "method: halving -> hyperband"),
    ):
        with pytest.raises(ConfigError, match=told), sweep_of(recipe, **other).opened():
            pass
    other = sweep_of([*recipe, "optimizer.weight_decay=0.3"])
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay: .* -> 0.3"), other.opened():
        pass
    again = sweep_of([*recipe, "run.resume=never"])
    with pytest.raises(ConfigError, match=r"holds a sweep, and run\.resume=never"), again.opened():
        pass
    with sweep_of([*recipe, "tracking.wandb.project=other", "checkpoint.every=7"]).opened():
        pass
    Path("sweep/sweep.yaml").rename("sweep/config.yaml")
    with pytest.raises(ConfigError, match="holds a run, and no sweep"), sweep_of(recipe).opened():
        pass


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.eval_fraction=0"], "nothing is held out"),
        (["train.stop.patience=2"], "the sweep stops configurations itself"),
        (["train.max_minutes=3"], "depends on the clock"),
        (["train.pause_after=3"], "decides when its runs pause"),
        (["run.gpus=2"], "each run of a sweep has one card"),
        (["parallel.shard=2"], r"parallel\.shard=2: each run of a sweep has one card"),
        (["parallel.average_every=4"], r"parallel\.average_every=4: each run of a sweep has one card"),
    ],
)
def test_recipe_that_cannot_be_swept(recipe, words, told):
    with pytest.raises(ConfigError, match=told):
        refuse(load([*recipe, *words]))


@pytest.mark.parametrize(
    ("steps", "every", "kept", "at"),
    [
        (87, 10, (1, 2, 4, 8), [10, 20, 40, 87]),
        (100, 20, (1, 2, 4, 8), [20, 40, 60, 100]),
        (10, 0, (1, 2, 4, 8), [2, 4, 6, 10]),
        (60, 50, (4, 8), [50, 60]),
        (30, 50, (8,), [30]),
    ],
)
def test_each_rung_has_an_evaluation_of_its_own(recipe, steps, every, kept, at):
    made = sweep_of([*recipe, f"train.eval_every={every}"], trials=8, parts=8)
    made._steps = {"{}": steps}
    trial = made._add(Entrant(0, 0), {})
    assert made.race.brackets[0].rungs == kept
    assert [trial.step_of(rung) for rung in kept] == at
    assert trial.step_of(0) == 0


@pytest.mark.slow
def test_race_with_fewer_evaluations_than_rungs_cuts_once_by_each(recipe):
    told = []
    made = sweep_of([*recipe, "train.eval_every=3"], trials=4)
    made.tell = told.append
    with made.opened():
        made.run(lambda: None)
    assert "compared after 3, 6 steps and not 3 times" in told[0]
    assert [trial.entrant.state for trial in made.trials].count(EntrantState.done) == 2


def test_batch_size_is_swept_over_runs_of_the_same_share(recipe, monkeypatch):
    """A larger batch has fewer steps in an epoch, so its rungs come after fewer steps."""

    def work(call, overrides):
        values = dict(word.split("=", 1) for word in overrides)
        steps = {"4": 12, "8": 6}[values["train.global_batch_size"]]
        return {"steps": steps} if call == "plan" else pretend(call, overrides)

    monkeypatch.setattr(InlineWorker, "work", staticmethod(work))
    made = sweep_of(recipe, trials=2, parts=2, space=["sweep.global_batch_size=choice(4,8)", "sweep.lr=1e-2,1e-3"])
    with made.opened():
        made._draw(0)
        made._draw(1)
        made.workers = [InlineWorker({})]
        for trial in made.trials:
            made._find_steps(trial, made.workers[0])
    sizes = {trial.values["train.global_batch_size"]: (trial.step_of(1), trial.step_of(2)) for trial in made.trials}
    assert sizes == {4: (6, 12), 8: (3, 6)}
