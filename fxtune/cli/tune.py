"""`fxtune tune`: searches for the fastest settings of a recipe on this machine, at the same loss.

    fxtune tune +recipe=quickstart                                  # short trials, then recipes/quickstart_tuned.yaml
    fxtune tune +recipe=quickstart --dry-run                        # which settings would be tried or not, and why
    fxtune tune +recipe=quickstart --axes micro_batch,checkpointing --minutes 10 --steps 5 --output recipes/fast.yaml

The search starts with the recipe as it is. It varies one axis at a time, from the best setting so far, until nothing
improves or the minutes are over. Settings that the memory forecast or a technique's check rules out are not tried; the
table says why. With several GPUs (run.gpus), each trial runs on all GPUs, and its figures count all GPUs.
"""

from __future__ import annotations

import multiprocessing
import shlex
import statistics
import textwrap
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, Optional

import torch

from fxtune import __version__
from fxtune.cli.answer import ANSWER
from fxtune.config import discovery
from fxtune.config.root import Config
from fxtune.errors import ConfigError, HardwareError, did_you_mean
from fxtune.system.machine.host import cache_home
from fxtune.system.terminal.console import say, table
from fxtune.system.terminal.redact import redact_arguments
from fxtune.system.terminal.units import GIB
from fxtune.tuning import recipe_writer
from fxtune.tuning.search import TOLERANCE, Search
from fxtune.tuning.search_space import AXES, Candidate, SearchContext, apply_deltas
from fxtune.tuning.trial import TrialCache

MINUTES = 30.0
STEPS = 8
REASON_WIDTH = 200
PACKAGES = ("torch", "transformers", "peft", "liger-kernel", "flash-attn-4", "bitsandbytes", "torchao")


def run(
    config: Config,
    overrides: Sequence[str],
    axes: Optional[str] = None,
    minutes: float = MINUTES,
    steps: int = STEPS,
    output: Optional[str] = None,
    dry_run: bool = False,
    again: bool = False,
) -> None:
    """Search, print the table, and write the recipe. `overrides`: the recipe and keys as typed.

    Raises ConfigError for a bad option, HardwareError if no setting runs, StorageError for a file that cannot be
    written.
    """
    names = list(AXES) if axes is None else list(filter(None, map(str.strip, axes.split(","))))
    for name in names:
        if name not in AXES:
            raise ConfigError(f"--axes {axes}: there is no axis `{name}`{did_you_mean(name, AXES)}")
    if not names:
        raise ConfigError(f"--axes names no axis. The axes: {', '.join(AXES)}.")
    names, typed = list(dict.fromkeys(names)), list(overrides)
    if any(choice.sweeps for choice in recipe_writer.choices(typed)):
        raise ConfigError(
            "tune tries values itself, so a key takes one value: leave -m out, and choose axes with --axes"
        )
    path = recipe_writer.output_path(typed, config.run.name, output)
    context = survey(typed, config, with_data=not dry_run)

    def tell(text: str) -> None:
        say(text)
        ANSWER.put(results(search))  # after every trial, so that a killed search keeps its results

    cache = TrialCache(cache_home() / "trials.json", again)
    search = Search(config, typed, context, names, minutes * 60, steps, cache, tell)
    if dry_run:
        rows = [
            [axis, candidate.title, _gib(candidate) and f"{_gib(candidate)} GiB", candidate.verdict or "a trial"]
            for axis, candidate in search.planned()
        ]
        say(table("What would be tried, from the recipe as it is", ["axis", "setting", "forecast", ""], rows))
        say(f"Nothing was run. The table has the values of the first round. The recipe would be {path}.")
        return
    try:
        search.run()
    except KeyboardInterrupt:
        say(results_table(search))
        say("Interrupted. The finished trials are kept: the same command continues from them.")
        raise
    say(results_table(search))
    if not search.best.speed:
        verdict = search.candidates[0].verdict
        raise HardwareError(
            f"No setting of these axes ({', '.join(names)}) runs here; the table says why. The recipe as it is: "
            f"{verdict}"
        )
    winner, why = search.winner()
    say(why)
    if search.untried:
        say(
            f"The {minutes:g} minutes are over. Not tried: {'; '.join(search.untried)}. The same command with more "
            "--minutes continues from here."
        )
    recipe_writer.write(path, header(search, winner, path), typed, apply_deltas(config, winner.deltas))
    say(f"The recipe is {path}: {_command(path)}")
    ANSWER.put(results(search, winner, why))


def survey(overrides: list[str], config: Config, with_data: bool) -> SearchContext:
    """The context of the search. On a GPU a separate process collects it, because CUDA keeps GPU memory in a process
    that has used it."""
    if not torch.cuda.is_available() or config.run.device.value == "cpu":
        return _survey_here(config, with_data)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_survey_there, overrides, with_data).result()


