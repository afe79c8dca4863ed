"""`fxtune sweep`: searches for good hyper-parameters, and stops bad configurations early.

    fxtune sweep +recipe=quickstart data.eval_fraction=0.1 sweep.lr='loguniform(1e-3,2e-2)' sweep.r='choice(8,16,32)'
    fxtune sweep ... --method hyperband                  # several brackets, with early rungs and late rungs
    fxtune sweep ... --trials 16 --eta 4 --workers 2     # one of four goes on at a rung; two runs at a time

sweep.KEY takes loguniform(LOW,HIGH), uniform(LOW,HIGH) or choice(A,B,C). KEY may be shortened to the end of its name.
Each configuration trains up to a rung (a share of its run), writes a checkpoint and pauses. The best 1/eta go on with
the same bits, at the learning rate of the whole run. The others are stopped. Eight configurations cost 2.5 runs.

methods: halving (the default), hyperband, asha and median (Optuna's pruners, which judge a configuration by earlier
configurations), none (each configuration runs to its end). Each of several GPUs trains another configuration.

The sweep's folder is runs/NAME_sweep, or run.dir: a run for each configuration, optuna.db for optuna-dashboard,
sweep.json and curves.svg. The sweep ends with the winner's recipe, recipes/NAME_swept.yaml. After a kill the same
command goes on.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Optional

import torch

from fxtune import __version__
from fxtune.checkpoint.run_folder import write_json
from fxtune.cli.answer import ANSWER
from fxtune.cli.sweep_results import FILE
from fxtune.config import discovery
from fxtune.config.compose import load
from fxtune.config.root import Config
from fxtune.config.validate import OUTPUT_KEYS
from fxtune.errors import ConfigError
from fxtune.reports.plots import Series, plot
from fxtune.system import console, progress
from fxtune.system.atomic_files import replace_text
from fxtune.system.console import say
from fxtune.system.redact import redact_arguments
from fxtune.system.threads import VARIABLES, share
from fxtune.tracking.tracker import DisplayKind
from fxtune.training.run_energy import Used, sentence
from fxtune.tuning import recipe_writer, sampling, sweep_space
from fxtune.tuning.race import EntrantState, hyperband
from fxtune.tuning.sampling import Sampler
from fxtune.tuning.sweep import THREADS, Method, Sweep, SweepPlan, Trial, refuse, shown
from fxtune.tuning.sweep_space import Dimension

TRIALS, ETA, MOST_RUNGS = 8, 2, 5
CURVES = "curves.svg"


def run(
    config: Config,
    overrides: Sequence[str],
    space: Sequence[str],
    trials: Optional[int] = None,
    method: str = Method.halving.value,
    eta: int = ETA,
    rungs: Optional[int] = None,
    sampler: Optional[str] = None,
    seed: int = 0,
    workers: Optional[int] = None,
    output: Optional[str] = None,
) -> None:
    """Race, print the table, write the recipe of the winner. `overrides`: the recipe and keys as typed. `space`: the
    words that begin with `sweep.`.

    Raises ConfigError for a bad option or if nothing runs, StorageError for a file that cannot be written.
    """
    dimensions = sweep_space.parse(space)
    if not dimensions:
        raise ConfigError("nothing is swept: add sweep.KEY=VALUES, as in sweep.lr='loguniform(1e-4,2e-3)'")
    typed = recipe_writer.choices(list(overrides))
    if any(choice.sweeps for choice in typed):
        raise ConfigError("sweep draws values itself, so a key takes one value: leave -m out, and write sweep.KEY=A,B")
    for dimension in dimensions:
        if any(choice.key == dimension.key for choice in typed):
            raise ConfigError(
                f"`{dimension.key}` has a value and is swept: leave out `{dimension.key}=...` or "
                f"`{sweep_space.PREFIX}{dimension.key}=...`"
            )
    refuse(config)
    plan = plan_of(dimensions, trials, Method(method), eta, rungs, sampler, seed)
    path = recipe_writer.output_path(list(overrides), config.run.name, output, "swept")
    folder = Path(os.path.expanduser(config.run.dir)) if config.run.dir else Path("runs") / f"{config.run.name}_sweep"

    def tell(text: str) -> None:
        say(text)
        write_json(folder / FILE, results(sweep))

    sweep = Sweep(config, overrides, plan, folder, environments(config, workers), tell)
    with sweep.opened():
        cost = sum(bracket.cost for bracket in plan.brackets()) / plan.parts
        say(f"{plan.trials} configurations, {method}, for {cost:.3g} whole runs: {folder}")
        with _shown(sweep, config.tracking.display) as look:
            sweep.run(look)
        best = sweep.winner()
        say(table(sweep))
        _write_curves(sweep)
        found = results(sweep)
        write_json(folder / FILE, found)
        ANSWER.put(found)
        if best is None:
            raise ConfigError(f"No configuration ran to its end; `runs` in {folder / FILE} says why for each")
        recipe_writer.write(path, header(sweep, best, path), list(overrides), winning_config(sweep, best))
    say(f"The best is trial {best.entrant.number}: {best.title}, held-out loss {best.entrant.loss:.4f}: {best.folder}")
    if line := sentence(sweep.used().figures(0, config.tracking.cost)):
        say(line)
    say(f"The recipe is {path}: fxtune +recipe={_name(path)}. The curves are in {folder / CURVES}.")


def plan_of(
    dimensions: Sequence[Dimension],
    trials: Optional[int],
    method: Method,
    eta: int,
    rungs: Optional[int],
    sampler: Optional[str],
    seed: int,
) -> SweepPlan:
    """The plan that the options ask for, with defaults for options that were not given."""
    if rungs is None:
        rungs = min(MOST_RUNGS, 1 + int(math.log(trials or TRIALS, eta) + 1e-9)) if method is Method.halving else 4
        rungs = 1 if method is Method.none else max(rungs, 2)
    parts = eta ** (rungs - 1)
    if trials is None:
        trials = TRIALS
        if method is Method.hyperband:
            trials = sum(bracket.count for bracket in hyperband(eta, parts))
    trials = int(min(trials, sampling.combinations(dimensions)))
    learns = method is not Method.halving
    chosen = Sampler(sampler) if sampler else Sampler.tpe if learns else Sampler.spread
    return SweepPlan(tuple(dimensions), method, trials, parts, eta, chosen, seed)


def environments(config: Config, workers: Optional[int]) -> list[dict[str, str]]:
    """Environment variables for each process that trains: its card or, on the CPU, its share of the threads."""
    if torch.cuda.is_available() and config.run.device.value != "cpu":
        cards = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        cards = cards or [str(index) for index in range(torch.cuda.device_count())]
        if workers is not None and workers > len(cards):
            raise ConfigError(
                f"--workers {workers}, but there are {len(cards)} GPUs, and each worker needs a GPU. "
                f"Set --workers {len(cards)} or less"
            )
        return [{"CUDA_VISIBLE_DEVICES": card} for card in cards[:workers]]
    workers = workers or 1
    if os.environ.keys() & VARIABLES:
        return [{} for _ in range(workers)]
    return [{THREADS: str(share(torch.get_num_threads(), workers))} for _ in range(workers)]


@contextmanager
def _shown(sweep: Sweep, kind: DisplayKind) -> Iterator[Any]:
    """Show the race: a live table on a terminal, lines elsewhere. Yields a function to call each second."""
    live, total = None, sum(bracket.cost for bracket in sweep.plan.brackets()) / sweep.plan.parts
    if kind in (DisplayKind.auto, DisplayKind.rich) and console.is_live():
        progress.hide()
        live = progress.live_region(lambda: table(sweep), transient=True)
    try:
        with progress.phase("The race", total, "whole runs", announce=False) as work:

            def look() -> None:
                work.done = sweep.runs

            yield look
    finally:
        progress.end_region(live)


def table(sweep: Sweep) -> Any:
    """The race: the farthest first, then the lowest loss."""
    rows = []
    for trial in sweep.ranking():
        entrant = trial.entrant
        steps = trial.step() if entrant.state is EntrantState.running else trial.step_of(entrant.reached)
        state = entrant.state.value + (f": {entrant.reason.strip().splitlines()[0]}" if entrant.reason else "")
        loss = f"{entrant.loss:.4f}" if entrant.losses else ""
        values = [shown(value) for value in trial.values.values()]
        rows.append([str(entrant.number), *values, f"{steps}/{trial.steps}" if trial.steps else "", loss, state])
    keys = [dimension.key.removeprefix("techniques.") for dimension in sweep.plan.space]
    title = f"Sweep of {sweep.plan.trials} configurations, {sweep.plan.method.value}; {sweep.runs:.3g} whole runs"
    return console.table(title, ["trial", *keys, "steps", "held-out loss", ""], rows)


def results(sweep: Sweep) -> dict[str, Any]:
    """The content of sweep.json: the plan, and each configuration, best first."""
    best = sweep.winner()
    rows = []
    for trial in sweep.ranking():
        entrant = trial.entrant
        rows.append(
            {
                "trial": entrant.number,
                "values": trial.values,
                "state": entrant.state.value,
                "loss": entrant.loss if entrant.losses else None,
                "losses": {str(trial.step_of(rung)): loss for rung, loss in entrant.losses.items()},
                "steps": trial.steps,
                "energy": Used.read(trial.folder).figures(0, sweep.config.tracking.cost),
                "folder": str(trial.folder),
                "error": entrant.reason or None,
            }
        )
    return {
        "sweep": sweep.plan.saved(),
        "whole_runs": sweep.runs,
        "energy": sweep.used().figures(0, sweep.config.tracking.cost),
        "winner": None if best is None else best.entrant.number,
        "runs": rows,
    }


def _write_curves(sweep: Sweep) -> None:
    best, curves = sweep.winner(), []
    for trial in sweep.trials:
        if points := trial.curve():
            share = [(step / max(trial.steps, 1), loss) for step, loss in points]
            curves.append(Series(f"trial {trial.entrant.number}: {trial.title}", share, thick=trial is best))
    title = f"{sweep.config.run.name}: held-out loss of each configuration"
    text = plot(title, curves, "share of the run", sweep.config.objective.unit, percent=True)
    replace_text(sweep.folder / CURVES, text)


def winning_config(sweep: Sweep, best: Trial) -> Config:
    """The config of the winner's run, without the names and folders that the sweep gave the run."""
    return load([word for word in sweep.words(best) if word.partition("=")[0].lstrip("+") not in OUTPUT_KEYS])


