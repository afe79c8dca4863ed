"""`fxtune plan`: calculates memory, time, cost and disk of a run, for cards that need not be in this machine.

    fxtune plan +recipe=llama_lora                                # every known card: does the run fit, and how long
    fxtune plan +recipe=llama_lora --gpu H200                     # one card: memory by part, time, tokens, disk
    fxtune plan +recipe=llama_lora --gpu H200 --gpus 2 --price 3.5  # two H200, at 3.5 an hour each
    fxtune plan +recipe=llama_lora --gpu L4 --tokens 20e6         # without the data: an epoch of 20 million tokens
    fxtune plan +recipe=quickstart --gpu cpu                      # this machine's CPU, timed by a matrix product

No weights are loaded and no GPU is needed. Without the hub, the configs of models that ship with fxtune are enough.
docs/performance.md compares the forecasts with measurements. The time includes the start, the steps and the
evaluations. The first start takes a minute longer, to compile.
"""

from __future__ import annotations

from typing import Any, Optional

from rich.text import Text

from fxtune.cli.answer import ANSWER
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.estimate.machines import CARD_MODELS, card_name, machine
from fxtune.system.terminal.console import plain, say, table, unicode
from fxtune.system.terminal.units import GIB, format_bytes, format_seconds
from fxtune.training.forecast.run_forecast import (
    Lengths,
    RunForecast,
    changes_to_fit,
    fitting_count,
    forecast_run,
    with_lengths,
)

HOST_GIB = 128.0
"""Host memory for each GPU, unless --host-gib says otherwise."""
BAR = 60
"""Columns of the bar of a card's memory."""
COLOURS = ("blue", "magenta", "cyan", "green", "yellow", "white")


def run(
    config: Config,
    gpu: Optional[str] = None,
    gpus: int = 1,
    price: Optional[float] = None,
    tokens: Optional[float] = None,
    host_gib: float = HOST_GIB,
) -> None:
    """Print the plan. `price`: what one GPU costs for an hour. `tokens`: number of tokens in an epoch. Raises
    ConfigError if the card is unknown or cannot run the recipe, and the errors of reading config and data."""
    gpu = card_name(gpu) if gpu else None
    # Whether rows share prompts depends on the card, but all cards of CARD_MODELS agree.
    card = machine(gpu or next(iter(CARD_MODELS)), host_gib, config.run.memory_gib)
    config, counted = with_lengths(config, card, tokens)
    lengths = None if isinstance(counted, str) else counted
    if gpu is None:
        rows, few, assumed = [], list[str](), ""
        for name in CARD_MODELS:
            found = _try(config, name, gpus, host_gib, lengths)
            if isinstance(found, RunForecast):
                few, assumed = found.few_steps, found.assumed
            rows.append(_figures(name, found, gpus, price))
            if isinstance(found, RunForecast) and not found.fits:
                rows[-1]["fitting_gpus"] = fitting_count(config, found, gpus, lengths)
        say(_cards_table(rows, gpus))
        _say_lengths(counted, assumed)
        say(*few, "One of them in detail: --gpu NAME.")
        ANSWER.put(rows)
        return
    forecast = forecast_run(config, machine(gpu, host_gib, config.run.memory_gib), gpus, lengths)
    figures = _figures(gpu, forecast, gpus, price)
    say(*forecast.notes, _bar(forecast), _table(forecast, figures, gpus, price))
    _say_lengths(counted, forecast.assumed)
    say(*forecast.few_steps)
    if not forecast.fits:
        say("What would help it to fit:")
        for change, enough in changes_to_fit(config, forecast):
            saved = f"{change.saved_bytes / GIB:,.1f} GiB less"
            say(f"  {change.setting}: {saved}{', enough' if enough else ', not enough alone'}")
        fitting = [
            name
            for name in reversed(CARD_MODELS)
            if isinstance(found := _try(config, name, gpus, host_gib, lengths), RunForecast) and found.fits
        ]
        if fitting:
            say(f"  a larger card: --gpu {fitting[0]}")
        if count := fitting_count(config, forecast, gpus, lengths):
            say(f"  {count} x {forecast.facts.device_name}: --gpus {count}")
    ANSWER.put(figures)


