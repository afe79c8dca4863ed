"""A page about a run, or about several runs side by side. It is one HTML file that needs no network.

The page shows the figures that the runs recorded, and names the figures that are missing. The template
(fxtune/assets/report.html) escapes every value, because a sample may contain `</script>`. The page's policy lets a
browser load nothing, and run no script but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from fxtune import __version__
from fxtune.errors import writing
from fxtune.reports import exports
from fxtune.reports.bottlenecks import Bottleneck, duration, find_bottlenecks
from fxtune.reports.charts import Chart, Line, draw
from fxtune.reports.held_out import figure_tables, measures
from fxtune.reports.rollouts import COLUMNS, rollout_rows
from fxtune.reports.run_difference import NAMES, flat
from fxtune.reports.run_files import ANSWERS, PICTURES_OF_QUESTION, RunFiles, as_written
from fxtune.reports.time_shares import TimeShare, time_shares
from fxtune.system.files.atomic_files import replace_text

WIDE = ("Loss", "Gradient norm")
"""Charts that may have a logarithmic scale."""


def _sides(metric: str) -> dict[str, str]:
    return {f"train/{metric}": "training", f"eval/{metric}": "held out"}


def _both(metric: str) -> dict[str, str]:
    """The metrics of chosen and rejected answers, in training and held out, with their names."""
    parts = {"train": "", "eval": ", held out"}
    return {
        f"{part}/{metric}_{answer}": f"{answer}{where}"
        for answer in ("chosen", "rejected")
        for part, where in parts.items()
    }


CHARTS = (
    ("Loss", "a supervised token", _sides("loss")),
    ("Learning rate", "", {"train/lr": "learning rate"}),
    ("Gradient norm", "before clipping", {"train/grad_norm": "gradient norm"}),
    ("Speed", "tokens/s", {"train/tokens_per_second": "tokens/s"}),
    ("Memory", "GiB, peak so far", {"train/memory_gib": "in use", "train/memory_reserved_gib": "reserved"}),
    ("GPU power", "W a card, mean so far", {"energy/gpu_watts": "GPU power"}),
    ("Model FLOPs utilization", "share of the dense peak", {"train/mfu": "utilization"}),
    ("Exact match", "share of the questions", {"questions/exact_match": "exact match"}),
)
"""(title, unit, the name of each metric) for each chart."""
OF_OBJECTIVES = (
    ("Reward accuracy", "share of the rows", _sides("reward_accuracy")),
    ("Reward margin", "of rewards", _sides("reward_margin")),
    ("Rewards", "", _both("reward")),
    ("Log-probabilities", "nats a token of the answer", _both("log_probs")),
    ("Length of answers", "tokens", _both("length")),
    ("Reward", "mean over answers", {"rollout/reward": "sampled", "eval/reward": "held out"}),
    ("Length of sampled answers", "tokens", {"rollout/length": "sampled", "eval/length": "held out"}),
    ("Groups and answers", "share", {"rollout/equal_groups": "equal rewards", "rollout/truncated": "cut off"}),
    ("Entropy", "nats a token", {"train/entropy": "entropy"}),
    ("Gap of sampler and trainer", "nats a token", {"rollout/gap": "mean", "rollout/gap_p99": "99th percentile"}),
)
"""The charts in the same form that only runs with some objectives have."""


@dataclass
class ShownQuestion:
    text: Any
    pictures: list[tuple[str, str]]
    """(data: URI of a small copy, name) of the question's first images."""
    left_out: int
    """Images of the question that are not in `pictures`."""


