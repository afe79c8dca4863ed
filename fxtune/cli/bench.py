"""`fxtune bench`: how fast is a recipe as it stands, and what is each of its techniques worth?

    fxtune bench +recipe=quickstart                       # warm up, then measure the very steps that training takes
    fxtune bench +recipe=quickstart --steps 20 --price 3  # more steps; what a million tokens cost at 3 an hour
    fxtune bench +recipe=quickstart --ablate              # the same with each technique off in turn, each in its own process
    fxtune bench +recipe=quickstart --profile             # and where the time of a step goes, kernel by kernel
    fxtune bench +recipe=quickstart --json bench.json     # everything, for programs

Nothing is saved but the file that --json names. fxtune/diagnostics/benchmark.py says what is counted and how. Off means
`techniques.NAME.enabled=false`, for a switch inside a technique `off`, and for attention torch's own kernel, for packed rows
need one that keeps documents apart. What is refused or does not fit without a technique is a row that says so.
"""

from __future__ import annotations

import dataclasses
import json as jsons
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from fxtune.diagnostics.benchmark import LEAST_WARM_UP, STEPS, WARM_UP, apart, measure
from fxtune.errors import CheckError, ConfigError, StorageError
from fxtune.system.console import say, table
from fxtune.system.profiler import short

if TYPE_CHECKING:
    from fxtune.config.root import Config

NOT_KNOWN = "not known here"
SHOWN = 25
"""Kernels of a profile, before the rest is added up."""


def run(
    config: Config,
    overrides: Sequence[str] = (),
    ablate: bool = False,
    profile: bool = False,
    steps: Optional[str] = None,
    warm_up: Optional[str] = None,
    price: Optional[str] = None,
    json: Optional[str] = None,
) -> None:
    """Measure and print. The options are texts, as the command line has them.

    `overrides`: the recipe and keys as they were typed, for the processes that `ablate` starts; `price`: of this machine an
    hour; `json`: a file for the figures. Raises ConfigError for an option that makes no sense, StorageError for a file that
    cannot be written, CheckError where `ablate` cannot measure the recipe as it stands; other errors as training has them.
    """
    count, before = _whole("--steps", steps, STEPS, 1), _whole("--warm-up", warm_up, WARM_UP, LEAST_WARM_UP)
    hour = _price(price)
    file = Path(json) if json is not None else None
    if file is not None:
        _write(file)  # what cannot be written is told now, not after minutes
    if ablate and profile:
        raise ConfigError(
            "--profile: times the recipe as it stands, and --ablate runs others beside it. Give one of them."
        )
    if ablate:
        _ablate(list(overrides), count, before, hour, file)
        return
    found = priced(dataclasses.asdict(measure(config, count, before, profile=profile)), hour)
    for note in [*config.techniques.ignored_options(), *found["decided"]]:
        say(note)
    say(figures_table(found))
    if profile:
        say(kernels_table(found["kernels"]))
    if file is not None:
        _write(file, found)


def kernels_table(kernels: Sequence[tuple[str, float, float]]) -> Any:
    """Where the time of a step goes. `kernels`: as Measured has them."""
    whole = sum(seconds for _, seconds, _ in kernels)
    rows = [
        (short(name), f"{seconds * 1e3:,.2f}", f"{seconds / whole:.1%}", f"{calls:g}")
        for name, seconds, calls in kernels[:SHOWN]
    ]
    if rest := kernels[SHOWN:]:
        spent = sum(seconds for _, seconds, _ in rest)
        rows.append((f"{len(rest)} others", f"{spent * 1e3:,.2f}", f"{spent / whole:.1%}", ""))
    return table(f"A step by what ran: {whole * 1e3:,.1f} ms in all", ["", "ms", "share", "calls"], rows)


def priced(found: dict[str, Any], hour: Optional[float]) -> dict[str, Any]:
    """The figures, and what a million real tokens cost where the machine costs `hour` an hour."""
    if hour is None or "error" in found:
        return found
    return {
        **found,
        "price_per_hour": hour,
        "price_per_million_tokens": hour / 3600 / found["tokens_per_second"] * 1e6,
    }