def _try(config: Config, name: str, gpus: int, host_gib: float, lengths: Lengths | None) -> RunForecast | str:
    """The forecast. If the recipe is refused on this card: the last line of the refusal."""
    try:
        return forecast_run(config, machine(name, host_gib, config.run.memory_gib), gpus, lengths)
    except ConfigError as error:
        return str(error).splitlines()[-1].strip()


def _figures(name: str, forecast: RunForecast | str, gpus: int, price: float | None) -> dict[str, Any]:
    """The fields that `--json` writes. Memory is in GiB, time in seconds."""
    if isinstance(forecast, str):
        return {"gpu": name, "gpus": gpus, "refused": forecast}
    need, seconds = forecast.need, forecast.seconds
    images = forecast.lengths.images if forecast.lengths else None
    return {
        "gpu": name,
        "device": forecast.facts.device_name,
        "gpus": gpus,
        "parallel": vars(forecast.facts.degrees),
        "fits": forecast.fits,
        "memory_gib": need.device / GIB,
        "allocated_gib": need.allocated / GIB,
        "free_gib": forecast.facts.free_memory / GIB,
        "host_gib": need.pinned / GIB,
        "step_seconds": forecast.step_seconds,
        "tokens_per_second": forecast.step_tokens / forecast.step_seconds,
        "reference_seconds": forecast.reference_seconds,
        "reference_gib": forecast.reference_bytes / GIB,
        "feature_seconds": forecast.feature_seconds,
        "feature_gib": forecast.feature_bytes / GIB,
        "steps": forecast.steps,
        "tokens": forecast.tokens,
        "seconds": seconds,
        "cost": None if price is None or seconds is None else price * gpus * seconds / 3600,
        "disk_gib": forecast.disk_bytes / GIB,
        "sampled": forecast.lengths.sampled if forecast.lengths else None,
        "images": images and images.images,
        "image_tokens": images and images.features,
        "patches": images and images.patches,
        "tower_seconds": forecast.image_seconds,
    }


def _bar(forecast: RunForecast) -> Text:
    """The memory of one card as a coloured bar, with a legend of its parts."""
    whole = max(forecast.facts.free_memory, forecast.need.device)
    block, empty = ("█", "░") if unicode() else ("#", ".")
    bar, legend, shown = Text(), Text(), 0
    total = 0
    for (name, part), colour in zip(forecast.need.parts.items(), COLOURS, strict=False):
        total += part
        end = round(BAR * total / whole)
        bar.append(block * (end - shown), colour)
        shown = end
        legend.append(f"  {block} ", colour)
        legend.append(f"{name} {format_bytes(part)}")
    bar.append(empty * (BAR - shown), "dim")
    free = forecast.facts.free_memory / GIB
    fits = forecast.need.device <= forecast.facts.free_memory
    bar.append(f" {forecast.need.device / GIB:,.1f} of {free:,.1f} GiB: ")
    bar.append("fits" if fits else "does not fit", "green" if fits else "bold red")
    return Text.assemble(bar, "\n", legend)


def _reference(forecast: RunForecast) -> str:
    """Time and disk of a stored reference, as text. Empty if no reference is stored: the row `a step` includes a
    reference that each step computes."""
    if not forecast.reference_bytes:
        return ""
    seconds, size = format_seconds(forecast.reference_seconds), format_bytes(forecast.reference_bytes)
    return f"{seconds} before the first step; {size} beside the cached tokens"


def _images(lengths: Lengths | None) -> str:
    """The images of an epoch, as text. Empty for rows without images."""
    if lengths is None or lengths.images is None:
        return ""
    images, share = lengths.images, lengths.images.features / lengths.epoch
    stored = f"; {format_bytes(lengths.image_bytes)} beside the cached tokens" if lengths.image_bytes else ""
    return (
        f"{images.images:,.0f} an epoch, {images.features:,.0f} tokens ({share:.0%} of all), {images.patches:,.0f} "
        f"patches{stored}"
    )