@dataclass
class Table:
    """`rows`: each row has a cell for each column. A cell of None is a value that was not recorded."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass
class RunView:
    name: str
    color: int
    parts: list[TimeShare]
    total: float
    findings: list[Bottleneck]
    recipe: str


@dataclass
class Page:
    title: str
    runs: list[RunView]
    results: Table
    classes: list[tuple[str, Table]]
    """(title, confusion matrix, thresholds or benchmarks) of each run that has them."""
    charts: list[Chart]
    missing: list[str]
    differences: Table
    sources: Table
    evidence: list[tuple[str, list[dict[str, Any]]]]
    """(names of runs, their options). Runs with equal options share an entry. An entry of all runs has no names."""
    lengths: list[tuple[str, list[tuple[str, int, float]]]]
    """(training source and names of runs, [(range of tokens, number of documents, share of the largest number)])."""
    answers: Table
    more: list[tuple[str, Table]]
    """(title, answers of some steps, or exports) of each run that has them."""
    environment: Table
    written: str
    version: str = __version__


def write_report(folders: Sequence[Path], file: Path) -> None:
    """Write the page about the runs in `folders` to `file`. Raises ConfigError if a folder has no run, and
    StorageError if a file cannot be read or written."""
    with as_written(*folders):
        text = render([RunFiles(folder) for folder in folders])
    with writing(f"{file} cannot be written", "or name another file"):
        replace_text(file, text.encode("utf-8", "replace").decode())  # a folder's name may be no UTF-8


def render(runs: Sequence[RunFiles]) -> str:
    from jinja2 import Environment

    assets = files("fxtune").joinpath("assets")
    script = assets.joinpath("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"duration": duration, "cell": cell, "share": lambda value: f"{value:.1%}"}
    template = environment.from_string(assets.joinpath("report.html").read_text(encoding="utf-8"))
    return template.render(
        page=collect(runs),
        style=assets.joinpath("report.css").read_text(encoding="utf-8"),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:",
    )


def collect(runs: Sequence[RunFiles]) -> Page:
    names = _names(runs)
    charts, missing = _charts(runs, names)
    return Page(
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}",
        runs=[_view(run, name, index) for index, (run, name) in enumerate(zip(runs, names, strict=True))],
        results=_results(runs, names),
        classes=[
            (f"{title}{f', {name}' * (len(runs) > 1)}", Table(columns, rows))
            for run, name in zip(runs, names, strict=True)
            for title, columns, rows in figure_tables(run.last)
        ],
        charts=charts,
        missing=missing,
        differences=_differences(runs, names),
        sources=_sources(runs, names),
        evidence=_grouped(names, [run.evidence for run in runs]),
        lengths=_lengths(runs, names),
        answers=_answers(runs, names),
        more=[
            (f"{title}{f', {name}' * (len(runs) > 1)}", Table(columns, rows))
            for run, name in zip(runs, names, strict=True)
            for title, columns, rows in (
                ("Answers that were learned from", COLUMNS, list(rollout_rows(run.folder))),
                (
                    "Exports, beside plain transformers",
                    exports.COLUMNS,
                    exports.export_rows(run.result.get(exports.EXPORTS, {})),
                ),
            )
            if rows
        ],
        environment=_environment(runs, names),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the folders. If two are equal, all names include the parent folder."""
    paths = [run.folder.resolve() for run in runs]
    last = [path.name for path in paths]
    return last if len(set(last)) == len(last) else [f"{path.parent.name}/{path.name}" for path in paths]


def _view(run: RunFiles, name: str, color: int) -> RunView:
    parts, recipe = time_shares(run), yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return RunView(name, color, parts, sum(part.seconds for part in parts), find_bottlenecks(run), recipe)


def _grouped(names: Sequence[str], values: Sequence[Any]) -> list[tuple[str, Any]]:
    """(names of the runs with this value, value) for each distinct value; the name is empty if all runs agree."""
    if all(value == values[0] for value in values):
        return [("", values[0])]
    distinct = [value for at, value in enumerate(values) if value not in values[:at]]
    runs = list(zip(names, values, strict=True))
    return [(", ".join(name for name, own in runs if own == value), value) for value in distinct]


def _lengths(runs: Sequence[RunFiles], names: list[str]) -> list[tuple[str, list[tuple[str, int, float]]]]:
    tables = [(run.about.get("training") or {}).get("lengths", []) for run in runs]
    return [
        (f"{table['name']}{f', {whose}' * bool(whose)}", _counts(table))
        for whose, own in _grouped(names, tables)
        for table in own
    ]


def _counts(table: dict[str, Any]) -> list[tuple[str, int, float]]:
    edges, counts = table["edges"], table["counts"]
    ranges = [f"{low:,}" if high == low + 1 else f"{low:,} to {high - 1:,}" for low, high in pairwise(edges)]
    return [(span, count, count / max(*counts, 1)) for span, count in zip(ranges, counts, strict=False)]


def _results(runs: Sequence[RunFiles], names: list[str]) -> Table:
    """The figures that people look for first. A figure that no run recorded has no row."""
    rows: list[tuple[str, Callable[[RunFiles], Any]]] = [
        ("State", _state),
        ("Loss", lambda run: run.last.get("train/loss")),
        ("Held-out loss", _held_out),
        *(
            (f"Held-out {name}", partial(_before_and_after, f"before/{name}", f"eval/{name}"))
            for name in measures(run.last for run in runs)
        ),
        ("Held-out reward accuracy", lambda run: _percent(run.last.get("eval/reward_accuracy"))),
        ("Held-out reward margin", lambda run: run.last.get("eval/reward_margin")),
        ("Exact match", _exact_match),
        ("Loss on general text", partial(_before_and_after, "general/loss_before", "general/loss")),
        ("KL from the base there", lambda run: _with("nats a token", run.last.get("general/kl"))),
        ("Tokens trained on", lambda run: _whole(run.last.get("train/tokens"))),
        ("of them supervised", lambda run: _whole(run.last.get("train/supervised_tokens"))),
        ("Tokens/s", lambda run: _whole(_middle(run, "train/tokens_per_second"))),
        ("Step", lambda run: _seconds(_middle(run, "train/step_seconds"))),
        ("Model FLOPs utilization", lambda run: _percent(_middle(run, "train/mfu"))),
        ("Peak memory", lambda run: _with("GiB", run.last.get("train/memory_gib"))),
        ("Whole time", lambda run: _seconds(run.last.get("time/total_seconds"))),
        ("Energy", lambda run: _with("kWh", run.last.get("energy/kwh"))),
        ("GPU power, mean", lambda run: _with("W a card", run.last.get("energy/gpu_watts"))),
        ("GPU in use", lambda run: _percent(run.last.get("energy/gpu_utilization"))),
        ("Cost", lambda run: run.last.get("cost/total")),
        ("Skipped steps", lambda run: _whole(run.last.get("train/skipped_steps") or None)),
    ]
    found = [[label, *(figure(run) for run in runs)] for label, figure in rows]
    return Table(["", *names], [row for row in found if any(value is not None for value in row[1:])])


