"""The engine of `fxtune sweep`: runs the race of the configurations on the cards, and keeps it in a folder.

    FOLDER/sweep.yaml      what is swept and how; the same command goes on, another one is refused
    FOLDER/optuna.db       the study of Optuna: drawn values, losses at the rungs, verdicts (optuna-dashboard reads it)
    FOLDER/trial-N/        the run of configuration N, as any other run: config, metrics, checkpoints, result
    FOLDER/trial-N.log     what it printed

A run is paused by train.pause_after and goes on with the same bits, at the learning rate of the whole run. The state
of a sweep is what Optuna's storage and the run folders hold, so a sweep that is killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import select
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial, reduce
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from fxtune.checkpoint.folder_lock import FolderLock
from fxtune.checkpoint.run_folder import ALIVE, CHECKPOINTS, METRICS, RESULT, differences, metric_rows, read_config
from fxtune.config.compose import load
from fxtune.config.root import Config, Export, Resume, completed
from fxtune.distributed.parallel import AUTO, DEGREES
from fxtune.errors import ConfigError, DataError, Stopped, StorageError
from fxtune.system.atomic_files import replace_text
from fxtune.system.host import cores
from fxtune.system.redact import redact, redact_text
from fxtune.system.signals import SIGNALS
from fxtune.training.run_energy import Used
from fxtune.tuning import race, sampling
from fxtune.tuning.race import Entrant, Race, State
from fxtune.tuning.sampling import Sampler
from fxtune.tuning.sweep_space import Dimension
from fxtune.tuning.sweep_worker import PLAN, TRAIN, SweepWorker
from fxtune.upstream.optuna import trial_of

SETTINGS, STUDY = "sweep.yaml", "optuna.db"
THREADS = "OMP_NUM_THREADS"
"""The environment variable that gives a process of a sweep its number of CPU threads."""
TAIL = 8192
"""Bytes that hold the last line of a metrics.jsonl."""
REFRESH = 1.0
"""Seconds between two looks at the runs."""
STARTUP = 8
"""Configurations that are spread evenly before TPE takes over; with Hyperband, those of the first bracket."""
END_SWEEP = {error.__name__: error for error in (StorageError, DataError)}
"""Errors of a run that its configuration did not cause: the sweep ends with them, and goes on when they are mended.
ConfigError is one of them if the configuration has trained before: then its data or its packages have changed."""


class Method(str, Enum):
    halving = "halving"
    hyperband = "hyperband"
    asha = "asha"
    median = "median"
    none = "none"


@dataclass(frozen=True)
class SweepPlan:
    """What is swept and how."""

    space: tuple[Dimension, ...]
    method: Method
    trials: int
    """Configurations."""
    parts: int
    """The first rung is after 1/parts of a run."""
    eta: int
    sampler: Sampler
    seed: int

    def brackets(self) -> list[race.Bracket]:
        if self.method is Method.hyperband:
            return race.limited(race.hyperband(self.eta, self.parts), self.trials)
        if self.method is Method.none:
            return [race.Bracket(self.trials, (self.parts,))]
        return race.halving(self.trials, self.eta, self.parts)

    def pruner(self) -> optuna.pruners.BasePruner:
        """Optuna's pruner, for the methods that judge each configuration by those before it."""
        if self.method is Method.asha:
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=self.eta)
        if self.method is Method.median:
            return optuna.pruners.MedianPruner(n_startup_trials=3)
        return optuna.pruners.NopPruner()

    def saved(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("trials", "parts", "eta", "seed")}
        return {
            "space": {one.key: one.text for one in self.space},
            "method": self.method.value,
            "sampler": self.sampler.value,
            **values,
        }