def _table(forecast: RunForecast, figures: dict[str, Any], gpus: int, price: float | None) -> Any:
    facts, steps, seconds = forecast.facts, forecast.steps, forecast.seconds
    cards = f"{gpus} x {facts.device_name}" if gpus > 1 else facts.device_name
    rows = [
        ("ranks", f"{gpus} ({facts.degrees})" if gpus > 1 else ""),
        ("a step", f"{forecast.step_seconds:,.3g} s, {figures['tokens_per_second']:,.0f} tokens/s"),
        (
            "vision encoder",
            f"{forecast.image_seconds:,.3g} s of a step ({forecast.image_seconds / forecast.step_seconds:.0%})"
            if forecast.image_seconds
            else "",
        ),
        ("images", _images(forecast.lengths)),
        (
            "image features",
            f"{forecast.lengths.distinct[0]:,} images, {format_bytes(forecast.feature_bytes)} beside the cached "
            f"tokens; {format_seconds(forecast.feature_seconds)} before the first step"
            if forecast.lengths and forecast.feature_bytes
            else "",
        ),
        ("reference", _reference(forecast)),
        ("steps", "" if steps is None else f"{steps:,}, {forecast.tokens or 0:,.0f} tokens"),
        (
            "evaluations",
            f"{forecast.evaluations:,}, {format_seconds(forecast.evaluation_seconds)} each"
            if forecast.evaluations
            else "",
        ),
        ("time", "not known" if seconds is None else format_seconds(seconds)),
        ("cost", "" if figures["cost"] is None else f"{figures['cost']:,.2f} at {price:g} per GPU and hour"),
        (
            "allocated",
            f"{format_bytes(forecast.need.allocated)} at the peak, as `bench` measures it: without fragmentation",
        ),
        ("host memory", f"{forecast.need.pinned / GIB:,.1f} GiB pinned by each rank" if forecast.need.pinned else ""),
        (
            "disk",
            f"{format_bytes(forecast.disk_bytes)}: up to {forecast.checkpoints} checkpoints of "
            f"{format_bytes(forecast.checkpoint_bytes)}, the export {format_bytes(forecast.export_bytes)}",
        ),
    ]
    timed = "a matrix product was timed" if facts.device == "cpu" else "nothing was run"
    return table(f"Calculated for {cards}; {timed}", ["", ""], [row for row in rows if row[1]])


def _cards_table(rows: list[dict[str, Any]], gpus: int) -> Any:
    cells = []
    for row in rows:
        if "refused" in row:
            cells.append([row["gpu"], plain(row["refused"]), "", "", "", ""])
            continue
        more = f", --gpus {row['fitting_gpus']} fits" if row.get("fitting_gpus") else ""
        fits = Text("fits", "green") if row["fits"] else Text(f"does not fit{more}", "red")
        memory = Text.assemble(f"{row['memory_gib']:,.1f} of {row['free_gib']:,.1f} GiB: ", fits)
        time = "" if row["seconds"] is None else format_seconds(row["seconds"])
        cost = "" if row["cost"] is None else f"{row['cost']:,.2f}"
        speed = f"{row['tokens_per_second']:,.0f}"
        shown = [f"{row['step_seconds']:,.3g} s", speed, time, cost] if row["fits"] else ["", "", "", ""]
        cells.append([row["gpu"], memory, *shown])
    title = f"Calculated for {gpus} card{'s' * (gpus > 1)} of a kind; nothing was run"
    return table(title, ["card", "memory", "a step", "tokens/s", "time", "cost"], cells)


def _say_lengths(counted: Lengths | str, assumed: str) -> None:
    if isinstance(counted, str):
        say(f"Only a step is known: the tokens of an epoch cannot be counted. Give them by --tokens N. {counted}")
    elif counted.sampled:
        say(f"Tokens are extrapolated from {counted.sampled}.")
    if assumed:
        say(f"Images are counted {assumed}.")