def _state(run: RunFiles) -> str:
    steps = f"{run.last.get('train/step', 0):,} steps"
    early = run.result.get("train/ended_early")
    if run.finished:
        return f"finished, {steps}" + f", ended early ({early})" * bool(early)
    return f"not finished, {steps} so far"


def _held_out(run: RunFiles) -> str | None:
    curve = run.curves.get("eval/loss")
    if not curve:
        return None
    best = min(curve, key=lambda step: curve[step])
    return f"{curve[max(curve)]:.4g}" + ("" if best == max(curve) else f" (best {curve[best]:.4g}, step {best:,})")


def _before_and_after(before: str, after: str, run: RunFiles) -> str | None:
    """The last values of two metrics, if they were recorded."""
    values = (run.last.get(metric) for metric in (before, after))
    return " → ".join(f"{value:.4g}" for value in values if value is not None) or None


def _exact_match(run: RunFiles) -> str | None:
    curve = run.curves.get("questions/exact_match")
    if not curve:
        return None
    return " → ".join(f"{curve[step]:.0%}" for step in sorted({min(curve), max(curve)}))


def _middle(run: RunFiles, metric: str) -> float | None:
    """The median of a metric over the log lines."""
    curve = run.curves.get(metric)
    return median(curve.values()) if curve else None


def _charts(runs: Sequence[RunFiles], names: list[str]) -> tuple[list[Chart], list[str]]:
    """The charts, and a sentence for each metric that a run did not record. Several runs share a chart."""
    charts, missing = [], []
    recorded = {metric for run in runs for metric in run.curves}
    measured = measures(run.last for run in runs)
    of_objective = [chart for chart in OF_OBJECTIVES if recorded & chart[2].keys()]
    of_objective += [(name, "", _sides(name)) for name in measured]
    loss = (CHARTS[0][0], "a row", CHARTS[0][2]) if of_objective else CHARTS[0]
    for title, unit, metrics in (loss, *of_objective, *CHARTS[1:]):
        lines = [
            [Line(label, run.curves.get(metric, {}), index) for index, (metric, label) in enumerate(metrics.items())]
            for run in runs
        ]
        if title in ("Exact match", *measured) and all(len(line.points) <= 2 for own in lines for line in own):
            continue  # at most two values, before and after training: the results show them
        without = [name for name, own in zip(names, lines, strict=True) if not any(line.points for line in own)]
        if without:
            whose = "" if len(without) == len(runs) else f" in {', '.join(without)}"
            missing.append(f"{title}: not recorded{whose}{_why_missing(title, runs)}.")
        if len(runs) == 1:
            drawn = [draw(title, unit, lines[0], title in WIDE)]
        else:
            drawn = []
            for index, label in enumerate(metrics.values()):
                own = [
                    Line(name, line[index].points, number, number >= 8)
                    for number, (name, line) in enumerate(zip(names, lines, strict=True))
                ]
                drawn.append(draw(f"{title}, {label}" if len(metrics) > 1 else title, unit, own, title in WIDE))
        charts += [chart for chart in drawn if chart is not None]
    return charts, missing


def _why_missing(title: str, runs: Sequence[RunFiles]) -> str:
    if title in ("GPU power", "Model FLOPs utilization"):
        devices = {(run.setting.get("machine") or {}).get("device") for run in runs}
        return " on a CPU" if "cpu" in devices else ""
    return ""


def _differences(runs: Sequence[RunFiles], names: list[str]) -> Table:
    """The keys with different values in several runs."""
    if len(runs) == 1:
        return Table([], [])
    settings = [flat(run.config) | flat(run.setting) for run in runs]
    rows = []
    for key in dict.fromkeys(key for setting in settings for key in setting):
        values = [setting.get(key) for setting in settings]
        if key not in NAMES and any(value != values[0] for value in values):
            rows.append([key, *map(_setting, values)])
    return Table(["", *names], rows)


