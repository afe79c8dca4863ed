"""The engine of `fxtune sweep`. The processes that train are replaced by a small program that writes the metrics of a
run whose losses follow from its learning rate.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sqlite3
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import optuna
import pytest
from support.cases import slow_but
from support.harness import wait_for

from fxtune.config.compose import load
from fxtune.errors import ConfigError, DataError, Stopped, StorageError
from fxtune.system.process.signals import SIGNALS
from fxtune.tuning import sweep as engine
from fxtune.tuning.sweep import PARTS, Method, State, Sweep
from fxtune.tuning.sweep_space import parse, refuse

SPACE = ["sweep.lr=loguniform(1e-4,1e-1)", "sweep.r=choice(2,4)"]
PROGRAM = """
import json, math, os, pathlib, sys, time
def looks():
    return pathlib.Path("looks").stat().st_size if pathlib.Path("looks").exists() else 0

values = dict(word.split("=", 1) for word in sys.argv[1:])
folder = pathlib.Path(values["run.dir"].strip("'"))
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
with open(folder / "starts", "a") as starts:
    starts.write(f"{os.getpid()}\\n")
if pathlib.Path("error").exists():
    code, text = pathlib.Path("error").read_text().split(" ", 1)
    print(f"fxtune: {text}", file=sys.stderr)
    sys.exit(int(code))
file, every = folder / "metrics.jsonl", int(values["train.eval_every"])
lines = file.read_text().splitlines() if file.exists() else []
least = abs(math.log(float(values["optimizer.lr"])) - math.log(1e-2))
for step in range(len(lines) + 1, STEPS + 1):
    while pathlib.Path("hold").exists() and step > 1:
        time.sleep(0.01)
    line = {"train/step": step}
    if step % every == 0 or step == STEPS:
        line["eval/loss"] = least + 1 / step
    with file.open("a") as out:
        out.write(json.dumps(line) + "\\n")
    before = looks()
    while "eval/loss" in line and step < STEPS and looks() < before + 2:  # until the sweep has seen the loss
        time.sleep(0.01)
