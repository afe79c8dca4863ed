"""What a run says: its figures, to the tracker and the display; what it is made of, before its first step; what is said once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fxtune.checkpoint.manager import TrainState
from fxtune.checkpoint.run_folder import RunFolder
from fxtune.config.root import Config
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.plan import Plan
from fxtune.errors import StorageError
from fxtune.techniques.compile.technique import Compile
from fxtune.tracking.display import Display
from fxtune.tracking.throughput import StartupTimer
from fxtune.tracking.tracker import Tracker
from fxtune.training.answers import AnswerEvaluation
from fxtune.training.builder import RunBuilder


class RunLog:
    """Of one run. `state.figures` is kept up to date: the last value of each."""

    def __init__(
        self,
        folder: RunFolder,
        screen: Display,
        tracker: Tracker,
        state: TrainState,
        startup: StartupTimer,
        compile: Compile,
    ) -> None:
        self.folder, self.screen, self.tracker, self.state, self.startup, self.compile = (
            folder,
            screen,
            tracker,
            state,
            startup,
            compile,
        )
        self.told: set[str] = set()

    def log(self, figures: dict[str, Any]) -> None:
        """Record `figures` as of the steps that are done."""
        self.state.figures.update({"train/step": self.state.step, **figures})
        self.tracker.log(self.state.step, figures)
        self.screen.log(self.state.step, figures)

    def started(self) -> None:
        """Once, when the first steps are done: what the time went into before them."""
        if "start-up" not in self.told:
            self.told.add("start-up")
            self.startup.done("first steps")
            self.screen.note(self.startup.summary())

    def compiled(self, after: str) -> None:
        """Once after the first steps of each kind: what the compiler made of the model, and what it could not."""
        if after in self.told or not self.compile.enabled:
            return
        self.told.add(after)
        report = self.compile.report()
        try:
            self.folder.write("compile.json", report.plain())
        except StorageError as error:  # a witness's report: training goes on
            self.screen.note(str(error))
        self.tracker.log(
            self.state.step,
            {
                "compile/graphs": report.graphs,
                "compile/graph_breaks": len(report.breaks),
                "compile/recompilations": report.recompilations,
                "compile/seconds": report.seconds,
            },
        )
        for line in report.lines():
            self.screen.note(line)

    def stopped(self, steps: int, again: bool) -> str:
        """Where a run of `steps` steps stands that was told to end, and is saved. `again`: the very same command goes on."""
        step, folder = self.state.step, self.folder.path
        command = "The same command" + " with run.resume=auto" * (not again)
        if step == 0:
            return f"ended before the first step. {command} starts again."
        if step < steps:
            return f"saved after step {step} of {steps} in {folder}. {command} goes on from there."
        return f"all {steps} steps are done and saved in {folder}. {command} finishes the run."

    def ended(self, exam: AnswerEvaluation | None, lines: Iterable[str]) -> None:
        """The questions' answers, and `lines`."""
        self.screen.finish()
        if exam:
            self.screen.answers(exam.shown())
            self.screen.note(exam.verdict())
        for line in lines:
            self.screen.note(line)


def introduction(config: Config, setting: RunBuilder, data: PreparedData) -> Iterator[str]:
    """Lines on what `auto` and null became here, and what the data came to."""
    facts, device, loader = setting.facts, setting.world.device, config.loader.resolved(setting.world.device)
    yield (
        f"{device}: {facts.device_name}; weights in {facts.dtype}; {loader.num_workers} loader processes, pinned memory "
        f"{'on' if loader.pin_memory else 'off'}"
    )
    yield from config.techniques.ignored_options()
    yield from setting.decided
    yield from _plan(data.training, config.train.global_batch_size)
    if data.evaluation:
        held = data.evaluation.summary()
        yield (
            f"held out for evaluation: {held['documents']:,} documents, {held['supervised_tokens']:,} supervised tokens"
        )
    if facts.dtype == "bfloat16" and not setting.techniques.lora.enabled and not config.optimizer.stochastic_rounding:
        yield (
            "The weights that are trained are bfloat16, where an update below 1/256 of a weight is lost: small learning rates "
            "learn little. optimizer.stochastic_rounding=true loses none on average; model.dtype=float32 with "
            "techniques.precision.autocast=bfloat16 loses none, for twice the memory."
        )


def _plan(plan: Plan, rows: int) -> Iterator[str]:
    yield from plan.notes()
    seen = plan.summary()
    yield (
        f"{seen['steps']} steps of {rows} rows, {seen['epochs']:.2f} epochs; {seen['supervised_share']:.1%} of the tokens "
        f"supervised, {seen['padding_share']:.1%} padding"
    )