def _setting(value: Any) -> str | None:
    return None if value is None else json.dumps(value) if isinstance(value, bool) else str(value)


def _sources(runs: Sequence[RunFiles], names: list[str]) -> Table:
    """A row for each source of each run; one row for each source if all runs have the same sources."""
    found = _grouped(names, [_sources_of(run) for run in runs])
    whose = len(found) > 1
    columns = ["source", "for", "documents in it", "tokens used", "supervised", "share", "median length"]
    return Table(
        ["run"] * whose + [*columns, "95 %", "longest", "bad rows"],
        [[*[name] * whose, *row] for name, rows in found for row in rows],
    )


def _sources_of(run: RunFiles) -> list[list[Any]]:
    rows = []
    for side in ("training", "held_out"):
        plan = run.about.get(side) or {}
        for source, lengths in zip(plan.get("sources", []), plan.get("lengths", []), strict=False):
            sizes = lengths["documents"], source["tokens"]
            shares = lengths["supervised_tokens"] / (lengths["tokens"] or 1), source["share"]
            others = (lengths[name] for name in ("median", "percentile_95", "longest", "bad_rows"))
            cells = *map(_whole, sizes), *map(_percent, shares), *map(_whole, others)
            rows.append([source["name"], side.replace("_", " "), *cells])
    return rows


def _answers(runs: Sequence[RunFiles], names: list[str]) -> Table:
    """The first questions, with the right answer, one answer before training, and each run's answer after training."""
    before = {_asked(row): row for run in runs for row in run.answers("before")}
    after = [{_asked(row): row for row in run.answers("after")} for run in runs]
    questions = {asked: row for own in after for asked, row in own.items()} or before
    rows = []
    for asked, question in list(questions.items())[:ANSWERS]:
        answers = [(own.get(asked) or {}).get("answer") for own in (before, *after)]
        right = question.get("right")
        rows.append([_shown(question, runs), right, *(_judged(answer, right) for answer in answers)])
    columns = ["before training", *(["after"] if len(runs) == 1 else [f"after, {name}" for name in names])]
    return Table(["question", "right answer", *columns], rows)


def _asked(row: dict[str, Any]) -> tuple[Any, ...]:
    """The identity of a question: its text and its images."""
    return str(row.get("question")), *(str(image.get("digest")) for image in _images(row))


def _shown(row: dict[str, Any], runs: Sequence[RunFiles]) -> ShownQuestion:
    images = _images(row)
    pictures = []
    for image in images[:PICTURES_OF_QUESTION]:
        copies = (run.picture(str(image.get("digest"))) for run in runs)
        if (copy := next((copy for copy in copies if copy), None)) is not None:
            pictures.append((copy, str(image.get("name"))))
    return ShownQuestion(row.get("question"), pictures, len(images) - len(pictures))


def _images(row: dict[str, Any]) -> list[dict[str, Any]]:
    images = row.get("images")
    return [image for image in images if isinstance(image, dict)] if isinstance(images, list) else []


def _judged(answer: str | None, right: str | None) -> tuple[bool, str] | None:
    return None if answer is None else (str(answer).strip() == str(right).strip(), str(answer).strip())


def _environment(runs: Sequence[RunFiles], names: list[str]) -> Table:
    def dates(run: RunFiles) -> str | None:
        shown = (time.strftime("%Y-%m-%d %H:%M", time.localtime(date)) for date in run.times)
        return " to ".join(shown) or None

    rows: list[tuple[str, Callable[[RunFiles], Any]]] = [
        ("command", lambda run: run.about.get("command")),
        ("folder", lambda run: str(run.folder)),
        ("first and last log line", dates),
        ("ranks", lambda run: _whole(run.last.get("train/ranks"))),
        ("fxtune", lambda run: run.about.get("fxtune")),
        ("Python", lambda run: run.about.get("python")),
        ("system", lambda run: run.about.get("system")),
    ]
    cells = [[label, *(value(run) for run in runs)] for label, value in rows]
    machines = [run.setting.get("machine") or {} for run in runs]
    for key in dict.fromkeys(key for machine in machines for key in machine):
        cells.append([key, *(machine.get(key) for machine in machines)])
    return Table(["", *names], cells)


def _whole(value: Any) -> str | None:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else None


def _percent(value: Any) -> str | None:
    return f"{value:.1%}" if isinstance(value, (int, float)) else None


def _with(unit: str, value: Any) -> str | None:
    return f"{value:,.3g} {unit}" if isinstance(value, (int, float)) else None


def _seconds(value: Any) -> str | None:
    return None if not isinstance(value, (int, float)) else f"{value:.3g} s" if value < 10 else duration(value)


def cell(value: Any) -> str:
    """The text of a cell. The template escapes the text."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