def figures_table(found: Mapping[str, Any]) -> Any:
    """What `measure` found, for people."""

    def known(value: Optional[float], form: str) -> str:
        return NOT_KNOWN if value is None else form.format(value)

    real, padding = found["tokens_per_second"], found["padding_per_second"]
    held = "" if found["memory_reserved_gib"] is None else f", {found['memory_reserved_gib']:.2f} GiB reserved"
    joules = found["joules_per_token"]
    rows = [
        ("tokens a second", f"{real:,.0f} of real documents"),
        ("", f"{found['supervised_tokens_per_second']:,.0f} supervised"),
        ("", f"{padding:,.0f} slots of padding beside them ({padding / (real + padding):.1%} of the rows)"),
        (
            "step",
            f"{found['step_seconds'] * 1e3:,.1f} ms, p5 to p95: {found['step_seconds_p5'] * 1e3:,.1f} to "
            f"{found['step_seconds_p95'] * 1e3:,.1f} ms",
        ),
        ("MFU", known(found["mfu"], "{:.1%} of the card's dense peak")),
        ("peak memory", f"{found['memory_gib']:.2f} GiB ({found['step_memory_gib']:.2f} in the measured steps){held}"),
        ("waiting for data", f"{found['data_wait']:.1%} of the time"),
        (
            "energy",
            f"{joules:.3g} J a token, {found['watts']:,.0f} W ({found['energy']})" if joules else found["energy"],
        ),
        (
            "start-up",
            f"first step done after {found['first_step_seconds']:.1f} s, second after "
            f"{found['second_step_seconds']:.1f} s",
        ),
        ("compiling", "off" if found["compile_seconds"] is None else f"{found['compile_seconds']:.1f} s"),
        (
            "loss",
            known(found["loss"], "{:.4f}")
            + (
                f"; {found['skipped_steps']} steps were not finite and changed nothing"
                if found["skipped_steps"]
                else ""
            ),
        ),
    ]
    if "price_per_hour" in found:
        rows.insert(
            8,
            (
                "money",
                f"{found['price_per_million_tokens']:.4f} a million tokens, at {found['price_per_hour']:g} an hour",
            ),
        )
    return table(
        f"{found['device']}: {found['steps']} steps after {found['warm_up']} to warm up, micro-batches of up to "
        f"{found['rows']} tokens",
        ["", ""],
        rows,
    )


def _ablate(overrides: list[str], steps: int, warm_up: int, hour: Optional[float], file: Optional[Path]) -> None:
    say("as it stands ...")
    base = priced(apart(overrides, steps, warm_up), hour)
    if "error" in base:
        raise CheckError(f"The recipe as it stands cannot be measured: {base['error']}")
    for note in base["decided"]:
        say(note)
    say(figures_table(base))
    without: dict[str, dict[str, Any]] = {}

    def keep() -> None:  # each time: what is measured outlives a job that is killed
        if file is not None:
            _write(file, {**base, "without": without})

    keep()
    for name, keys in switched_off(base["techniques"]):
        say(f"without {name} ...")
        found = without[name] = {"keys": keys, **priced(apart([*overrides, *keys], steps, warm_up), hour)}
        say(f"  {found.get('error') or '{tokens_per_second:,.0f} tokens/s, {memory_gib:.1f} GiB'.format(**found)}")
        keep()
    say(ablation_table(base, without))


def switched_off(techniques: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """(what is off, the keys of the command line that make it so), one for each technique and each switch in it that is on.

    `techniques`: as Measured has them, every `auto` decided.
    """
    for name, options in techniques.items():
        if name == "attention":
            if options["backend"] != "sdpa":
                yield f"{options['backend']} (sdpa in its place)", ["techniques.attention.backend=sdpa"]
            continue
        yield name, [f"techniques.{name}.enabled=false"]
        switches = [option for option, value in options.items() if value == "on"]
        for option in switches:
            yield f"{name}.{option}", [f"techniques.{name}.{option}='off'"]


def ablation_table(base: Mapping[str, Any], without: Mapping[str, Mapping[str, Any]]) -> Any:
    """Speed and memory of each row against the recipe as it stands, and the loss over the same batches."""
    rows = [_row("as it stands", base, base)]
    rows += [_row(f"without {name}", found, base) for name, found in without.items()]
    return table(
        "One technique off at a time", ["", "tokens/s", "speed", "peak GiB", "memory", "loss", "loss off by"], rows
    )


def _row(name: str, found: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    if "error" in found:
        return [name, found["error"], "", "", "", "", ""]
    speed, memory = (found[key] / base[key] for key in ("tokens_per_second", "memory_gib"))
    known = found["loss"] is not None and base["loss"] is not None
    return [
        name,
        f"{found['tokens_per_second']:,.0f}",
        f"{speed:.2f}x",
        f"{found['memory_gib']:.1f}",
        f"{memory:.2f}x",
        *(
            [f"{found['loss']:.4f}", f"{round(found['loss'] - base['loss'], 4) + 0.0:+.4f}"]
            if known
            else ["not finite", ""]
        ),
    ]


def _whole(option: str, text: Optional[str], default: int, least: int) -> int:
    if text is None:
        return default
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"{option} {text}: give a whole number of steps, {least} or more")
    return int(text)


def _price(text: Optional[str]) -> Optional[float]:
    try:
        price = None if text is None else float(text)
    except ValueError:
        price = -1.0
    if price is not None and not 0 < price < float("inf"):
        raise ConfigError(f"--price {text}: give what an hour of this machine costs, a number above 0")
    return price


def _write(file: Path, found: Optional[Mapping[str, Any]] = None) -> None:
    """Without `found` only see whether it could be done."""
    there = file.exists()
    try:
        with file.open("a" if found is None else "w", encoding="utf-8") as out:
            out.write("" if found is None else jsons.dumps(found, indent=1) + "\n")
        if found is None and not there:
            file.unlink()
    except OSError as error:
        raise StorageError(
            f"--json {file} cannot be written: {error}. Give a file in a folder that is there."
        ) from error
