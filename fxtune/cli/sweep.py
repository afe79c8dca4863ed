"""`fxtune sweep`: searches for good hyper-parameters, and stops bad configurations early.

    fxtune sweep +recipe=quickstart data.eval_fraction=0.1 sweep.lr='loguniform(1e-3,2e-2)' sweep.r='choice(8,16,32)'
    fxtune sweep ... --trials 16 --workers 2             # sixteen configurations; two runs at a time
    fxtune sweep ... --method median                     # another way to find the losers

sweep.KEY takes loguniform(LOW,HIGH), uniform(LOW,HIGH) or choice(A,B,C). KEY may be shortened to the end of its name.
Optuna draws the first eight configurations at random, and later ones where losses were low. After each eighth of a
run, Optuna's pruner may stop it.

methods: halving (the default: successive halving; at 1/8 and 3/8 of a run the best third goes on), hyperband (several
brackets of halving), median (configurations below the median loss go on), none (each configuration runs to its end).
With several GPUs, each GPU trains a different configuration. With --max-kl 0.05 no configuration wins that has moved
further from its base, in nats a token of general text (docs/forgetting.md).

The sweep's folder is runs/NAME_sweep, or run.dir. It holds a run for each configuration, optuna.db for
optuna-dashboard, sweep.json and curves.svg. At its end the sweep writes the winner's recipe, recipes/NAME_swept.yaml.
After a kill the same command goes on. With more --trials it draws more configurations.
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
from fxtune.reports.charts import Series, plot
from fxtune.system.files.atomic_files import replace_text
from fxtune.system.process.threads import VARIABLES, share
from fxtune.system.terminal import console, progress
from fxtune.system.terminal.console import say
from fxtune.system.terminal.redact import redact_arguments
from fxtune.tracking.tracker import DisplayKind
from fxtune.training.monitors.energy import Used, sentence
from fxtune.tuning import recipe_writer, sweep_space
from fxtune.tuning.sweep import Method, State, Sweep, Trial, shown

TRIALS = 8
CURVES = "curves.svg"
ENDED = (State.stopped, State.done, State.failed)


def run(
    config: Config,
    overrides: Sequence[str],
    space: Sequence[str],
    trials: int = TRIALS,
    method: str = Method.halving.value,
    workers: Optional[int] = None,
    output: Optional[str] = None,
    max_kl: float = math.inf,
) -> None:
    """Run the sweep, print the table, and write the winner's recipe. `overrides`: the recipe and keys as typed.
    `space`: the words that begin with `sweep.`.

    Raises ConfigError for a bad option or if no configuration ends, StorageError for a file that cannot be written.
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
    sweep_space.refuse(config, max_kl)
    path = recipe_writer.output_path(list(overrides), config.run.name, output, "swept")
    folder = Path(os.path.expanduser(config.run.dir)) if config.run.dir else Path("runs") / f"{config.run.name}_sweep"

    def tell(text: str) -> None:
        say(text)
        write_json(folder / FILE, results(sweep))

    cards = environments(config, workers)
    sweep = Sweep(config, overrides, dimensions, Method(method), trials, folder, cards, tell, max_kl)
    with sweep.opened():
        say(f"{sweep.count} configurations, {method}: {folder}")
        with _shown(sweep, config.tracking.display) as look:
            sweep.run(look)
        best = sweep.winner()
        say(table(sweep))
        curves = [
            Series(
                f"trial {trial.number}: {trial.title}",
                [(step / max(trial.steps, 1), loss) for step, loss in points],
                thick=trial is best,
            )
            for trial in sweep.trials
            if (points := trial.curve())
        ]
        title = f"{config.run.name}: held-out loss of each configuration"
        text = plot(title, curves, "share of the run", config.objective.unit, percent=True)
        replace_text(folder / CURVES, text)
        found = results(sweep)
        write_json(folder / FILE, found)
        ANSWER.put(found)
        if best is None and (moved := {trial.kl: trial for trial in sweep.trials if trial.kl is not None}):
            nearest = moved[min(moved)]
            raise ConfigError(
                f"No configuration stays within --max-kl {max_kl:g} of its base. The nearest is trial "
                f"{nearest.number} ({nearest.title}), with a KL of {nearest.kl:.3g}. Add general rows to "
                "data.sources, sweep smaller rates, raise --max-kl, or give --method none, which ends no run early"
            )
        if best is None:
            raise ConfigError(f"No configuration ran to its end; `runs` in {folder / FILE} says why for each")
        # The config of the winner's run, without what the sweep or its command set for the output of the run.
        won = load([word for word in sweep.choices(best) if word.partition("=")[0].lstrip("+") not in OUTPUT_KEYS])
        recipe_writer.write(path, header(sweep, best, path), list(overrides), won)
    moved_by = "" if best.kl is None else f", KL from the base on general text {best.kl:.3f}"
    say(f"The best is trial {best.number}: {best.title}, held-out loss {best.loss:.4f}{moved_by}: {best.folder}")
    if line := sentence(sweep.used().figures(0, config.tracking.cost)):
        say(line)
    say(f"The recipe is {path}: fxtune +recipe={discovery.name_of(path)}. The curves are in {folder / CURVES}.")