def _survey_there(overrides: list[str], with_data: bool) -> SearchContext:
    from fxtune.config.compose import load

    return _survey_here(load(overrides), with_data)


def _survey_here(config: Config, with_data: bool) -> SearchContext:
    """The context of the search. Refuses a recipe that cannot run as it is, and tokenizes the data for all trials."""
    from fxtune.diagnostics.parity import precision_of
    from fxtune.training.builder import RunBuilder

    builder = RunBuilder(config, ahead=True)
    context = SearchContext(builder.facts, precision_of(builder.facts), hf_config=builder.settled.hf_config)
    if not with_data:
        return context
    plan = builder.read()[1].training
    mean = max(int(plan.stream.segments.length.mean()), 1)
    return replace(context, facts=builder.facts, data=plan.fingerprint, document=1 << (mean - 1).bit_length())


def results_table(search: Search) -> Any:
    base = search.candidates[0].speed if search.candidates else 0.0
    ranked = sorted(search.candidates, key=lambda candidate: -candidate.speed)
    rows = [_result_row(candidate, base) for candidate in ranked]
    title = f"{len(rows)} settings, {search.steps} steps each; loss within {TOLERANCE[search.context.precision]:g}"
    return table(title, ["setting", "tokens/s", "speed", "peak GiB", "forecast", "loss off by", ""], rows)


def _result_row(candidate: Candidate, base: float) -> list[str]:
    speeds = candidate.speeds
    peak = max((result.peak for result in candidate.results), default=0.0)
    spread = f" ({min(speeds):,.0f} to {max(speeds):,.0f})" if len(speeds) > 1 else ""
    return [
        candidate.title,
        f"{statistics.median(speeds):,.0f}{spread}" if speeds else "",
        f"{candidate.speed / base:.2f}x" if candidate.speed and base else "",
        f"{peak:.2f}" if peak else "",
        _gib(candidate),
        "" if candidate.loss_error is None else f"{candidate.loss_error:.0e}",
        textwrap.shorten(candidate.verdict, REASON_WIDTH, placeholder=" ..."),
    ]


def header(search: Search, winner: Candidate, path: Path) -> list[str]:
    """The comment at the top of the recipe: its purpose, its command, the machine and the measurements."""
    facts, base, speeds = search.context.facts, search.candidates[0], winner.speeds
    count = sum(bool(candidate.speeds) for candidate in search.candidates)
    axes = [] if search.axes == list(AXES) else ["--axes", ",".join(search.axes)]
    packages = [f"{name} {facts.packages[name]}" for name in PACKAGES if name in facts.packages]
    times = f"one run of {search.steps} steps"
    if len(speeds) > 1:
        times = f"{min(speeds):,.0f} to {max(speeds):,.0f} in {len(speeds)} runs of {search.steps} steps"
    command = shlex.join([*redact_arguments(search.overrides), *axes])
    several = f"{facts.degrees.ranks} x " if facts.degrees.ranks > 1 else ""
    peak, gain = max(result.peak for result in winner.results), ""
    if winner is not base:
        gain = f"; {winner.speed / base.speed - 1:+.1%} against" if base.speed else "; no measurement of"
        gain += " the recipe as it was"
    return [
        f"{search.config.run.name}, the fastest of {count} measured setting{'s' if count != 1 else ''}"
        f"{'' if winner.deltas else ': as it was'}",
        "",
        f"  {_command(path)}",
        "",
        f"{recipe_writer.MARK.removeprefix('# ')}tune {command} ({date.today()})",
        f"Hardware: {several}{facts.device_name}, {facts.memory / GIB:.0f} GiB.",
        f"Packages: fxtune {__version__}, {', '.join(packages)}.",
        f"Measured: {winner.speed:,.0f} tokens/s ({times}), peak {peak:.2f} GiB{gain}.",
        f"On the same batches the losses equal the recipe's losses within {TOLERANCE[search.context.precision]:g}.",
    ]


def results(search: Search, winner: Optional[Candidate] = None, why: str = "") -> dict[str, Any]:
    """All results so far, for --json; `winner` is null until the search is over."""
    rows = [
        {
            "deltas": candidate.deltas,
            "forecast_gib": candidate.need / GIB,
            "verdict": candidate.verdict,
            "loss_off": candidate.loss_error,
            "tokens_per_second": candidate.speed,
            "answers": [asdict(result) for result in candidate.results],
        }
        for candidate in search.candidates
    ]
    return {
        "winner": None if winner is None else winner.deltas,
        "why": why,
        "not_tried": search.untried,
        "rows": rows,
        "device": search.context.facts.device_name,
        "packages": search.context.facts.packages,
    }


def _command(path: Path) -> str:
    return f"python -m fxtune +recipe={discovery.name_of(path)}"


def _gib(candidate: Candidate) -> str:
    return f"{candidate.need / GIB:.1f}" if candidate.need else ""
