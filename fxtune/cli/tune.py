"""`fxtune tune`: which settings are the fastest here, for this recipe, at the same loss?

    fxtune tune +recipe=quickstart                                  # short trials, then recipes/quickstart_tuned.yaml
    fxtune tune +recipe=quickstart --dry-run                        # what would be tried, what would not, and why
    fxtune tune +recipe=quickstart --axes micro_batch,checkpointing --minutes 10 --steps 5 --output recipes/fast.yaml

It begins with the recipe as it is, varies one axis at a time from the best so far (fxtune/tuning/search_space.py), and goes round until
nothing gets better or the minutes are over. What memory's forecast or a technique's check rules out is a line of the table and
costs nothing; a trial that fails is a line that says why. The two fastest are measured again where they are near each other:
what lies within the spread of those measurements is a tie, and of tied settings the one that changes the fewest keys wins. A
trial whose loss on the same batches is not that of the first one is marked and never wins.

There are a few dozen points, each dear and each to be explained, so this is no task for a sampler that learns a model of them.
"""

from __future__ import annotations

import json as jsons
import math
import multiprocessing
import shlex
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch

from fxtune import __version__
from fxtune.config import discovery
from fxtune.errors import ConfigError, HardwareError, StorageError, did_you_mean
from fxtune.system.console import say, table
from fxtune.system.host import cache_home
from fxtune.system.redact import redact_arguments
from fxtune.tuning import recipe_writer, trial_process
from fxtune.tuning.point import Row
from fxtune.tuning.search import TOLERANCE, Search
from fxtune.tuning.search_space import AXES, SearchContext
from fxtune.tuning.trial_process import Cache

if TYPE_CHECKING:
    from fxtune.config.root import Config

MINUTES = 30.0
STEPS = 8
LONGEST_REASON = 200
"""Letters of it in the table; --json has all of it, and so has the line that was printed when the trial ended."""
GIB = 1 << 30


def run(
    config: Config,
    overrides: Sequence[str],
    axes: Optional[str] = None,
    minutes: Optional[str] = None,
    steps: Optional[str] = None,
    output: Optional[str] = None,
    json: Optional[str] = None,
    dry_run: bool = False,
    again: bool = False,
) -> None:
    """Search, print the table, write the recipe. The options are texts, as the command line has them.

    `overrides`: the recipe and keys as they were typed; `again`: measure also what the cache knows; `json`: a file for all of
    it. Raises ConfigError for an option that makes no sense, HardwareError where no setting runs, StorageError for a file that
    cannot be written.
    """
    names = _axes(axes)
    budget, count = _number("--minutes", minutes, MINUTES) * 60, int(_number("--steps", steps, STEPS, whole=True))
    words = list(overrides)
    if any(choice.sweeps for choice in recipe_writer.choices(words)):
        raise ConfigError(
            "tune tries values of its own, so each key has one here: leave -m out, and name the axes with --axes"
        )
    path = recipe_writer.place_for(words, config.run.name, output)
    ground = survey(words, config, with_data=not dry_run)
    file = Path(json) if json is not None and not dry_run else None

    def tell(text: str) -> None:
        say(text)
        if file is not None:
            _write(file, search)  # each time: what is measured outlives a job that is killed

    search = Search(config, words, ground, names, budget, count, Cache(cache_home() / "tune", again), tell)
    if dry_run:
        say(planned_table(search.planned()))
        say(
            f"Nothing was run. Each axis goes on from the best before it, so the values above are those of the first round. "
            f"The recipe would be {path}."
        )
        return
    try:
        with trial_process.ended_in_order():
            search.go()
    except (KeyboardInterrupt, SystemExit):
        say(results_table(search))
        say("Broken off. The finished trials are kept: the same command goes on from them.")
        raise
    say(results_table(search))
    if search.best is None:
        raise HardwareError(
            f"No setting of these axes ({', '.join(names)}) runs here; the table says why. The recipe as it is: "
            f"{search.rows[0].verdict}"
        )
    winner, why = search.winner()
    say(why)
    if search.untried:
        say(
            f"The {budget / 60:g} minutes are over. Not tried: {'; '.join(search.untried)}. The same command with more --minutes "
            "goes on from here."
        )
    recipe_writer.write(path, header(search, winner, path), words, config, winner.deltas)
    say(f"The recipe is {path}: {_command(path)}")
    if file is not None:
        _write(file, search, winner, why)


def survey(overrides: list[str], config: Config, with_data: bool) -> SearchContext:
    """What the search stands on. On a GPU another process looks, for one that has looked holds memory on the card."""
    if not torch.cuda.is_available() or config.run.device.value == "cpu":
        return _look(config, with_data)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_look_at, overrides, with_data).result()


def _look_at(overrides: list[str], with_data: bool) -> SearchContext:
    from fxtune.config.compose import load

    return _look(load(overrides), with_data)


def _look(config: Config, with_data: bool) -> SearchContext:
    """Refuses what cannot run as it is asked for, and tokenises the data once for all trials."""
    from fxtune.diagnostics.parity import precision_of
    from fxtune.training.builder import RunBuilder

    setting = RunBuilder(config)
    ground = SearchContext(setting.facts, precision_of(setting))
    if not with_data:
        return ground
    plan = setting.read()[1].training
    lengths = plan.stream.segments.length
    return replace(ground, data=plan.fingerprint, document=1 << (max(int(lengths.mean()), 1) - 1).bit_length())


