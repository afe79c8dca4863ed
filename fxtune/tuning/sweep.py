"""The engine of `fxtune sweep`. It asks an Optuna study for configurations, and trains each of them in a process.

    FOLDER/optuna.db       the study: drawn values, held-out losses, verdicts (optuna-dashboard reads it)
    FOLDER/trial-N/        the run of configuration N, as any other run: config, metrics, checkpoints, result
    FOLDER/trial-N.log     what the run printed

A run is an ordinary `fxtune` process. The sweep reads the held-out losses in its metrics.jsonl and reports them to the
study. When the study's pruner stops a configuration, its process gets SIGTERM. The study and the run folders are the
state of a sweep, so a killed sweep goes on where it was.

Optuna's public interface cannot continue a trial that another process began. So after a kill the trial that was
running is marked as failed, and the study gets a new trial with the same values and the same run folder. Only the last
trial of a run folder counts."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import reduce
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from fxtune.checkpoint.folder_lock import FolderLock
from fxtune.checkpoint.run_folder import ALIVE, CHECKPOINTS, METRICS, RESULT, differences, metric_rows
from fxtune.config.compose import load
from fxtune.config.root import Config, Export, Resume, completed
from fxtune.errors import ConfigError, DataError, Stopped, StorageError, UserError, writing
from fxtune.system.files.atomic_files import json_or_empty
from fxtune.system.process.process_group import end_process, run_process, start_process
from fxtune.system.process.signals import SIGNALS
from fxtune.system.terminal.redact import redact, redact_text
from fxtune.training.monitors.energy import Used
from fxtune.tuning.sweep_space import Dimension, combinations, listed
from fxtune.tuning.trial import failure

STUDY = "optuna.db"
NAME = "sweep"
"""The name of the study in its file. The study's attribute with the plan of the sweep has the same name."""
PARTS = 8
"""Pruners compare configurations after each eighth of a run."""
ETA = 3
"""In successive halving one of ETA configurations goes on to the next rung. The next rung has ETA times the steps."""
STARTUP = 8
"""Configurations that are drawn at random before TPE takes over."""
POLL = 0.5
"""Seconds between two looks at the processes."""
RESTARTS = 2
"""How often a run is started again if its process was ended from outside. After that its configuration fails."""
TAIL = 8192
"""The last lines of a metrics.jsonl or of a log fit in this many bytes."""
STOPPED = (75, 130)
"""The exit codes of a run that a signal has stopped in an orderly way."""
END_SWEEP: dict[int, type[UserError]] = {error.exit_code: error for error in (StorageError, DataError)}
"""Errors that a configuration did not cause. They end the sweep. Once the cause is mended, the same command goes on. A
ConfigError of a configuration that has trained before ends the sweep, too: its data or packages have changed."""


class Method(str, Enum):
    halving = "halving"
    hyperband = "hyperband"
    median = "median"
    none = "none"

    def pruner(self) -> optuna.pruners.BasePruner:
        if self is Method.halving:
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=ETA)
        if self is Method.hyperband:
            return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=PARTS, reduction_factor=ETA)
        if self is Method.median:
            return optuna.pruners.MedianPruner(n_startup_trials=3)
        return optuna.pruners.NopPruner()


class State(str, Enum):
    waiting = "waiting"
    running = "running"
    stopped = "stopped"
    done = "done"
    failed = "failed"


STATES = {
    TrialState.WAITING: State.waiting,
    TrialState.RUNNING: State.waiting,
    TrialState.PRUNED: State.stopped,
    TrialState.COMPLETE: State.done,
    TrialState.FAIL: State.failed,
}


@dataclass
class Trial:
    """One configuration: its values, its run, and how it compares."""

    folder: Path
    values: dict[str, Any]
    state: State = State.waiting
    steps: int = 0
    """Steps of the whole run; 0 before they are known."""
    losses: dict[int, float] = field(default_factory=dict)
    """The held-out loss that was compared at each eighth of the run."""
    reason: str = ""
    """Why the configuration failed."""

    @property
    def number(self) -> int:
        return int(self.folder.name.rpartition("-")[2])

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={shown(value)}" for key, value in self.values.items())

    @property
    def loss(self) -> float:
        return self.losses[max(self.losses)] if self.losses else math.nan

    @property
    def kl(self) -> float | None:
        """The KL from the base on general text, of a finished run that has measured it."""
        return json_or_empty(self.folder / RESULT).get("general/kl")

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def curve(self) -> list[tuple[int, float]]:
        """(step, held-out loss) of each evaluation."""
        rows = metric_rows(self.folder)
        return [(row["train/step"], row["eval/loss"]) for row in rows if row.get("eval/loss") is not None]

    def step(self) -> int:
        """The step of the last complete line of metrics.jsonl."""
        with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
            return int(json.loads(_tail(self.folder / METRICS).split(b"\n")[-2])["train/step"])
        return 0


