"""The engine of `fxtune sweep`: runs the race of the configurations on the cards, and keeps it in a folder.

    FOLDER/sweep.yaml      the plan of the sweep; the same command goes on, a command with another plan is refused
    FOLDER/optuna.db       the study of Optuna: drawn values, losses at the rungs, verdicts (optuna-dashboard reads it)
    FOLDER/trial-N/        the run of configuration N, as any other run: config, metrics, checkpoints, result
    FOLDER/trial-N.log     what the run printed

train.pause_after pauses a run. The run goes on with the same bits, at the learning rate of the whole run. Optuna's
storage and the run folders are the state of a sweep, so a killed sweep goes on where it was.
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
from fxtune.tuning.race import Entrant, EntrantState, Race
from fxtune.tuning.sampling import Sampler
from fxtune.tuning.sweep_space import Dimension
from fxtune.tuning.sweep_worker import PLAN, TRAIN, SweepWorker
from fxtune.upstream.optuna import trial_of

SETTINGS, STUDY = "sweep.yaml", "optuna.db"
THREADS = "OMP_NUM_THREADS"
"""The environment variable that gives a process of a sweep its number of CPU threads."""
TAIL = 8192
"""Bytes at the end of a metrics.jsonl in which its last line fits."""
REFRESH = 1.0
"""Seconds between two calls of `look`."""
STARTUP = 8
"""Configurations spread evenly before TPE takes over. With Hyperband: the configurations of the first bracket."""
END_SWEEP = {error.__name__: error for error in (StorageError, DataError)}
"""Errors that a configuration did not cause. They end the sweep; the same command goes on once they are mended.
A ConfigError ends the sweep too, if the configuration has trained before: then its data or packages have changed."""


class Method(str, Enum):
    halving = "halving"
    hyperband = "hyperband"
    asha = "asha"
    median = "median"
    none = "none"


@dataclass(frozen=True)
class SweepPlan:
    """The swept keys, the number of configurations, and the rules of the race."""

    space: tuple[Dimension, ...]
    method: Method
    trials: int
    """Number of configurations."""
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
        """Optuna's pruner of asha and median; for other methods a pruner that stops nothing."""
        if self.method is Method.asha:
            return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=self.eta)
        if self.method is Method.median:
            return optuna.pruners.MedianPruner(n_startup_trials=3)
        return optuna.pruners.NopPruner()

    def saved(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("trials", "parts", "eta", "seed")}
        return {
            "space": {dimension.key: dimension.text for dimension in self.space},
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
    """Steps of the whole run; 0 before they are known."""
    parts: int = 1
    """Rung r is near r / parts of the run."""
    rungs: tuple[int, ...] = ()
    """All rungs of its bracket, also rungs at which the run has no evaluation."""
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
        """The step at which `rung` is judged: the evaluation nearest to the rung's share of the run.

        Two rungs share no evaluation: a rung's evaluation comes after the evaluation of the rung before. With fewer
        evaluations than rungs, the last rungs get one evaluation each.
        """
        evaluation = 0
        for index, earlier in enumerate(self.rungs[:-1]):
            latest = self.evaluations - (len(self.rungs) - 1 - index)
            nearest = round(earlier * self.steps / (self.parts * self.every))
            evaluation = max(1, min(latest, max(evaluation + 1, nearest)))
            if earlier == rung:
                return min(self.steps, evaluation * self.every)
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
    """A sweep in `folder`. `overrides`: the recipe and keys as typed, without the swept keys."""

    def __init__(
        self,
        config: Config,
        overrides: Sequence[str],
        plan: SweepPlan,
        folder: Path,
        environments: Sequence[Mapping[str, str]],
        tell: Callable[[str], None],
    ) -> None:
        """`environments`: environment variables, for each process that trains. `tell` gets a line for each event."""
        self.config, self.plan, self.folder, self.tell = config, plan, folder, tell
        self.overrides = [word for word in overrides if not word.lstrip("+").startswith("run.dir=")]
        self.environments = environments
        self.trials: list[Trial] = []
        self.race = Race(plan.brackets(), plan.eta, self._prunes if plan.method in PRUNERS else None)
        self._steps: dict[str, int] = {}
        """The swept values of `train` -> the steps of a run."""
        self._jobs: dict[int, tuple[Trial, int]] = {}
        """Index of a busy worker -> (its trial, the rung to which the trial runs)."""
        self.workers: list[SweepWorker] = []

    @contextmanager
    def opened(self) -> Iterator[Sweep]:
        """Lock the folder, and read its study or begin a study. Raises ConfigError if the folder has another sweep."""
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
        """Write sweep.yaml. If the folder has one, compare it with this sweep."""
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
        states = {
            TrialState.COMPLETE: EntrantState.done,
            TrialState.PRUNED: EntrantState.stopped,
            TrialState.FAIL: EntrantState.failed,
        }
        self._steps = dict(self.study.user_attrs.get("steps", {}))
        for frozen in self.study.get_trials(deepcopy=False):
            values = frozen.params
            if frozen.state is TrialState.RUNNING:  # the sweep may have been killed as it drew the values
                values = self._values(frozen.number, partial(trial_of, self.study, frozen))
            entrant = Entrant(frozen.number, self.race.bracket_of(frozen.number))
            entrant.losses = dict(frozen.intermediate_values)
            entrant.reason = frozen.user_attrs.get("reason", "")
            entrant.state = states.get(frozen.state, EntrantState.paused if entrant.losses else EntrantState.waiting)
            self._add(entrant, values)
        for trial in self.trials:  # the sweep was killed between the loss and the end of a trial
            if trial.entrant.state is EntrantState.paused and trial.entrant.reached == self._last_rung(trial):
                self._tell_end(trial, EntrantState.done)
        for entrant in self.race.judge_all():
            self._tell_end(self.trials[entrant.number], EntrantState.stopped)
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
        """Set the steps of the run and its evaluations, if the steps are known."""
        trial.steps = self._steps.get(_length_key(trial), 0)
        trial.every = self.config.train.eval_every or max(1, -(-trial.steps // self.plan.parts))
        if trial.steps:
            self.race.limit_rungs(trial.entrant.bracket, trial.evaluations)

    def run(self, look: Callable[[], None]) -> None:
        """Race until it is over. `look` is called each second.

        Raises Stopped once all runs are saved, an error of END_SWEEP, and ConfigError if every configuration fails.
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
        failed = [trial for trial in self.trials if trial.entrant.state is EntrantState.failed]
        if len(failed) == len(self.trials):
            raise ConfigError(f"Every configuration failed. The first of them: {failed[0].entrant.reason}")

    def _with_the_same_threads(self) -> list[Mapping[str, str]]:
        """The environments, with as many CPU threads as at the sweep's first start, if this machine has the cores.

        Sums depend on the number of threads, and the same command may go on with another number of processes.
        """
        threads = self.environments[0].get(THREADS)
        if threads is None:  # a card, or the user has set it
            return list(self.environments)
        begun = str(self.study.user_attrs.get("threads", threads))
        self.study.set_user_attr("threads", begun)
        if int(begun) <= cores():
            threads = begun
        return [{**environment, THREADS: threads} for environment in self.environments]

    def _fill(self) -> None:
        """Give each idle worker a job, until the race has no job left."""
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
                entrant.state = EntrantState.running
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
        """The values of configuration `number`. `ask` draws them, as an Optuna trial."""
        plan = self.plan
        first = self.race.brackets[0].count if plan.method is Method.hyperband else STARTUP
        self.study.sampler = sampling.sampler_for(plan.sampler, number, first, plan.space, plan.seed)
        drawn = ask()
        assert drawn.number == number
        return sampling.suggest(drawn, plan.space)

    def _find_steps(self, trial: Trial, worker: SweepWorker) -> None:
        """Let `worker` read the data of `trial`, to know how many steps its run takes."""
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
        """Wait until a worker answers, for at most a second, and take the answers."""
        look()
        busy = {worker: index for index, worker in enumerate(self.workers) if worker.busy}
        if not busy:
            return
        with SIGNALS.interruptible():
            ready, _, _ = select.select(list(busy), [], [], REFRESH)
        for worker in ready:
            answer = worker.receive()
            trial, rung = self._jobs.pop(busy[worker])
            if "stopped" in answer:  # somebody else stopped the run
                trial.entrant.state = EntrantState.paused if trial.entrant.losses else EntrantState.waiting
            elif reason := answer.get("error"):
                self._fail_or_end(trial, reason, answer["kind"])
            else:
                self._reach(trial, rung)
            look()

    def _reach(self, trial: Trial, rung: int) -> None:
        """`trial` has come to `rung`: record its loss there, and stop the configurations that its loss rules out."""
        last = trial.step_of(rung)
        losses = [loss for step, loss in trial.curve() if step <= last]
        if not losses:
            self._fail(trial, f"metrics.jsonl of its run has no held-out loss up to step {last}")
            return
        loss = min(losses) if self.config.run.export is Export.best else losses[-1]
        entrant = trial.entrant
        self.storage.set_trial_intermediate_value(self._id(trial), rung, loss)
        stopped = self.race.report(entrant, rung, loss)
        self.tell(
            f"trial {entrant.number} ({trial.title}): held-out loss {loss:.4f} after {last} of {trial.steps} steps"
        )
        if entrant.state is EntrantState.done:
            self._tell_end(trial, EntrantState.done)
            self._clean(trial)
        self._end_all(stopped)

    def _end_all(self, entrants: Sequence[Entrant]) -> None:
        for entrant in entrants:
            trial = self.trials[entrant.number]
            self._tell_end(trial, EntrantState.stopped)
            self._clean(trial)
        if entrants:
            numbers = ", ".join(str(entrant.number) for entrant in entrants)
            self.tell(f"stopped: {numbers}")

    def _tell_end(self, trial: Trial, state: EntrantState) -> None:
        """Record in the study that a trial is over."""
        trial.entrant.state = state
        if state is EntrantState.done:
            self.study.tell(trial.entrant.number, trial.entrant.loss)
        else:
            ended = TrialState.PRUNED if state is EntrantState.stopped else TrialState.FAIL
            self.study.tell(trial.entrant.number, state=ended)

    def _fail_or_end(self, trial: Trial, reason: str, kind: str) -> None:
        has_trained = bool(trial.entrant.losses)
        if error := END_SWEEP.get(kind) or (ConfigError if has_trained and kind == ConfigError.__name__ else None):
            raise error(reason)
        self._fail(trial, reason)

    def _fail(self, trial: Trial, reason: str) -> None:
        self.storage.set_trial_user_attr(self._id(trial), "reason", reason)
        stopped = self.race.fail(trial.entrant, reason)
        self._tell_end(trial, EntrantState.failed)
        self.tell(f"trial {trial.entrant.number} ({trial.title}) failed: {reason}")
        self._end_all(stopped)

    def _clean(self, trial: Trial) -> None:
        """Remove the checkpoints of a stopped trial, which never goes on."""
        if trial.entrant.state is EntrantState.stopped and not (trial.folder / RESULT).exists():
            shutil.rmtree(trial.folder / CHECKPOINTS, ignore_errors=True)

    def _save_all(self) -> str:
        """Have all runs save their state. Returns a sentence about the saved runs."""
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
        """The words of a command line that trains `trial` up to `rung`; None: as a run of the winner by itself."""
        quoted = str(trial.folder).replace("\\", "\\\\").replace("'", "\\'")
        words = [*self.overrides, *(dimension.override(trial.values[dimension.key]) for dimension in self.plan.space)]
        words += [f"train.eval_every={self.config.train.eval_every or trial.every}"]
        if rung is not None:
            words += [
                f"run.dir='{quoted}'",
                "run.resume=auto",
                f"run.name='{self.config.run.name}-{trial.entrant.number}'",
                "run.gpus=1",
                "tracking.display=plain",
            ]
            words.append(f"tracking.wandb.group='{self.config.tracking.wandb.group or self.folder.name}'")
            if rung < self._last_rung(trial) and trial.steps:
                # The race does not read answers, and the run may be stopped.
                words += [f"train.pause_after={trial.step_of(rung)}", "data.questions.path=null"]
        return words

    def winner(self) -> Trial | None:
        entrant = self.race.winner()
        return None if entrant is None else self.trials[entrant.number]

    def ranking(self) -> list[Trial]:
        return [self.trials[entrant.number] for entrant in self.race.ranking()]

    def used(self) -> Used:
        """Energy and time of all runs so far."""
        return reduce(Used.plus, (Used.read(trial.folder) for trial in self.trials), Used())

    @property
    def runs(self) -> float:
        """Training so far, in whole runs."""
        return sum(trial.step_of(trial.entrant.reached) / trial.steps for trial in self.trials if trial.entrant.losses)


def _length_key(trial: Trial) -> str:
    """The swept values that the length of a run may depend on, such as train.global_batch_size, as text."""
    return json.dumps({key: value for key, value in trial.values.items() if key.startswith("train.")})


PRUNERS = (Method.asha, Method.median)


def refuse(config: Config) -> None:
    """Raise ConfigError with each reason why this recipe cannot be swept."""
    refusals = []
    train = config.train
    if not config.data.eval_fraction and not config.data.eval_sources:
        refusals.append(
            "nothing is held out, and configurations are compared by the held-out loss: set "
            "data.eval_fraction=0.05 or data.eval_sources"
        )
    if train.stop.patience:
        refusals.append(
            "train.stop.patience: the sweep stops configurations itself. Leave the key out, and add it to the recipe "
            "that wins"
        )
    for key, value in (("max_minutes", train.max_minutes), ("eval_share", train.eval_share)):
        if value is not None:
            refusals.append(
                f"train.{key} depends on the clock, and configurations are compared after the same steps: leave the "
                "key out"
            )
    if train.pause_after is not None:
        refusals.append("train.pause_after: the sweep decides when its runs pause. Leave the key out")
    if config.run.gpus not in ("auto", "1"):
        refusals.append(
            f"run.gpus={config.run.gpus}: each run of a sweep has one card. Leave the key out; --workers says how "
            "many runs train at once"
        )
    degrees = ((name, getattr(config.parallel, name)) for name in DEGREES)
    several = [f"parallel.{name}={value}" for name, value in degrees if value not in (AUTO, "1")]
    for asked in (*several, *config.parallel.summed_otherwise):
        refusals.append(f"{asked}: each run of a sweep has one card. Leave it out, and add it to the recipe that wins")
    if refusals:
        raise ConfigError("This recipe cannot be swept as it is:\n" + "\n".join(f"  {line}" for line in refusals))