def environments(config: Config, workers: Optional[int]) -> list[dict[str, str]]:
    """The environment variables of each training process: its card, or on the CPU its share of the threads."""
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
    return [{"OMP_NUM_THREADS": str(share(torch.get_num_threads(), workers))} for _ in range(workers)]


@contextmanager
def _shown(sweep: Sweep, kind: DisplayKind) -> Iterator[Any]:
    """Show the sweep while it runs: a live table on a terminal, lines elsewhere. Yields a function that updates the
    display, to be called again and again."""
    live = None
    if kind in (DisplayKind.auto, DisplayKind.rich) and console.is_live():
        progress.hide()
        live = progress.live_region(lambda: table(sweep), transient=True)
    try:
        with progress.phase("The sweep", sweep.count, "configurations", announce=False) as work:

            def look() -> None:
                work.done = sum(trial.state in ENDED for trial in sweep.trials)

            yield look
    finally:
        progress.end_region(live)


def table(sweep: Sweep) -> Any:
    """The table of configurations: finished runs first, then longer runs, then lower losses. Failed runs are last."""
    rows = []
    for trial in sweep.ranking():
        state = trial.state.value + (f": {trial.reason.strip().splitlines()[0]}" if trial.reason else "")
        loss = f"{trial.loss:.4f}" if trial.losses else ""
        values = [shown(value) for value in trial.values.values()]
        steps = f"{trial.step()}/{trial.steps}" if trial.steps else ""
        kl = "" if trial.kl is None else f"{trial.kl:.3f}" + " (too far)" * (not sweep.keeps(trial))
        rows.append([str(trial.number), *values, steps, loss, kl, state])
    keys = [dimension.key.removeprefix("techniques.") for dimension in sweep.space]
    title = f"Sweep of {sweep.count} configurations, {sweep.method.value}; {sweep.runs:.3g} whole runs"
    return console.table(title, ["trial", *keys, "steps", "held-out loss", "KL from the base", ""], rows)


def results(sweep: Sweep) -> dict[str, Any]:
    """The content of sweep.json: the plan, and all configurations with the best one first."""
    best, cost = sweep.winner(), sweep.config.tracking.cost
    rows = [
        {
            "trial": trial.number,
            "values": trial.values,
            "state": trial.state.value,
            "loss": trial.loss if trial.losses else None,
            "losses": dict(trial.curve()),
            "kl": trial.kl,
            "steps": trial.steps,
            "energy": Used.read(trial.folder).figures(0, cost),
            "folder": str(trial.folder),
            "error": trial.reason or None,
        }
        for trial in sweep.ranking()
    ]
    space = {dimension.key: dimension.text for dimension in sweep.space}
    return {
        "sweep": {"space": space, "method": sweep.method.value, "trials": sweep.count},
        "whole_runs": sweep.runs,
        "energy": sweep.used().figures(0, cost),
        "winner": None if best is None else best.number,
        "runs": rows,
    }


def header(sweep: Sweep, best: Trial, path: Path) -> list[str]:
    """The comment at the top of the recipe: its purpose, its command and the measurements."""
    words = [f"{sweep_space.PREFIX}{dimension.key}={dimension.text}" for dimension in sweep.space]
    asked = ["--method", sweep.method.value, "--trials", str(sweep.count)]
    asked += ["--max-kl", f"{sweep.max_kl:g}"] * (sweep.max_kl < math.inf)
    command = shlex.join([*redact_arguments(list(sweep.overrides)), *words, *asked])
    done = sum(trial.state is State.done for trial in sweep.trials)
    return [
        f"{sweep.config.run.name} with the lowest held-out loss of {len(sweep.trials)} configurations",
        "",
        f"  python -m fxtune +recipe={discovery.name_of(path)}",
        "",
        f"{recipe_writer.MARK.removeprefix('# ')}sweep {command} ({date.today()}, fxtune {__version__})",
        f"Values: {best.title}.",
        f"Measured: held-out loss {best.loss:.4f} after {best.steps} steps; {done} of {len(sweep.trials)} ran to "
        f"their end, for {sweep.runs:.3g} whole runs in all.",
    ]