def planned_table(rows: Iterator[tuple[str, Row]]) -> Any:
    return table(
        "What would be tried, from the recipe as it is",
        ["axis", "setting", "forecast", ""],
        [[name, row.title, _gib(row.outlook.need), row.verdict or "a trial"] for name, row in rows],
    )


def results_table(search: Search) -> Any:
    """All rows, the fastest first."""
    first = search.rows[0].speed if search.rows else 0.0
    lines = []
    for row in sorted(search.rows, key=lambda row: -row.speed):
        speed, peak = row.speed, max((answer.peak for answer in row.answers), default=0.0)
        times = f" ({min(row.speeds):,.0f} to {max(row.speeds):,.0f})" if len(row.speeds) > 1 else ""
        lines.append(
            [
                row.title,
                f"{statistics.median(row.speeds):,.0f}{times}" if row.speeds else "",
                f"{speed / first:.2f}x" if speed and first else "",
                f"{peak:.2f}" if peak else "",
                _gib(row.outlook.need).removesuffix(" GiB"),
                "" if row.loss_off is None else f"{row.loss_off:.0e}",
                textwrap.shorten(row.verdict, LONGEST_REASON, placeholder=" ..."),
            ]
        )
    return table(
        f"{len(search.rows)} settings, {search.steps} steps each; loss within {TOLERANCE[search.ground.precision]:g}",
        ["setting", "tokens/s", "speed", "peak GiB", "forecast", "loss off by", ""],
        lines,
    )


def header(search: Search, winner: Row, path: Path) -> list[str]:
    """The comment above the recipe: what it is, how it is run, where and what was measured."""
    facts, base = search.ground.facts, search.rows[0]
    packages = [
        f"{name} {facts.packages[name]}"
        for name in ("torch", "transformers", "peft", "liger-kernel", "flash-attn-4", "bitsandbytes", "torchao")
        if name in facts.packages
    ]
    speeds = winner.speeds
    peak = max(answer.peak for answer in winner.answers)
    gain = (
        ""
        if winner is base
        else f"; {winner.speed / base.speed - 1:+.1%} against the recipe as it was"
        if base.speed
        else "; the recipe as it was gives no figure"
    )
    options = [] if search.names == list(AXES) else ["--axes", ",".join(search.names)]
    times = (
        f"{min(speeds):,.0f} to {max(speeds):,.0f} in {len(speeds)} runs of {search.steps} steps"
        if len(speeds) > 1
        else (f"one run of {search.steps} steps")
    )
    count = sum(bool(row.speeds) for row in search.rows)
    return [
        f"{search.config.run.name}, the fastest of {count} measured setting{'s' if count != 1 else ''}"
        f"{'' if winner.deltas else ': as it was'}",
        "",
        f"  {_command(path)}",
        "",
        f"{recipe_writer.MARK.removeprefix('# ')}{shlex.join([*redact_arguments(search.overrides), *options])} ({date.today()})",
        f"Hardware: {facts.device_name}, {facts.memory / GIB:.0f} GiB.",
        f"Packages: fxtune {__version__}, {', '.join(packages)}.",
        f"Measured: {winner.speed:,.0f} tokens/s ({times}), peak {peak:.2f} GiB{gain}.",
        f"The losses of the same batches are those of the recipe within {TOLERANCE[search.ground.precision]:g}.",
    ]


def _command(path: Path) -> str:
    local = path.parent.resolve() == discovery.LOCAL.resolve()
    return f"python -m fxtune +recipe={path.stem if local else path}"


def _gib(need: int) -> str:
    return f"{need / GIB:.1f} GiB" if need else ""


def _axes(text: Optional[str]) -> list[str]:
    names = list(AXES) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in AXES:
            raise ConfigError(f"--axes {text}: there is no axis `{name}`{did_you_mean(name, AXES)}")
    if not names:
        raise ConfigError(f"--axes names none. There are: {', '.join(AXES)}.")
    return list(dict.fromkeys(names))


def _number(option: str, text: Optional[str], default: float, whole: bool = False) -> float:
    try:
        value = default if text is None else int(text) if whole else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} {text}: give a {'whole ' if whole else ''}number above 0")
    return value


def _write(file: Path, search: Search, winner: Optional[Row] = None, why: str = "") -> None:
    """All rows so far; `winner` is null until the search is over."""
    rows = [
        {
            "deltas": row.deltas,
            "forecast_gib": row.outlook.need / GIB,
            "verdict": row.verdict,
            "loss_off": row.loss_off,
            "tokens_per_second": row.speed,
            "answers": [asdict(answer) for answer in row.answers],
        }
        for row in search.rows
    ]
    whole = {
        "winner": None if winner is None else winner.deltas,
        "why": why,
        "not_tried": search.untried,
        "rows": rows,
        "device": search.ground.facts.device_name,
        "packages": search.ground.facts.packages,
    }
    try:
        file.write_text(jsons.dumps(whole, indent=1, default=str) + "\n")
    except OSError as error:
        raise StorageError(
            f"--json {file} cannot be written: {error}. Give a file in a folder that is there."
        ) from error