"""
STEPS = 16


@pytest.fixture
def recipe(chats, cwd, monkeypatch) -> list[str]:
    program = cwd / "train.py"
    program.write_text(f"STEPS = {STEPS}\n{PROGRAM}")
    monkeypatch.setattr(engine, "train_command", lambda words: [sys.executable, str(program), *words])
    monkeypatch.setattr(engine, "planned_steps", lambda words: STEPS)
    monkeypatch.setattr(engine, "POLL", 0.01)
    return [f"data.sources=[{{path: '{chats}'}}]", "data.eval_fraction=0.2", "techniques.lora.enabled=true"]


def sweep_of(
    recipe, method=Method.halving, trials=4, space=SPACE, workers=1, tell=lambda text: None, max_kl=math.inf
) -> Sweep:
    return Sweep(load(recipe), recipe, parse(space), method, trials, Path("sweep"), [{}] * workers, tell, max_kl)


def train(made: Sweep, look: Callable[[], None] = lambda: None) -> Sweep:
    """Run a sweep. The file `looks` has a byte for each look at the processes."""

    def counted() -> None:
        with Path("looks").open("a") as out:
            out.write(".")
        look()

    with made.opened():
        made.run(counted)
    return made


def run(recipe, look: Callable[[], None] = lambda: None, **options) -> Sweep:
    return train(sweep_of(recipe, **options), look)


def states(made: Sweep) -> list[str]:
    return [trial.state.value for trial in made.trials]


def starts(trial) -> list[int]:
    return [int(line) for line in (trial.folder / "starts").read_text().split()]


def final(trial) -> float:
    """The loss of a run that is not stopped."""
    return trial.curve()[-1][1] - 1 / trial.curve()[-1][0] + 1 / STEPS


@pytest.mark.parametrize("method", slow_but([Method.halving, Method.hyperband, Method.median], Method.halving))
def test_losers_are_stopped_and_the_best_runs_to_its_end(recipe, method):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = run(recipe, method=method, trials=8)
    assert not [warning for warning in seen if "optuna" in f"{warning.category.__module__} {warning.filename}"]
    best = made.winner()
    assert (len(made.trials), best.state, best.step()) == (8, State.done, STEPS)
    assert best.loss == pytest.approx(min(map(final, made.trials)))
    stopped = [trial for trial in made.trials if trial.state is State.stopped]
    assert stopped
    assert {len(starts(trial)) for trial in made.trials} == {1}
    assert all(trial.step() < STEPS for trial in stopped)
    assert not any((trial.folder / "checkpoints").exists() for trial in stopped), "they do not go on"
    assert made.runs < 8
    study = optuna.load_study(study_name="sweep", storage="sqlite:///sweep/optuna.db")
    assert study.best_value == best.loss
    assert study.best_trial.params == best.values
    assert [trial.state.name for trial in study.trials].count("PRUNED") == len(stopped)
    assert max(study.best_trial.intermediate_values) == PARTS


def test_max_kl_lets_no_configuration_win_that_has_moved_further(recipe, cwd):
    """The best of three rates has moved furthest, and the study learns that it is no good one."""
    program = (cwd / "train.py").read_text()
    moved = 'result = {"general/kl": float(values["optimizer.lr"])}\n(folder / "result.json").write_text(json.dumps(result))'
    (cwd / "train.py").write_text(f"{program}\n{moved}\n")
    space = ["sweep.lr=choice(1e-2,1e-3,1e-4)"]
    free = run(recipe, method=Method.none, trials=3, space=space)
    best = free.winner()
    assert best is not None
    assert best.values == {"optimizer.lr": 1e-2}
    shutil.rmtree("sweep")
    bound = run(recipe, method=Method.none, trials=3, space=space, max_kl=5e-3)
    best = bound.winner()
    assert best is not None
    assert (best.values, best.kl) == ({"optimizer.lr": 1e-3}, 1e-3)
    study = optuna.load_study(study_name="sweep", storage="sqlite:///sweep/optuna.db")
    assert study.best_trial.params == best.values
    shutil.rmtree("sweep")
    assert run(recipe, method=Method.none, trials=3, space=space, max_kl=1e-6).winner() is None


def test_max_kl_needs_a_measured_kl(recipe):
    with pytest.raises(ConfigError, match="--max-kl"):
        refuse(load([*recipe, "data.general=[]"]), max_kl=0.1)
    refuse(load(recipe), max_kl=0.1)


def test_without_a_method_all_run_to_their_end_two_at_a_time(recipe):
    """The first two wait for each other."""
    Path("hold").touch()

    def look():
        if all(Path(f"sweep/trial-{number}/starts").exists() for number in range(2)):
            Path("hold").unlink(missing_ok=True)

    assert states(run(recipe, look, method=Method.none, trials=3, workers=2)) == ["done"] * 3


def test_a_small_space_is_drawn_without_repetition(recipe):
    made = run(recipe, trials=9, space=["sweep.lr=1e-2,1e-3", "sweep.r=uniform(2,4)"])
    values = [tuple(trial.values.values()) for trial in made.trials]
    assert sorted(values) == [(lr, r) for lr in (1e-3, 1e-2) for r in (2, 3, 4)]


def test_draws_follow_the_seed_of_the_run(recipe):
    def drawn(seed: int, folder: str) -> list[dict]:
        made = run([*recipe, f"run.seed={seed}"], method=Method.none, trials=1)
        Path("sweep").rename(folder)
        return [trial.values for trial in made.trials]

    assert drawn(0, "a") == drawn(0, "b") != drawn(1, "c")


def test_more_trials_go_on_with_the_sweep(recipe):
    before = run(recipe, trials=2)
    after = run(recipe, trials=4)
    assert [trial.values for trial in after.trials[:2]] == [trial.values for trial in before.trials]
    assert len({trial.values["optimizer.lr"] for trial in after.trials}) == 4
    assert [len(starts(trial)) for trial in after.trials] == [1, 1, 1, 1]


@pytest.mark.parametrize("space", slow_but([SPACE, ["sweep.lr=1e-2,1e-3,2e-3,3e-3"]], SPACE))
def test_killed_sweep_goes_on_in_the_same_run_folders(recipe, space):
    """A child process begins the sweep, and is killed twice."""
    Path("hold").touch()
    for begun in ("trial-1", "trial-2"):
        child = os.fork()
        if not child:
            with suppress(BaseException):
                run(recipe, space=space, workers=2)
            os._exit(1)
        wait_for(Path(f"sweep/{begun}/metrics.jsonl").exists)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        Path("hold").unlink(missing_ok=True)
    begun = {folder: folder.stat().st_ino for folder in Path("sweep").glob("trial-*") if folder.is_dir()}
    made = run(recipe, space=space)
    assert sorted(trial.folder.name for trial in made.trials) == [f"trial-{number}" for number in range(4)]
    assert set(states(made)) <= {"done", "stopped"}
    assert len({tuple(trial.values.values()) for trial in made.trials}) == 4
    assert {folder: folder.stat().st_ino for folder in begun} == begun
    for trial in made.trials:
        steps = [step for step, _ in trial.curve()]
        assert steps == sorted({*steps}), "each went on from where it was"
    assert made.winner().loss == pytest.approx(min(map(final, made.trials)))
    again = run(recipe, space=space)
    assert [len(starts(trial)) for trial in again.trials] == [len(starts(trial)) for trial in made.trials]
    assert again.winner().number == made.winner().number


def test_sweep_that_died_while_it_drew_goes_on(recipe, monkeypatch):
    usual = optuna.Trial.set_user_attr

    def dying(self, key, value):
        if self.number == 1:
            raise KeyboardInterrupt
        usual(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(optuna.Trial, "set_user_attr", dying)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, space=["sweep.lr=1e-2,1e-3,2e-3"])
    made = run(recipe, space=["sweep.lr=1e-2,1e-3,2e-3"])
    assert [trial.folder.name for trial in made.trials] == ["trial-0", "trial-1", "trial-2"]
    assert {trial.values["optimizer.lr"] for trial in made.trials} == {1e-2, 1e-3, 2e-3}


def test_run_that_something_else_ends_goes_on_and_fails_at_last(recipe):
    Path("hold").touch()
    killed: list[int] = []

    def kill():
        begun = starts(made.trials[0]) if Path("sweep/trial-0/starts").exists() else []
        pid = begun[-1] if begun else 0  # the file may not have its first line yet
        if pid and pid not in killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            if len(killed) > engine.RESTARTS:
                Path("hold").unlink()

    made = sweep_of(recipe, trials=2)
    train(made, kill)
    assert states(made) == ["failed", "done"]
    assert "most likely because the host ran out of memory" in made.trials[0].reason
    assert len(killed) == engine.RESTARTS + 1


def test_failed_configuration_loses_and_says_why(recipe):
    space = ["sweep.global_batch_size=choice(4,6)", "sweep.lr=choice(1e-2,1e-3)"]
    made = run([*recipe, "train.micro_batch_size=4"], space=space)
    failed = [trial for trial in made.trials if trial.state is State.failed]
    assert len(failed) == 2
    assert all("must be a multiple of" in trial.reason for trial in failed)
    assert made.winner().values == {"train.global_batch_size": 4, "optimizer.lr": 1e-2}
    assert run([*recipe, "train.micro_batch_size=4"], space=space).ranking()[-1].reason == failed[-1].reason


def test_sweep_whose_configurations_all_fail_is_an_error(recipe):
    Path("error").write_text("5 the loss is not finite")
    with pytest.raises(ConfigError, match=r"Every configuration failed. The first of them: .*the loss is not finite"):
        run(recipe, trials=2)


@pytest.mark.parametrize(("code", "kind"), slow_but([(6, StorageError), (3, DataError)], (6, StorageError)))
def test_full_disk_or_bad_data_ends_the_sweep_and_not_a_configuration(recipe, code, kind):
    Path("error").write_text(f"{code} the disk is full")
    with pytest.raises(kind, match="the disk is full"):
        run(recipe)
    Path("error").unlink()
    assert "failed" not in states(run(recipe))


def test_configuration_that_cannot_go_on_ends_the_sweep_and_is_not_lost(recipe):
    """Its data or its packages have changed since it began. They can be put back."""

    def change():
        if not Path("error").exists() and made.trials[0].losses:
            Path("error").write_text("2 cannot be resumed with the same bits")
            os.kill(starts(made.trials[0])[0], signal.SIGKILL)

    made = sweep_of(recipe)
    with pytest.raises(ConfigError, match="cannot be resumed with the same bits"):
        train(made, change)
    Path("error").unlink()
    assert "failed" not in states(run(recipe))


def test_signal_saves_the_runs_and_says_so(recipe):
    Path("hold").touch()

    def stop():
        if Path("sweep/trial-0/metrics.jsonl").exists() and Path("hold").exists():
            Path("hold").unlink()
            signal.raise_signal(signal.SIGTERM)

    with SIGNALS, pytest.raises(Stopped) as stopped:
        run(recipe, stop)
    assert "1 run saved in sweep. The same command goes on" in str(stopped.value)
    made = run(recipe)
    assert len(starts(made.trials[0])) == 2
    assert made.winner() is not None


def test_folder_of_another_sweep_or_of_a_run_is_refused(recipe):
    with (
        sweep_of(recipe).opened(),
        pytest.raises(StorageError, match="in use by a sweep that is alive"),
        sweep_of(recipe).opened(),
    ):
        pass
    other = sweep_of(recipe, space=["sweep.lr=loguniform(1e-4,1e-2)", SPACE[1]])
    with pytest.raises(ConfigError, match=r"optimizer.lr: .* -> loguniform\(1e-4,1e-2\)"), other.opened():
        pass
    other = sweep_of([*recipe, "optimizer.weight_decay=0.3"])
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay: .* -> 0.3"), other.opened():
        pass
    again = sweep_of([*recipe, "run.resume=never"])
    with pytest.raises(ConfigError, match=r"holds a sweep, and run\.resume=never"), again.opened():
        pass
    with sweep_of([*recipe, "tracking.wandb.project=other", "checkpoint.every=7"]).opened():
        pass
    Path("sweep/config.yaml").touch()
    with pytest.raises(ConfigError, match="holds a run, and no sweep"), sweep_of(recipe).opened():
        pass


def test_no_secret_is_in_the_study(recipe):
    with sweep_of([*recipe, "tracking.wandb.tags=['https://me:topsecret@host']"]).opened():
        pass
    assert "topsecret" not in "".join(sqlite3.connect("sweep/optuna.db").iterdump())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["data.eval_fraction=0"], "nothing is held out"),
        (["train.stop.patience=2"], "the sweep stops the losers itself"),
        (["train.max_minutes=3"], "depends on the clock"),
        (["train.pause_after=3"], "decides when its runs end"),
        (["run.gpus=2"], "each run of a sweep has one card"),
        (["parallel.shard=2"], r"parallel\.shard=2: each run of a sweep has one card"),
        (["parallel.average_every=4"], r"parallel\.average_every=4: each run of a sweep has one card"),
    ],
)
def test_recipe_that_cannot_be_swept(recipe, words, told):
    with pytest.raises(ConfigError, match=told):
        refuse(load([*recipe, *words]))


@pytest.mark.parametrize(
    ("every", "compared"), slow_but([(0, [1, 2, 3, 4, 5, 6, 7, 8]), (5, [2, 5, 7, 8]), (20, [8])], (5, [2, 5, 7, 8]))
)
def test_configurations_are_compared_at_the_first_evaluation_after_an_eighth(recipe, every, compared):
    made = run([*recipe, f"train.eval_every={every}"], method=Method.none, trials=1)
    assert list(made.trials[0].losses) == compared
    if not every:
        assert [step for step, _ in made.trials[0].curve()] == [2 * eighth for eighth in compared]


def test_a_longer_run_is_compared_after_the_same_share(recipe, monkeypatch):
    """A larger batch has fewer steps in an epoch."""
    program = Path("train.py")
    text = program.read_text().replace(
        f"STEPS = {STEPS}\n", "import sys\nSTEPS = 12 if 'train.global_batch_size=4' in sys.argv else 6\n"
    )
    program.write_text(text)
    monkeypatch.setattr(engine, "planned_steps", lambda words: 12 if "train.global_batch_size=4" in words else 6)
    space = ["sweep.global_batch_size=choice(4,8)", "sweep.lr=1e-2,1e-3"]
    made = run([*recipe, "train.eval_every=3"], method=Method.none, space=space)
    found = {(trial.values["train.global_batch_size"], trial.steps, tuple(trial.losses)) for trial in made.trials}
    assert found == {(4, 12, (2, 4, 6, 8)), (8, 6, (4, 8))}


@pytest.mark.slow
def test_planned_steps_are_the_steps_of_the_run(cwd):
    assert engine.planned_steps(["+recipe=quickstart", "train.max_steps=7", "data.cache_dir=cache"]) == 7
    with pytest.raises(ConfigError, match=r"unknown key `train.max_stps`"):
        engine.planned_steps(["train.max_stps=3"])