def header(sweep: Sweep, best: Trial, path: Path) -> list[str]:
    """The comment at the top of the recipe: its purpose, its command and the measurements."""
    plan, entrant = sweep.plan, best.entrant
    words = [f"{sweep_space.PREFIX}{dimension.key}={dimension.text}" for dimension in plan.space]
    asked = ["--method", plan.method.value, "--trials", str(plan.trials), "--seed", str(plan.seed)]
    command = shlex.join([*redact_arguments(list(sweep.overrides)), *words, *asked])
    done = sum(trial.entrant.state is EntrantState.done for trial in sweep.trials)
    return [
        f"{sweep.config.run.name} with the lowest held-out loss of {len(sweep.trials)} configurations",
        "",
        f"  python -m fxtune +recipe={_name(path)}",
        "",
        f"{recipe_writer.MARK.removeprefix('# ')}sweep {command} ({date.today()}, fxtune {__version__})",
        f"Values: {best.title}.",
        f"Measured: held-out loss {entrant.loss:.4f} after {best.steps} steps; {done} of {len(sweep.trials)} ran to "
        f"their end, for {sweep.runs:.3g} whole runs in all.",
    ]


def _name(path: Path) -> str:
    return path.stem if path.parent.resolve() == discovery.LOCAL.resolve() else str(path)