def _tail(file: Path) -> bytes:
    with file.open("rb") as lines:
        lines.seek(-min(TAIL, lines.seek(0, os.SEEK_END)), os.SEEK_END)
        return lines.read()


def shown(value: Any) -> str:
    """A value for people: 0.000415 for 0.00041507703."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@dataclass
class _Job:
    trial: Trial
    asked: optuna.Trial
    process: subprocess.Popen[bytes]
    restarts: int = 0
    pruned: bool = False
    """Whether the pruner has stopped the configuration, so that its process will end."""


class Sweep:
    """A sweep in `folder`. `overrides`: the recipe and keys as typed, without the swept keys."""

    def __init__(
        self,
        config: Config,
        overrides: Sequence[str],
        space: Sequence[Dimension],
        method: Method,
        count: int,
        folder: Path,
        environments: Sequence[Mapping[str, str]],
        tell: Callable[[str], None],
        max_kl: float = math.inf,
    ) -> None:
        """`count`: how many configurations to train. `environments`: environment variables for each of the processes
        that train at the same time. `tell` gets a line for each event. `max_kl`: the winner may have moved from its
        base by this, in nats a token of general text."""
        self.config, self.space, self.method, self.folder, self.tell = config, space, method, folder, tell
        self.max_kl = max_kl
        self.overrides = [word for word in overrides if not word.lstrip("+").startswith("run.dir=")]
        self.count = int(min(count, combinations(space)))
        self.environments = environments
        self.trials: list[Trial] = []
        self._jobs: dict[int, _Job] = {}
        """What trains in each environment, by the environment's index."""

    @contextmanager
    def opened(self) -> Iterator[Sweep]:
        """Lock the folder, and read its study or begin a study. Raises ConfigError if the folder has another sweep."""
        lock = FolderLock(self.folder)
        with writing(f"{self.folder} cannot be used", "or set run.dir to another folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            taken = lock.acquire()
        if not taken:
            raise StorageError(
                f"{self.folder} {ALIVE.replace('run', 'sweep')}{lock.holder()}. Wait for it, or end it."
            )
        try:
            self._open_study()
            yield self
        finally:
            lock.release()

    def _open_study(self) -> None:
        file, resume = self.folder / STUDY, self.config.run.resume
        if not file.exists() and resume is Resume.must:
            raise ConfigError(f"run.resume=must, but {self.folder} holds no sweep. Check run.dir.")
        if file.exists() and resume is Resume.never:
            raise ConfigError(f"{self.folder} holds a sweep, and run.resume=never. Set run.dir to a new folder.")
        if (self.folder / "config.yaml").exists():
            raise ConfigError(f"{self.folder} holds a run, and no sweep. Set run.dir to another folder.")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.study = study = optuna.create_study(
            storage=f"sqlite:///{file.resolve()}", study_name=NAME, pruner=self.method.pruner(), load_if_exists=True
        )
        self._claim()
        seed = self.config.run.seed
        # A sampler with the seed of an earlier call would repeat the values of that call.
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials), n_startup_trials=STARTUP)
        for values in listed(self.space, self.count, seed):
            study.enqueue_trial(values, skip_if_exists=True)
        found = study.get_trials(deepcopy=False)
        last = {frozen.user_attrs["run"]: frozen for frozen in found if "run" in frozen.user_attrs}
        for frozen in found:
            if frozen.state is TrialState.RUNNING:  # an ended process left it unfinished
                if last.get(frozen.user_attrs.get("run"), frozen) is frozen:
                    study.enqueue_trial(frozen.params, user_attrs=frozen.user_attrs)
                study.tell(frozen.number, state=TrialState.FAIL)
        for name, frozen in last.items():
            kept, state = frozen.user_attrs, STATES[frozen.state]
            # The losses of a run that goes on are reported again.
            losses = {} if state is State.waiting else dict(frozen.intermediate_values)
            trial = Trial(self.folder / name, kept["values"], state, kept.get("steps", 0), losses)
            trial.reason = kept.get("reason", "")
            self.trials.append(trial)
        self.trials.sort(key=lambda trial: trial.number)
        for trial in self.trials:
            self._clean(trial)

    def _claim(self) -> None:
        """Write recipe and space to a new study, or compare them with the recipe and the space in the study."""
        space = {dimension.key: dimension.text for dimension in self.space}
        plain = redact(json.loads(json.dumps(asdict(self.config))))
        before = self.study.user_attrs.get(NAME)
        if before is None:
            self.study.set_user_attr(NAME, {"space": space, "config": plain})
            return
        changed = differences(before["space"], space) + differences(completed(before["config"]), plain)
        if changed:
            raise ConfigError(
                f"{self.folder} holds another sweep, so it cannot go on with this one:\n"
                + "\n".join(changed)
                + "\nPut these back, or set run.dir to a new folder."
            )

    def run(self, look: Callable[[], None]) -> None:
        """Train until all configurations are judged. `look` is called twice a second.

        Raises Stopped once all runs are saved, an error of END_SWEEP, and ConfigError if every configuration fails.
        """
        with SIGNALS.deferred():
            try:
                while True:
                    self._fill()
                    if not self._jobs:
                        break
                    with SIGNALS.interruptible():
                        time.sleep(POLL)
                    for index in list(self._jobs):
                        self._follow(index)
                    look()
            except Stopped as stop:
                for job in self._jobs.values():
                    job.process.terminate()  # the run saves its state and ends
                for job in self._jobs.values():
                    job.process.wait()
                count = len(self._jobs)
                saved = f"{count} run{'s' * (count != 1)} saved in {self.folder}. " if count else ""
                stop.outcome = f"{saved}The same command goes on."
                raise
            finally:
                for job in self._jobs.values():
                    end_process(job.process)
        failed = [trial for trial in self.trials if trial.state is State.failed]
        if len(failed) == len(self.trials):
            raise ConfigError(f"Every configuration failed. The first of them: {failed[0].reason}")

    def _fill(self) -> None:
        """Start a run in each free environment, as long as there are configurations."""
        for index in range(len(self.environments)):
            while index not in self._jobs and (drawn := self._draw()):
                trial, asked = drawn
                if trial.state is State.running:
                    self._jobs[index] = _Job(trial, asked, self._start(trial, index))

    def _draw(self) -> tuple[Trial, optuna.Trial] | None:
        """The next configuration, now running or failed, with its trial; None if no configuration is left."""
        if len(self.trials) >= self.count and all(trial.state is not State.waiting for trial in self.trials):
            return None
        asked = self.study.ask()
        values = {dimension.key: dimension.suggest(asked) for dimension in self.space}
        name = asked.user_attrs.get("run", f"trial-{len(self.trials)}")
        trial = next((trial for trial in self.trials if trial.folder.name == name), None)
        if trial is None:
            self.trials.append(trial := Trial(self.folder / name, values))
            asked.set_user_attr("values", values)
            asked.set_user_attr("run", name)
        trial.state = State.running
        try:
            load(self.words(trial))
            trial.steps = self._planned_steps(trial)
            asked.set_user_attr("steps", trial.steps)
        except ConfigError as error:
            self._end(trial, asked, State.failed, redact_text(str(error)))
        return trial, asked

    def _planned_steps(self, trial: Trial) -> int:
        """How many steps the run takes. This depends on its data and on keys of `train`, such as the batch."""

        def batch(one: Trial) -> list[tuple[str, Any]]:
            return [(key, value) for key, value in one.values.items() if key.startswith("train.")]

        known = next((other.steps for other in self.trials if other.steps and batch(other) == batch(trial)), None)
        if known is not None:
            return known
        with SIGNALS.interruptible():
            return planned_steps(self.words(trial))

    def _start(self, trial: Trial, index: int) -> subprocess.Popen[bytes]:
        with trial.log.open("ab") as log:
            return start_process(
                train_command(self.words(trial)),
                self.environments[index],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _follow(self, index: int) -> None:
        """Report the new losses of a run, and judge the run. If its process has ended, record the end."""
        job = self._jobs[index]
        code = job.process.poll()  # asked before the losses are read, so that no loss is missed
        if not job.pruned and (code is not None or self._has_passed_an_eighth(job.trial)) and self._is_pruned(job):
            job.pruned = True
            job.process.terminate()
        if code is None:
            return
        end_process(job.process)
        trial = job.trial
        if not job.pruned and (code < 0 or code in STOPPED) and job.restarts < RESTARTS:
            job.restarts += 1
            job.process = self._start(trial, index)
            return
        del self._jobs[index]
        if job.pruned:
            self._end(trial, job.asked, State.stopped)
        elif code == 0 and not math.isnan(trial.loss):
            self._end(trial, job.asked, State.done)
        elif code == 0:
            reason = f"{trial.folder / METRICS} has no held-out loss that is a number"
            self._end(trial, job.asked, State.failed, reason)
        else:
            reason = failure(code, _tail(trial.log).decode(errors="replace"), 0).reason
            raise_if_it_ends_the_sweep(code, reason, bool(trial.losses))
            self._end(trial, job.asked, State.failed, reason)

    def _has_passed_an_eighth(self, trial: Trial) -> bool:
        """Whether the run has passed an eighth whose loss is not known. Only then its losses need be read."""
        part = PARTS * trial.step() // trial.steps
        return part > 0 and part not in trial.losses

    def _is_pruned(self, job: _Job) -> bool:
        """Report the losses of a run that are new to the study. Returns whether the pruner stops the run."""
        trial, best = job.trial, math.nan
        for step, loss in trial.curve():
            best = loss if self.config.run.export is Export.last else min(loss, best, key=_nan_last)
            part = PARTS * step // trial.steps
            if not part or part in trial.losses:
                continue
            trial.losses[part] = best
            job.asked.report(best, part)
            self.tell(f"trial {trial.number} ({trial.title}): held-out loss {best:.4f}, step {step} of {trial.steps}")
            if step < trial.steps and job.asked.should_prune():
                return True
        return False

    def _end(self, trial: Trial, asked: optuna.Trial, state: State, reason: str = "") -> None:
        """Record that a configuration is done, stopped or failed."""
        trial.state, trial.reason = state, reason
        asked.set_user_attr("reason", reason)
        if state is State.done:
            self.study.tell(asked, trial.loss if self.keeps(trial) else math.inf)
        else:
            self.study.tell(asked, state=TrialState.PRUNED if state is State.stopped else TrialState.FAIL)
        self._clean(trial)
        self.tell(f"trial {trial.number} ({trial.title}) {state.value}{f': {reason}' if reason else ''}")

    def _clean(self, trial: Trial) -> None:
        """Remove the checkpoints of a stopped configuration, because it never goes on."""
        if trial.state is State.stopped:
            shutil.rmtree(trial.folder / CHECKPOINTS, ignore_errors=True)

    def choices(self, trial: Trial) -> list[str]:
        """The words of a command line that say what `trial` learns and when it evaluates."""
        every = self.config.train.eval_every or max(1, -(-trial.steps // PARTS))
        values = (dimension.override(trial.values[dimension.key]) for dimension in self.space)
        return [*self.overrides, *values, f"train.eval_every={every}"]

    def words(self, trial: Trial) -> list[str]:
        """The words of a command line that trains `trial`."""
        folder = str(trial.folder).replace("\\", "\\\\").replace("'", "\\'")
        return [
            *self.choices(trial),
            f"run.dir='{folder}'",
            "run.resume=auto",
            f"run.name='{self.config.run.name}-{trial.number}'",
            "run.gpus=1",
            "tracking.display=plain",
            f"tracking.wandb.group='{self.config.tracking.wandb.group or self.folder.name}'",
        ]

    def ranking(self) -> list[Trial]:
        """The configurations. Finished runs come first, then runs with more eighths; of equal runs, the lower loss
        comes first. Failed configurations come last."""
        return sorted(
            self.trials,
            key=lambda trial: (
                trial.state is State.failed,
                trial.state is not State.done,
                -max(trial.losses, default=-1),
                _nan_last(trial.loss),
                trial.number,
            ),
        )

    def keeps(self, trial: Trial) -> bool:
        """Whether a finished configuration has moved from its base by at most `max_kl`."""
        return self.max_kl == math.inf or (trial.kl is not None and trial.kl <= self.max_kl)

    def winner(self) -> Trial | None:
        """The configuration with the lowest loss at the end of its run, among the configurations that keeps() accepts;
        None if keeps() accepts no configuration."""
        return next((trial for trial in self.ranking() if trial.state is State.done and self.keeps(trial)), None)

    def used(self) -> Used:
        """Energy and time of all runs so far."""
        return reduce(Used.plus, (Used.read(trial.folder) for trial in self.trials), Used())

    @property
    def runs(self) -> float:
        """How much was trained so far, as a number of whole runs."""
        return sum(trial.step() / trial.steps for trial in self.trials if trial.steps)


def _nan_last(loss: float) -> float:
    """A key to sort losses by: NaN comes last."""
    return math.inf if math.isnan(loss) else loss


def train_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "fxtune", *words]


def planned_steps(words: Sequence[str]) -> int:
    """How many steps a run takes. Another process reads its data. Raises ConfigError, or an error of END_SWEEP."""
    with tempfile.TemporaryDirectory(prefix="fxtune-sweep-") as scratch:
        file = Path(scratch) / "preview.json"
        code, output, _ = run_process([sys.executable, "-m", "fxtune", "preview", *words, "--json", str(file)])
        if code:
            reason = failure(code, output, 0).reason
            raise_if_it_ends_the_sweep(code, reason, False)
            raise ConfigError(reason)
        return int(json.loads(file.read_text(encoding="utf-8"))["summary"]["steps"])


def raise_if_it_ends_the_sweep(code: int, reason: str, trained: bool) -> None:
    """Raise the error that ends the sweep, if `code` is such an exit code. `trained`: whether training had begun."""
    if error := END_SWEEP.get(code) or (ConfigError if trained and code == ConfigError.exit_code else None):
        raise error(reason)
