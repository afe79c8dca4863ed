"""`fxtune bench`: measures the speed of a recipe, and the contribution of each of its techniques.

    fxtune bench +recipe=quickstart                       # warm up, then measure the steps that training takes
    fxtune bench +recipe=quickstart --steps 20 --price 3  # more steps; the cost of a million tokens at 3 an hour
    fxtune bench +recipe=quickstart --ablate              # also with each technique off in turn
    fxtune bench +recipe=quickstart --profile             # also where the time of a step goes, kernel by kernel
    fxtune bench +recipe=quickstart --json bench.json     # all figures, for programs

No file is written except FILE of --json. Several GPUs (run.gpus) share each step: speed and energy count all GPUs,
memory is the fullest GPU's, and the kernels are the first GPU's. --ablate cannot switch attention off, because packed
rows need a kernel that isolates documents; it measures torch's own kernel instead. If the recipe is refused or does
not fit without a technique, the technique's row says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from fxtune.cli.answer import ANSWER
from fxtune.config.root import Config
from fxtune.diagnostics.benchmark import STEPS, WARM_UP, measure, measure_in_process
from fxtune.errors import CheckError, ConfigError
from fxtune.system.process.profiler import short_name
from fxtune.system.terminal.console import say, table
from fxtune.system.terminal.startup import SHOWN

TOP_KERNELS = 25

Figures = dict[str, Any]
"""The fields of Measured, with price fields if --price is given; or `{"error": reason}`."""


def run(
    config: Config,
    overrides: Sequence[str] = (),
    ablate: bool = False,
    profile: bool = False,
    steps: int = STEPS,
    warm_up: int = WARM_UP,
    price: Optional[float] = None,
) -> None:
    """Measure the recipe and print the figures.

    `overrides`: the recipe and keys as typed, for the processes that `ablate` starts. `price`: the cost of an hour.
    Raises StorageError for a file that cannot be written, CheckError if `ablate` cannot measure the recipe as it is,
    and the errors of training.
    """
    if ablate and profile:
        raise ConfigError("--profile measures the recipe as it is, and --ablate also others: give one of them.")
    if ablate:
        _ablate(list(overrides), steps, warm_up, price)
        return
    figures = with_price(dataclasses.asdict(measure(config, steps, warm_up, profile=profile)), price)
    say(*config.techniques.ignored_options(), *figures["decided"], figures_table(figures))
    if profile:
        kernels = figures["kernels"]
        total = sum(seconds for _, seconds, _ in kernels)
        top = [(short_name(name), seconds, f"{calls:g}") for name, seconds, calls in kernels[:TOP_KERNELS]]
        if rest := kernels[TOP_KERNELS:]:
            top.append((f"{len(rest)} others", sum(seconds for _, seconds, _ in rest), ""))
        rows = [(name, f"{seconds * 1e3:,.2f}", f"{seconds / total:.1%}", calls) for name, seconds, calls in top]
        say(table(f"A step by kernel: {total * 1e3:,.1f} ms in total", ["", "ms", "share", "calls"], rows))
        if figures["ranks"] > 1 and (exchange := figures["exchange_seconds"]) is not None:
            share = exchange / figures["step_seconds"]
            say(f"Exchange with other GPUs that no other kernel hides: {exchange * 1e3:,.2f} ms a step, {share:.1%}.")
    ANSWER.put(figures)


def with_price(figures: Figures, hour: Optional[float]) -> Figures:
    if hour is None or "error" in figures:
        return figures
    cost = hour / 3600 / figures["tokens_per_second"] * 1e6
    return {**figures, "price_per_hour": hour, "price_per_million_tokens": cost}


def figures_table(figures: Figures) -> Any:
    def known(value: Optional[float], form: str) -> str:
        return "not known here" if value is None else form.format(value)

    real, shared, padding = (figures[f"{key}_per_second"] for key in ("tokens", "shared", "padding"))
    reserved = figures["memory_reserved_gib"]
    memory = f"{figures['memory_gib']:.2f} GiB ({figures['step_memory_gib']:.2f} in the measured steps)"
    low, middle, high = (f"{figures[f'step_seconds{part}'] * 1e3:,.1f}" for part in ("_p5", "", "_p95"))
    joules, skipped = figures["joules_per_token"], figures["skipped_steps"]
    used = f"{joules:.3g} J per token, {figures['watts']:,.0f} W ({figures['energy']})" if joules else ""
    not_finite = f"; {skipped} steps were not finite and changed nothing" if skipped else ""
    ranks, slowest, behind = (figures[name] for name in ("ranks", "slowest_rank", "slowest_behind"))
    rows = [
        ("tokens per second", f"{real:,.0f} of documents"),
        *([("", f"{real / ranks:,.0f} of documents on each of {ranks} ranks")] if ranks > 1 else []),
        ("", f"{figures['supervised_tokens_per_second']:,.0f} supervised"),
        *([("", f"{shared:,.0f} of prompts that were computed with another answer")] if shared else []),
        *([("", f"{figures['images_per_second']:,.1f} images")] if figures["images_per_second"] else []),
        ("padding", f"{padding / (real - shared + padding):.1%} of the rows ({padding:,.0f} tokens per second)"),
        ("step", f"{middle} ms, p5 to p95: {low} to {high} ms"),
        *([("slowest rank", f"{slowest}, {behind:.1%} behind the others")] if behind else []),
        ("MFU", known(figures["mfu"], "{:.1%} of the card's dense peak")),
        ("peak memory", memory if reserved is None else f"{memory}, {reserved:.2f} GiB reserved"),
        ("waiting for data", f"{figures['data_wait']:.1%} of the time"),
        ("energy", used or figures["energy"]),
    ]
    if "price_per_hour" in figures:
        cost, hour = figures["price_per_million_tokens"], figures["price_per_hour"]
        rows.append(("cost", f"{cost:.4f} per million tokens, at {hour:g} per hour"))
    first, second = figures["first_step_seconds"], figures["second_step_seconds"]
    parts = [f"{part} {seconds:.1f}" for part, seconds in figures["startup_seconds"].items() if seconds >= SHOWN]
    rows += [
        ("seconds to the first step", f"{first:.1f}" + ("" if second is None else f", to the second {second:.1f}")),
        *([("", ", ".join(parts))] if parts else []),
        ("compiling", "off" if figures["compile_seconds"] is None else f"{figures['compile_seconds']:.1f} s"),
        ("loss", known(figures["loss"], "{:.4f}") + not_finite),
    ]
    device = f"{f'{ranks} ranks on ' if ranks > 1 else ''}{figures['device']}"
    title = f"{device}: {figures['steps']} steps after {figures['warm_up']} to warm up"
    return table(f"{title}, micro-batches of up to {figures['rows']} tokens", ["", ""], rows)


def _ablate(overrides: list[str], steps: int, warm_up: int, hour: Optional[float]) -> None:
    say("as it is ...")
    base = with_price(measure_in_process(overrides, steps, warm_up), hour)
    if "error" in base:
        raise CheckError(f"The recipe as it is cannot be measured: {base['error']}")
    say(*base["decided"], figures_table(base))
    without: dict[str, Figures] = {}
    pending = [("", []), *switched_off(base["techniques"])]
    for name, keys in pending:
        if name:
            say(f"without {name} ...")
            figures = with_price(measure_in_process([*overrides, *keys], steps, warm_up), hour)
            without[name] = {"keys": keys, **figures}
            speed = "{tokens_per_second:,.0f} tokens/s, {memory_gib:.1f} GiB"
            say(f"  {figures.get('error') or speed.format(**figures)}")
        ANSWER.put({**base, "without": without})  # after each measurement, so that a killed command keeps its results
    rows = [_ablation_row("as it is", base, base)]
    rows += [_ablation_row(f"without {name}", figures, base) for name, figures in without.items()]
    columns = ["", "tokens/s", "speed", "peak GiB", "memory", "loss", "loss off by"]
    say(table("One technique off at a time", columns, rows))


def switched_off(techniques: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, the overrides that switch it off) for each technique, switch and kernel that is on."""
    for name, options in techniques.items():
        if name == "attention":
            if options["backend"] != "sdpa":
                yield f"{options['backend']} (sdpa instead)", ["techniques.attention.backend=sdpa"]
            continue
        yield name, [f"techniques.{name}.enabled=false"]
        for option in (option for option, value in options.items() if value == "on"):
            yield f"{name}.{option}", [f"techniques.{name}.{option}='off'"]
        kernels = options.get("kernels", ())
        for kernel in kernels:
            others = ",".join(other for other in kernels if other != kernel)
            yield f"{name}.{kernel}", [f"techniques.{name}.kernels=[{others}]"]


def _ablation_row(name: str, figures: Figures, base: Figures) -> list[str]:
    if "error" in figures:
        return [name, figures["error"], "", "", "", "", ""]
    speed, memory = figures["tokens_per_second"], figures["memory_gib"]
    losses = ["not finite", ""]
    if figures["loss"] is not None and base["loss"] is not None:
        losses = [f"{figures['loss']:.4f}", f"{round(figures['loss'] - base['loss'], 4) + 0.0:+.4f}"]
    return [
        name,
        f"{speed:,.0f}",
        f"{speed / base['tokens_per_second']:.2f}x",
        f"{memory:.1f}",
        f"{memory / base['memory_gib']:.2f}x",
        *losses,
    ]
