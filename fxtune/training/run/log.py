"""The log of a run: figures for the tracker and the display, the introduction, and one-time notes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import RUNS, RunFolder
from fxtune.checkpoint.train_state import TrainState
from fxtune.config.needs import unread_warnings
from fxtune.config.root import Config
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.loader import settle_loader
from fxtune.errors import StorageError
from fxtune.models.proof import Proof
from fxtune.objectives.base import Objective
from fxtune.reports.held_out import figure_tables
from fxtune.system.terminal.console import table
from fxtune.system.terminal.startup import StartupTimer
from fxtune.system.terminal.units import counted, format_seconds
from fxtune.techniques.compile.technique import Compile
from fxtune.tracking.display import Display
from fxtune.tracking.tracker import Tracker
from fxtune.training.answers import AnswerEvaluation
from fxtune.training.builder import RunBuilder
from fxtune.training.data.run_data import data_notes, held_out_note
from fxtune.training.forecast.run_forecast import seconds_here
from fxtune.training.forecast.step_count import few_steps
from fxtune.training.general_text import forgotten


@dataclass
class RunLog:
    """The log of one run. It keeps the last value of each figure in `state.figures`."""

    folder: RunFolder
    screen: Display
    tracker: Tracker
    state: TrainState
    startup: StartupTimer
    compile: Compile
    done: set[str] = field(default_factory=set)
    """The one-time notes that were printed already."""

    def log(self, figures: dict[str, Any]) -> None:
        self.state.figures.update({"train/step": self.state.step, **figures})
        self.tracker.log(self.state.step, figures)
        self.screen.log(self.state.step, figures)

    def started(self) -> dict[str, float]:
        """After the first steps, print once how long each part of the start-up took. The first call returns these
        times as figures."""
        if "start-up" in self.done:
            return {}
        self.done.add("start-up")
        self.screen.note(self.startup.summary())
        parts = self.startup.read().items()
        return {f"startup/{part.replace(' ', '_')}_seconds": seconds for part, seconds in parts}

    def compiled(self, after: str) -> None:
        """Log the compiler's report once after the first steps of each kind. `after`: the kind, such as `training`,
        `evaluation`, or rows of a new length."""
        if after in self.done or not self.compile.enabled:
            return
        self.done.add(after)
        report = self.compile.report()
        try:
            self.folder.write("compile.json", asdict(report))
        except StorageError as error:  # only a report is lost, so training goes on
            self.screen.note(str(error))
        figures = {
            "graphs": report.graphs,
            "graph_breaks": len(report.breaks),
            "recompilations": report.recompilations,
            "seconds": report.seconds,
        }
        self.tracker.log(self.state.step, {f"compile/{name}": value for name, value in figures.items()})
        for line in report.lines():
            self.screen.note(line)

    def stopped(self, steps: int, again: bool) -> str:
        """A sentence on how far the stopped run got and how to resume it. `again`: whether the same command resumes
        it."""
        step, folder = self.state.step, self.folder.path
        command = "The same command" + " with run.resume=auto" * (not again)
        if step == 0:
            return f"ended before the first step. {command} starts again."
        if step < steps:
            return f"saved after step {step} of {steps} in {folder}. {command} goes on from there."
        return f"all {steps} steps are done and saved in {folder}. {command} finishes the run."

    def ended(self, questions: AnswerEvaluation | None, lines: Iterable[str]) -> None:
        """Show the answers, the tables of a classifier and the benchmarks, and print `lines`."""
        self.screen.finish()
        if questions:
            self.screen.answers(questions.shown())
            self.screen.note(questions.verdict())
        for content in figure_tables(self.state.figures):
            self.screen.note(table(*content))
        for line in lines:
            self.screen.note(line)


def next_commands(config: Config, folder: Path) -> list[str]:
    """Commands that a user may give next for the finished run in `folder`."""
    name = shlex.quote(folder.name if folder.absolute().parent == RUNS.absolute() else str(folder))
    head = config.objective.needs.head
    use = {
        f"chat {name}": head in ("lm", "score"),
        f"eval {name}": config.data.holds_out or config.data.questions.path is not None,
        f"export {name} --to vllm": head == "lm",
        f"merge {name}": head != "lm" and config.techniques.lora.enabled,
    }
    return [f"fxtune {command}" for command, possible in use.items() if possible] or [f"fxtune report {name}"]


def conclusion(
    config: Config, objective: Objective, data: PreparedData, figures: Mapping[str, Any], proof: Proof
) -> Iterator[str]:
    """The last lines of a run: its held-out figures, and possible problems of these figures and of the exported model.
    `proof`: the proof of the export."""
    for part, whose in (("eval", "held-out rows"), ("train", "training rows, in the last log line")):
        if (accuracy := figures.get(f"{part}/reward_accuracy")) is not None:
            margin = figures.get(f"{part}/reward_margin", math.nan)
            yield f"Preferences met in {accuracy:.1%} of {whose} (reward_accuracy), by {margin:.3g} on average"
            break
    if (loss := figures.get("eval/loss")) is not None:
        sides = ("before/", "eval/")
        yield from objective.verdict(
            *(
                {name.removeprefix(side): value for name, value in figures.items() if name.startswith(side)}
                for side in sides
            )
        )
        if not objective.needs.rollouts:
            yield f"Held-out loss at the last evaluation: {loss:.4f}"
    elif not config.data.holds_out and config.data.questions.path is None:
        yield "Nothing is held out, so no figure shows what the model learned: data.eval_fraction=0.05 holds rows out"
    yield from forgotten(figures)
    summary = data.training.summary()
    yield from few_steps(config, summary["steps"], summary["rows"], data.training.stream.rows_of_group)
    if proof.asked is not None and proof.ended_after is None:
        yield (
            f"The {'adapter' if config.techniques.lora.enabled else 'model'} has not learned to end: "
            f"{proof.ending()}. Train longer, or look at the ends of the rows with `fxtune preview`"
        )


def introduction(config: Config, builder: RunBuilder, data: PreparedData) -> Iterator[str]:
    """Lines on the values that were chosen for `auto` and null, and on the data."""
    facts, device = builder.facts, builder.world.device
    loader, image_bytes = settle_loader(config.loader, builder.own(data.training), device)
    yield (
        f"{device}: {facts.device_name}; weights in {facts.dtype}; {loader.num_workers} loader processes, pinned "
        f"memory {'on' if device.type == 'cuda' else 'off'}"
    )
    wanted = config.loader.resolved(device, image_bytes > 0)
    if (loader.num_workers, loader.prefetch_factor) != (wanted.num_workers, wanted.prefetch_factor):
        yield (
            f"{loader.num_workers} loader processes keep {loader.prefetch_factor} batches each ready, not "
            f"{wanted.num_workers} and {wanted.prefetch_factor}: the images of a batch take {image_bytes / 1e6:,.0f} "
            "MB, and ready batches may take a quarter of the free memory and half of /dev/shm (in a container, "
            "--shm-size)"
        )
    yield from config.techniques.ignored_options()
    yield from unread_warnings(config)
    yield from builder.notes
    yield from data_notes(config, data)
    summary = data.training.summary()
    yield (
        f"{counted(summary['steps'], f'steps of {data.training.step_rows}')}, {summary['epochs']:.2f} epochs; "
        f"{summary['supervised_share']:.1%} of the tokens supervised, {summary['padding_share']:.1%} padding"
    )
    yield from few_steps(config, summary["steps"], summary["rows"], data.training.stream.rows_of_group)
    alone = facts.device == "cpu" and builder.world.size == 1
    decided, passes = replace(facts, techniques=builder.techniques), builder.config.objective.forward_passes
    if config.objective.needs.rollouts:
        count = config.train.global_batch_size * config.sampler.answers
        yield f"{count:,} answers of at most {config.sampler.max_tokens:,} tokens in each step"
    elif alone and (seconds := seconds_here(decided, data.training, passes)):
        duration = format_seconds(seconds)
        yield f"the steps take about {duration} if these cores stay as free as now (a product was timed)"
    yield from config.data.unasked()
    if data.evaluation:
        yield held_out_note(data.evaluation)
    if facts.dtype == "bfloat16" and not builder.techniques.lora.enabled and not config.optimizer.stochastic_rounding:
        yield (
            "The trained weights are bfloat16, where an update below 1/512 of a weight is lost: small learning rates "
            "learn little. optimizer.stochastic_rounding=true loses none on average; model.dtype=float32 with "
            "techniques.precision.autocast=bfloat16 loses none, for twice the memory."
        )