@dataclass
class Trial:
    """One configuration: its values, its run, and its place in the race."""

    entrant: Entrant
    values: dict[str, Any]
    folder: Path
    steps: int = 0
    """Steps of the whole run; 0: not known yet."""
    parts: int = 1
    """Rung r is near r / parts of the run."""
    rungs: tuple[int, ...] = ()
    """The rungs of its bracket, including those for which its run has no evaluation."""
    every: int = 1
    """Steps between two evaluations."""

    @property
    def title(self) -> str:
        return ", ".join(f"{key}={shown(value)}" for key, value in self.values.items())

    @property
    def evaluations(self) -> int:
        """The number of evaluations of the whole run, its end included."""
        return -(-self.steps // self.every)

    def step_of(self, rung: int) -> int:
        """The step of a rung: of the evaluation that is nearest to its share of the run and after that of the rung
        before. Where there are fewer evaluations than rungs, the last rungs have one each."""
        at = 0
        for index, one in enumerate(self.rungs[:-1]):
            latest = self.evaluations - (len(self.rungs) - 1 - index)
            at = max(1, min(latest, max(at + 1, round(one * self.steps / (self.parts * self.every)))))
            if one == rung:
                return min(self.steps, at * self.every)
        return self.steps if rung else 0

    def curve(self) -> list[tuple[int, float]]:
        """(step, held-out loss) of each evaluation."""
        return [
            (line["train/step"], line["eval/loss"])
            for line in metric_rows(self.folder)
            if line.get("eval/loss") is not None
        ]

    def step(self) -> int:
        """The step of the last complete line of metrics.jsonl."""
        file = self.folder / METRICS
        with suppress(OSError, ValueError, KeyError, IndexError, TypeError), file.open("rb") as lines:
            lines.seek(-min(TAIL, lines.seek(0, os.SEEK_END)), os.SEEK_END)
            return int(json.loads(lines.read().split(b"\n")[-2])["train/step"])
        return 0


def shown(value: Any) -> str:
    """A value for people: 0.000415 for 0.00041507703."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class Sweep:
    """A sweep in `folder`. `overrides`: the recipe and keys as typed, without what is swept."""

    def __init__(
        self,
        config: Config,
        overrides: Sequence[str],
        plan: SweepPlan,
        folder: Path,
        environments: Sequence[Mapping[str, str]],
        tell: Callable[[str], None],
    ) -> None:
        """`environments`: of each process that trains. `tell` gets a line for each event."""
        self.config, self.plan, self.folder, self.tell = config, plan, folder, tell
        self.overrides = [word for word in overrides if not word.lstrip("+").startswith("run.dir=")]
        self.environments = environments
        self.trials: list[Trial] = []
        self.race = Race(plan.brackets(), plan.eta, self._prunes if plan.method in PRUNERS else None)
        self._steps: dict[str, int] = {}
        """The swept values of `train` -> the steps of a run."""
        self._jobs: dict[int, tuple[Trial, int]] = {}
        """Index of a worker -> what it runs, and to which rung."""
        self.workers: list[SweepWorker] = []

    @contextmanager
    def opened(self) -> Iterator[Sweep]:
        """Lock the folder, and read the study in it or begin one. Raises ConfigError if another sweep is there."""
        lock = FolderLock(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            taken = lock.acquire()
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be used: {error}. Set run.dir to another folder.") from error
        if not taken:
            raise StorageError(
                f"{self.folder} {ALIVE.replace('run', 'sweep')}{lock.holder()}. Wait for it, or end it."
            )
        try:
            self._claim()
            self._open_study()
            yield self
        finally:
            lock.release()

    def _claim(self) -> None:
        """Write sweep.yaml, or compare with the one that is there."""
        plain = redact(json.loads(json.dumps(asdict(self.config))))
        now = {**self.plan.saved(), "config": plain}
        before, resume = read_config(self.folder, SETTINGS), self.config.run.resume
        if before is None and resume is Resume.must:
            raise ConfigError(f"run.resume=must, but {self.folder} holds no sweep. Check run.dir.")
        if before is not None and resume is Resume.never:
            raise ConfigError(f"{self.folder} holds a sweep, and run.resume=never. Set run.dir to a new folder.")
        if before is None:
            if (self.folder / "config.yaml").exists():
                raise ConfigError(f"{self.folder} holds a run, and no sweep. Set run.dir to another folder.")
            text = yaml.safe_dump(now, sort_keys=False, allow_unicode=True)
            replace_text(self.folder / SETTINGS, text)
            return
        saved = self.plan.saved()
        changed = differences({name: before.get(name) for name in saved}, saved)
        changed += differences(completed(before.get("config") or {}), plain)
        if changed:
            raise ConfigError(
                f"{self.folder} holds another sweep, so it cannot go on with this one:\n"
                + "\n".join(changed)
                + "\nPut these back, or set run.dir to a new folder."
            )

    def _open_study(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = (self.folder / STUDY).resolve()
        self.storage = RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
        self.study = optuna.create_study(
            storage=self.storage,
            study_name=self.config.run.name,
            pruner=self.plan.pruner(),
            direction="minimize",
            load_if_exists=True,
        )
        states = {TrialState.COMPLETE: State.done, TrialState.PRUNED: State.stopped, TrialState.FAIL: State.failed}
        self._steps = dict(self.study.user_attrs.get("steps", {}))
        for frozen in self.study.get_trials(deepcopy=False):
            values = frozen.params
            if frozen.state is TrialState.RUNNING:  # it may have been killed while it was drawn
                values = self._values(frozen.number, partial(trial_of, self.study, frozen))
            entrant = Entrant(frozen.number, self.race.bracket_of(frozen.number))
            entrant.losses = dict(frozen.intermediate_values)
            entrant.reason = frozen.user_attrs.get("reason", "")
            entrant.state = states.get(frozen.state, State.paused if entrant.losses else State.waiting)
            self._add(entrant, values)
        for trial in self.trials:  # killed between two of the lines that record a result
            if trial.entrant.state is State.paused and trial.entrant.reached == self._last_rung(trial):
                self._tell_end(trial, State.done)
        for entrant in self.race.judge():
            self._tell_end(self.trials[entrant.number], State.stopped)
        for trial in self.trials:
            self._clean(trial)

    def _add(self, entrant: Entrant, values: dict[str, Any]) -> Trial:
        self.race.add(entrant)
        rungs = self.plan.brackets()[entrant.bracket].rungs
        trial = Trial(entrant, values, self.folder / f"trial-{entrant.number}", parts=self.plan.parts, rungs=rungs)
        self.trials.append(trial)
        self._measure(trial)
        return trial

    def _measure(self, trial: Trial) -> None:
        """Set the steps of the run, if they are known."""
        trial.steps = self._steps.get(_length_key(trial), 0)
        trial.every = self.config.train.eval_every or max(1, -(-trial.steps // self.plan.parts))
        if trial.steps:
            self.race.limit_rungs(trial.entrant.bracket, trial.evaluations)

    def run(self, look: Callable[[], None]) -> None:
        """Race until it is over. `look` is called each second. Raises Stopped after all runs are saved; StorageError
        and DataError; ConfigError or another UserError if every configuration fails.
        """
        if self.race.over:
            return
        with SIGNALS.deferred():
            self.workers = [SweepWorker(environment) for environment in self._with_the_same_threads()]
            try:
                while not self.race.over:
                    self._fill()
                    self._wait(look)
            except Stopped as stop:
                stop.outcome = self._save_all()
                raise
            finally:
                for worker in self.workers:
                    worker.end()
        failed = [trial for trial in self.trials if trial.entrant.state is State.failed]
        if len(failed) == len(self.trials):
            raise ConfigError(f"No configuration ran. The first one: {failed[0].entrant.reason}")

    def _with_the_same_threads(self) -> list[Mapping[str, str]]:
        """The environments, with as many CPU threads as when the sweep was begun, if this machine has the cores: sums
        depend on their number, and the same command may go on with another number of processes."""
        threads = self.environments[0].get(THREADS)
        if threads is None:  # a card, or the user has set it
            return list(self.environments)
        begun = str(self.study.user_attrs.get("threads", threads))
        self.study.set_user_attr("threads", begun)
        kept = begun if int(begun) <= cores() else threads
        return [{**environment, THREADS: kept} for environment in self.environments]

    def _fill(self) -> None:
        """Give each idle worker a job, as long as there are any."""
        for index, worker in enumerate(self.workers):
            while not worker.busy and (following := self.race.next()) is not None:
                if isinstance(following, int):
                    self._draw(following)
                    continue
                entrant, rung = following
                trial = self.trials[entrant.number]
                if not trial.steps:
                    self._find_steps(trial, worker)
                    continue
                entrant.state = State.running
                self._jobs[index] = trial, rung
                worker.send(TRAIN, self.words(trial, rung), self.log(trial))

    def _draw(self, number: int) -> None:
        """Draw configuration `number`."""
        values = self._values(number, self.study.ask)
        trial = self._add(Entrant(number, self.race.bracket_of(number)), values)
        try:
            load(self.words(trial, trial.rungs[0]))
        except ConfigError as error:
            self._fail(trial, redact_text(str(error)))

    def _values(self, number: int, ask: Callable[[], optuna.Trial]) -> dict[str, Any]:
        """The values of configuration `number`, which `ask` draws."""
        plan = self.plan
        first = self.race.brackets[0].count if plan.method is Method.hyperband else STARTUP
        self.study.sampler = sampling.sampler_for(plan.sampler, number, first, plan.space, plan.seed)
        drawn = ask()
        assert drawn.number == number
        return sampling.suggest(drawn, plan.space)

    def _find_steps(self, trial: Trial, worker: SweepWorker) -> None:
        """Read the data as `trial` would, to know how many steps a run takes."""
        worker.send(PLAN, self.words(trial, 1), self.log(trial))
        while not select.select([worker], [], [], REFRESH)[0]:
            with SIGNALS.interruptible():
                pass
        answer = worker.receive()
        if reason := answer.get("error"):
            self._fail_or_end(trial, reason, answer["kind"])
            return
        self._steps[_length_key(trial)] = answer["steps"]
        self.study.set_user_attr("steps", self._steps)
        before = self.race.brackets[trial.entrant.bracket].rungs
        self._measure(trial)
        rungs = self.race.brackets[trial.entrant.bracket].rungs
        if rungs != before:
            steps = ", ".join(str(trial.step_of(rung)) for rung in rungs)
            self.tell(
                f"A run of {trial.steps} steps with train.eval_every={trial.every} is evaluated {trial.evaluations} "
                f"times, so configurations are compared after {steps} steps and not {len(before)} times. Lower "
                "train.eval_every for more."
            )

    def _wait(self, look: Callable[[], None]) -> None:
        """Wait for a result, or a second."""
        look()
        busy = {worker: index for index, worker in enumerate(self.workers) if worker.busy}
        if not busy:
            return
        with SIGNALS.interruptible():
            ready, _, _ = select.select(list(busy), [], [], REFRESH)
        for worker in ready:
            answer = worker.receive()
            trial, rung = self._jobs.pop(busy[worker])
            if "stopped" in answer:  # by somebody else
                trial.entrant.state = State.paused if trial.entrant.losses else State.waiting
            elif reason := answer.get("error"):
                self._fail_or_end(trial, reason, answer["kind"])
            else:
                self._reach(trial, rung)
            look()

    def _reach(self, trial: Trial, rung: int) -> None:
        """`trial` has come to `rung`: record its loss there, and stop the configurations that this rules out."""
        last = trial.step_of(rung)
        losses = [loss for step, loss in trial.curve() if step <= last]
        if not losses:
            self._fail(trial, f"its run was not evaluated up to step {last}")
            return
        loss = min(losses) if self.config.run.export is Export.best else losses[-1]
        entrant = trial.entrant
        self.storage.set_trial_intermediate_value(self._id(trial), rung, loss)
        stopped = self.race.reach(entrant, rung, loss)
        self.tell(
            f"trial {entrant.number} ({trial.title}): held-out loss {loss:.4f} after {last} of {trial.steps} steps"
        )
        if entrant.state is State.done:
            self._tell_end(trial, State.done)
            self._clean(trial)
        self._end_all(stopped)

    def _end_all(self, entrants: Sequence[Entrant]) -> None:
        for entrant in entrants:
            trial = self.trials[entrant.number]
            self._tell_end(trial, State.stopped)
            self._clean(trial)
        if entrants:
            numbers = ", ".join(str(entrant.number) for entrant in entrants)
            self.tell(f"stopped: {numbers}")

    def _tell_end(self, trial: Trial, state: State) -> None:
        """Record in the study that a trial is over."""
        trial.entrant.state = state
        if state is State.done:
            self.study.tell(trial.entrant.number, trial.entrant.loss)
        else:
            ended = TrialState.PRUNED if state is State.stopped else TrialState.FAIL
            self.study.tell(trial.entrant.number, state=ended)

    def _fail_or_end(self, trial: Trial, reason: str, kind: str) -> None:
        has_trained = bool(trial.entrant.losses)
        if error := END_SWEEP.get(kind) or (ConfigError if has_trained and kind == ConfigError.__name__ else None):
            raise error(reason)
        self._fail(trial, reason)

    def _fail(self, trial: Trial, reason: str) -> None:
        self.storage.set_trial_user_attr(self._id(trial), "reason", reason)
        stopped = self.race.fail(trial.entrant, reason)
        self._tell_end(trial, State.failed)
        self.tell(f"trial {trial.entrant.number} ({trial.title}) failed: {reason}")
        self._end_all(stopped)

    def _clean(self, trial: Trial) -> None:
        """Remove the checkpoints of a trial that was stopped: it does not go on."""
        if trial.entrant.state is State.stopped and not (trial.folder / RESULT).exists():
            shutil.rmtree(trial.folder / CHECKPOINTS, ignore_errors=True)

    def _save_all(self) -> str:
        """Have all runs save their state. Returns what was saved."""
        busy = [worker for worker in self.workers if worker.busy]
        for worker in busy:
            worker.interrupt()
        for worker in busy:
            worker.receive()
        saved = f"{len(busy)} run{'s' * (len(busy) != 1)} saved in {self.folder}. " if busy else ""
        return f"{saved}The same command goes on."

    def _prunes(self, entrant: Entrant) -> bool:
        """Whether Optuna's pruner stops `entrant`."""
        frozen = self.storage.get_trial(self._id(self.trials[entrant.number]))
        return self.study.pruner.prune(self.study, frozen)

    def _id(self, trial: Trial) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(
            self.storage.get_study_id_from_name(self.study.study_name), trial.entrant.number
        )

    def _last_rung(self, trial: Trial) -> int:
        return self.race.brackets[trial.entrant.bracket].rungs[-1]

    def log(self, trial: Trial) -> Path:
        return self.folder / f"{trial.folder.name}.log"

    def words(self, trial: Trial, rung: int | None = None) -> list[str]:
        """The words of a command line that trains `trial`, up to `rung` (None: to its end)."""
        name, wandb = self.config.run.name, self.config.tracking.wandb
        quoted = str(trial.folder).replace("\\", "\\\\").replace("'", "\\'")
        words = [*self.overrides, *(one.override(trial.values[one.key]) for one in self.plan.space)]
        words += [f"train.eval_every={self.config.train.eval_every or trial.every}"]
        if rung is not None:
            words += [
                f"run.dir='{quoted}'",
                "run.resume=auto",
                f"run.name='{name}-{trial.entrant.number}'",
                "run.gpus=1",
                "tracking.display=plain",
            ]
            group = wandb.group or self.folder.name
            words.append(f"tracking.wandb.group='{group}'")
            if rung < self._last_rung(trial) and trial.steps:
                # Nobody needs the answers of a run that may be stopped.
                words += [f"train.pause_after={trial.step_of(rung)}", "data.questions.path=null"]
        return words

    def winner(self) -> Trial | None:
        found = self.race.winner()
        return None if found is None else self.trials[found.number]

    def ranking(self) -> list[Trial]:
        return [self.trials[entrant.number] for entrant in self.race.ranking()]

    def used(self) -> Used:
        """Energy and time of all runs so far."""
        return reduce(Used.plus, (Used.read(trial.folder) for trial in self.trials), Used())

    @property
    def runs(self) -> float:
        """What was trained so far, in whole runs."""
        return sum(trial.step_of(trial.entrant.reached) / trial.steps for trial in self.trials if trial.entrant.losses)


def _length_key(trial: Trial) -> str:
    """What the length of a run may depend on, such as train.global_batch_size."""
    return json.dumps({key: value for key, value in trial.values.items() if key.startswith("train.")})


PRUNERS = (Method.asha, Method.median)


def refuse(config: Config) -> None:
    """Raise ConfigError with each reason why this recipe cannot be swept."""
    problems = []
    train = config.train
    if not config.data.eval_fraction and not config.data.eval_sources:
        problems.append(
            "nothing is held out, and configurations are compared by the held-out loss: set data.eval_fraction=0.05 "
            "or data.eval_sources"
        )
    if train.stop.patience:
        problems.append(
            "train.stop.patience: the sweep stops the losers itself. Leave it out, and add it to the recipe that wins"
        )
    for key, value in (("max_minutes", train.max_minutes), ("eval_share", train.eval_share)):
        if value is not None:
            problems.append(f"train.{key} depends on the clock, and configurations are compared after the same steps")
    if train.pause_after is not None:
        problems.append("train.pause_after: the sweep decides when its runs pause")
    if config.run.gpus not in ("auto", "1"):
        problems.append(f"run.gpus={config.run.gpus}: each run of a sweep has one card. --workers says how many run")
    degrees = ((name, getattr(config.parallel, name)) for name in DEGREES)
    several = [f"parallel.{name}={value}" for name, value in degrees if value not in (AUTO, "1")]
    for asked in (*several, *config.parallel.summed_otherwise):
        problems.append(f"{asked}: each run of a sweep has one card. Leave it out, and add it to the recipe that wins")
    if problems:
        raise ConfigError("This recipe cannot be swept as it is:\n" + "\n".join(f"  {line}" for line in problems))
