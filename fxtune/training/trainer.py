"""Training: one loop for LoRA and full fine-tuning, read top to bottom.

`Trainer.__init__` builds a run in order, `_loop` is the loop. There are no callbacks: the loop calls everything by
name. The loop waits for the device only to log figures; by then the next step is already issued.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import (
    ABOUT,
    CHECKPOINTS,
    EVIDENCE,
    REPORT,
    RunFolder,
    read_template_time,
)
from fxtune.config.root import Config, Export, OutOfMemory, Resume
from fxtune.data.batches.batch_images import LostImageError
from fxtune.data.batches.loader import Loader, StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.data.config import AUTO
from fxtune.data.tokenized.ends import learned_ends
from fxtune.data.tokenized.rows import place_of_image
from fxtune.distributed.heartbeat import EXPORTING, FORWARD_BACKWARD, SAVING
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError, UserError
from fxtune.facts.run import Facts
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.schedule import Schedule
from fxtune.settle.freed_gradients import refuse_halved
from fxtune.settle.ranks import require_possible
from fxtune.system.machine.tested_versions import outside_tested_range
from fxtune.system.process.oom import MemoryExhausted, RowsPerPass, catch_out_of_memory, out_of_memory_message
from fxtune.system.process.signals import SIGNALS
from fxtune.system.terminal import progress
from fxtune.system.terminal.library_log import LIBRARY_LOG
from fxtune.system.terminal.progress import MICRO_BATCHES, STEPS, phase
from fxtune.system.terminal.redact import redact
from fxtune.system.terminal.startup import FIRST_STEPS, STARTUP
from fxtune.techniques.pipeline import Pipeline
from fxtune.tracking import tracker
from fxtune.tracking.display import Display, display
from fxtune.tracking.worker import GOES_ON
from fxtune.training.agreement import shared, together
from fxtune.training.answers import AnswerEvaluation
from fxtune.training.data.special_tokens import teach_ends, untrained_tokens
from fxtune.training.evaluation import HeldOutEvaluation
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.forecast.run_forecast import FORWARD
from fxtune.training.monitors.bad_batches import BadBatches
from fxtune.training.monitors.clock import RunClock
from fxtune.training.monitors.energy import RunEnergy, sentence
from fxtune.training.monitors.rank_report import UPDATE
from fxtune.training.run.about import describe_run, prompts_are_texts
from fxtune.training.run.end import Decision, RunEnd, require_extendable
from fxtune.training.run.export import ending_probe, export, write_report
from fxtune.training.run.log import RunLog, conclusion, introduction, next_commands
from fxtune.training.run.resume_check import ResumeCheck, build_for_run
from fxtune.training.run.start import claim_folder, require_same_recipe
from fxtune.training.run.state import RunState, weights_note
from fxtune.training.step import Metrics
from fxtune.training.step_monitor import StepMonitor
from fxtune.training.trial import Trial


def run(config: Config) -> dict[str, Any]:
    """Train as `config` says and return the run's last figures."""
    return train(config)[1]


def train(config: Config) -> tuple[Path, dict[str, Any]]:
    """run(), with the run's folder."""
    with SIGNALS:
        SIGNALS.check()  # a signal ends a whole sweep, not one of its runs
        # Enums become their values: the recipe is written to files.
        recipe = redact(json.loads(json.dumps(dataclasses.asdict(config))))
        with World.create(config.run.device, config.run.memory_gib) as world:
            require_same_recipe(world, recipe)
            require_possible(config, world.size, world.device.type == "cuda")
            folder = claim_folder(world, config, recipe)
            with LIBRARY_LOG.written_to(folder.path):
                return folder.path, _run_in_folder(folder, config, recipe, world)


def _run_in_folder(folder: RunFolder, config: Config, recipe: dict[str, Any], world: World) -> dict[str, Any]:
    shown = config.tracking.display.value if world.main else "none"
    screen = display(shown)
    progress.show(shown)
    try:
        require_extendable(folder, config)
        if folder.finished and not folder.extends:
            screen.note(
                f"{folder.path} holds this run, finished: nothing to do. Set run.dir to a new folder to train again."
            )
            if world.main and config.run.report and not (folder.path / REPORT).exists():  # a kill came before the page
                screen.note(write_report(folder.path))
            screen.note(f"Next: {', '.join(next_commands(config, folder.path))}")
            return folder.result()
        if line := outside_tested_range():
            screen.note(line)
        with SIGNALS.interruptible():
            trainer = Trainer(config, folder, screen, recipe)
        return trainer.run()
    except UserError:
        folder.abandon()
        raise
    finally:
        screen.finish()
        progress.hide()
        folder.release()


class Trainer:
    """One run. `recipe`: the config as plain data, without secrets."""

    def __init__(self, config: Config, folder: RunFolder, screen: Display, recipe: dict[str, Any]) -> None:
        self.config, self.folder, self.screen, self.recipe = config, folder, screen, recipe
        self.objective: Objective = config.objective
        STARTUP.begin_run()
        self.clock = RunClock(sum(STARTUP.read().values()))
        # Impossible recipes are refused first, from configs alone: no weight is loaded, no row is read.
        self.builder, resume_check = build_for_run(config, folder, screen.note)
        builder, self.world = self.builder, self.builder.world
        self.energy = RunEnergy(folder, self.world, config.tracking.cost)
        if reasons := list(tracker.check(config.tracking, builder.facts)):
            raise ConfigError("\n".join(reasons))
        self.tokenizer, self.data = builder.read(folder.path / "quarantine.jsonl", read_template_time(folder.path))
        self.plan, self.peak_rate = self.data.training, builder.config.optimizer.lr
        resume_check.check_data(self.data.tables, self.peak_rate if config.optimizer.lr == AUTO else None)
        self.questions = AnswerEvaluation.open(builder.config.data, self.tokenizer, folder.path, self.data.images)
        self.ends = learned_ends(self.data.tables, self.tokenizer)
        if self.world.main:
            texts = prompts_are_texts(self.data.tables, builder.config.data)
            folder.write(ABOUT, describe_run(self.data, self.ends, builder.config.data.template_time, texts))
        for line in (f"run folder: {folder.path}", *introduction(config, builder, self.data)):
            screen.note(line)
        self.language_model = self._proven_model(resume_check)
        self.model = self.language_model.model
        self.trial = Trial(builder, self.language_model, self.objective)
        # The optimizer is built after the techniques: they replace modules, and it would go on updating a replaced
        # weight.
        self.train_step = builder.train_step(self.language_model, self.objective)
        self.rank_report = self.train_step.rank_report
        self.rank_report.energy = self.energy
        self.bad_batches = BadBatches(
            folder.path, self.plan, self.tokenizer.decode, screen.note, writes=self.world.main
        )
        self.monitor = StepMonitor(config.train, self.train_step, self.bad_batches)
        self.run_state = RunState(folder, config.checkpoint, self.train_step, self.monitor, self.clock, screen.note)
        with builder.oom_context("Loading the checkpoint"):
            self.state = self.run_state.load(self.plan.fingerprint)
        compiles = builder.techniques.compile.enabled
        self.end = RunEnd(config, folder.path, self.world, self.clock, self.state, compiles, self._evaluation_steps())
        self.schedule = self._schedule()
        self.batch_sizes = RowsPerPass(
            self.world.device,
            self.state.rows,
            screen.note if config.train.out_of_memory is OutOfMemory.halve else None,
            self._out_of_memory_error,
            self._drop_recordings,
        )
        rows = self.batch_sizes.rows("training", config.train.micro_batch_size)
        self._set_plan(self.plan.with_micro_batch_size(rows).until(self.schedule.last, self.schedule.dropped))
        if rows < config.train.micro_batch_size:
            self._keep_gradients(rows)
        self.held_out: HeldOutEvaluation | None = None
        if self.data.evaluation:
            self.held_out = builder.held_out(self.data.evaluation, self.language_model, self.objective)
        self.loader: Loader | None = None
        self.tracker = self._open_tracker() if self.world.main else tracker.NoTracker()
        # The id is kept even if W&B is off now: when the run is resumed with W&B on, it continues the same W&B run.
        self.state.wandb_id = self.tracker.wandb_id or self.state.wandb_id
        self.log = RunLog(folder, screen, self.tracker, self.state, STARTUP, builder.techniques.compile)
        self.logs_late = self.world.device.type == "cuda"
        """On a GPU a line is logged after the next step is issued, so that the device is never idle."""
        self.line_due = False
        """Whether the last step ends in a log line that is not written yet."""
        self.lr = 0.0
        """The learning rate of the last step."""

    @property
    def facts(self) -> Facts:
        return self.builder.facts

    @property
    def techniques(self) -> Pipeline:
        return self.builder.techniques

    def _proven_model(self, resume_check: ResumeCheck) -> LanguageModel:
        """The built model. The evidence that its techniques acted is shown and written."""
        builder = self.builder
        self.world.heartbeat.doing("building the model")
        language_model, evidence = builder.proven_model()
        prepared, lora = language_model.prepared, self.techniques.lora
        for line in (
            *teach_ends(prepared, self.tokenizer, self.ends, self.config.model.adapter, lora),
            *untrained_tokens(prepared, self.tokenizer, self.data, lora),
        ):
            self.screen.note(line)
        evidence += builder.prove_objective(language_model, self.objective, self.plan)
        resume_check.check_model(prepared, builder.techniques.options())
        self.folder.write(EVIDENCE, [dataclasses.asdict(observation) for observation in evidence])
        self.screen.evidence(evidence)
        return language_model

    def _keep_gradients(self, rows: int) -> None:
        """Update weights after the backward pass, not in it: a step of several micro-batches needs all gradients."""
        if self.train_step.in_backward:
            self.screen.note(refuse_halved(self.config.optimizer.in_backward, rows))
            self.builder.stage = self.builder.stage.with_whole_gradients()
            self.train_step.in_backward = None

    def _open_tracker(self) -> tracker.Tracker:
        return tracker.Tracker(
            self.config.tracking,
            self.folder.path,
            self.config.run.name,
            self.recipe,
            self.state.wandb_id,
            self.state.step,
            self.state.figures.get("train/step"),
            note=self.screen.note,
        )

    def _evaluation_steps(self) -> float:
        """About how many steps take as long as an evaluation, by their tokens; 0 without a deadline."""
        if self.data.evaluation is None or self.config.train.max_minutes is None:
            return 0.0
        epoch = self.plan.summary()
        step_tokens = epoch["tokens"] / epoch["steps_per_epoch"]
        return FORWARD * float(self.data.evaluation.summary()["tokens"]) / step_tokens

    def _schedule(self) -> Schedule:
        """The schedule of the run. A run that was started for fewer steps is extended to the last step of the plan."""
        state, steps = self.state, self.plan.steps
        new = Schedule.of(self.config.schedule, self.peak_rate, steps)
        schedule = self.run_state.schedule(new)
        if not self.folder.extends and schedule.planned == steps:
            return schedule
        if state.step:
            schedule, text = self.end.extended(schedule, new, self.plan, self.run_state.go_back)
            self.screen.note(text)
        self.folder.extend(self.recipe)
        return schedule

    def run(self) -> dict[str, Any]:
        """Train from the current state to the last step. Returns the last value of each metric."""
        with (
            SIGNALS.deferred(),
            self.tracker,
            self.run_state.checkpoints,
            self.builder.oom_context("Training", MemoryPhase.training),
        ):
            try:
                self.run_state.check_room(
                    self.plan.steps,
                    self.facts.optimizer,
                    export_all=not self.techniques.lora.enabled,
                    evaluates=self.held_out is not None or self.end.asks,
                )
                self.energy.meter.start()
                self.screen.start(self.plan.steps, self.folder.path.name, self.state.step)
                if self.questions and self.state.step == 0:
                    self._ask_questions("before")
                self.end.require_time()
                with phase("Training", self.plan.steps, STEPS, False, FIRST_STEPS) as self.training:
                    self._loop()
                self.clock.stop()
                return self._pause() if self._pauses() else self._finish()
            except Stopped as stop:
                self._stop(stop)
                raise
            except LostImageError as error:
                self._stop_at(error)
                raise
            finally:
                self.close()

    def close(self) -> None:
        """End the loader processes and the measurement of energy. This comes last: after a signal the checkpoint must
        not wait for loader processes."""
        for loading in (self.loader, self.held_out):
            if loading is not None:
                loading.close()
        self.energy.close()

    def _loop(self) -> None:
        config, state, statistics = self.config, self.state, self.monitor.statistics
        meter = self.meter = self.builder.meter(self.model, self.plan, state.tokens, state.supervised_tokens)
        self.clock.start(state.step)
        if state.step:  # a signal may have interrupted the evaluation, or `fxtune finish` may have been given
            self._end_step(evaluate=state.evaluation_due, save=state.evaluation_due, looks=True)
        for step, lr, metrics in self.steps() if not self._pauses() else ():
            self._log_due_line()
            statistics.add(metrics)
            meter.add(step.index, step.wait_seconds)
            self.training.done = step.index + 1
            state.step, state.tokens, state.supervised_tokens = step.index + 1, meter.tokens, meter.supervised_tokens
            last = state.step == self.schedule.last
            evaluate = self.end.evaluation_due(state.step, self.schedule)
            save = (
                self.end.begins_end(self.schedule, self.plan.full_steps)
                or last
                or _due(state.step, config.checkpoint.every)
            )
            looks = state.step % config.train.log_every == 0 or self.end.looks(state.step)
            # A run may end with any evaluation that can stop it.
            self.line_due, self.lr = last or looks or (evaluate and config.train.stop.patience > 0), lr
            state.evaluation_due = evaluate
            if self.world.size == 1:  # several ranks agree on a signal in the next step
                SIGNALS.check()
            if self.line_due:
                statistics.post()
                if evaluate or save or not self.logs_late or self.end.looks(state.step):
                    self._log_due_line()
            self._stop_if_not_finite()
            self._end_step(evaluate, save, looks)
            if self._pauses():
                break

    def _pauses(self) -> bool:
        """Whether train.pause_after ends this process here, before the end of the run."""
        after = self.config.train.pause_after
        return after is not None and after <= self.state.step < self.schedule.last

    def _end_step(self, evaluate: bool, save: bool, looks: bool) -> None:
        """Evaluate if it is due, decide whether the run ends early, and save if it is due. `looks`: see
        RunEnd.decide()."""
        if evaluate:
            with self.meter.paused():
                save = self._evaluate() or save
        decision = self.end.decide(self.schedule, evaluate, looks)
        if decision is not None:
            self._log_due_line()
        if decision is not None and decision.origin is not None and not self.run_state.go_back(decision.origin):
            self.screen.note("The decay begins from the present weights.")
            self.state.branch_step = None
            decision = self.end.decide(self.schedule, evaluate, looks)
        if decision is not None:
            self._end_early(decision)
            save = True
            if self.state.step == self.schedule.last and not evaluate:  # the last step of a run is evaluated
                with self.meter.paused():
                    self._evaluate()
        if save:
            self.run_state.save()

    def _end_early(self, decision: Decision) -> None:
        """Follow a decision about the end of the run. The caller must save the state, which holds the decision."""
        self.monitor.report()  # the bad steps so far are steps of the old plan
        self.end.take(decision)
        self.schedule = decision.schedule
        self._set_plan(self.plan.until(self.schedule.last, self.schedule.dropped))
        self.meter.plan = self.plan
        self.training.total = self.schedule.last
        self.screen.ends_at(self.schedule.last)
        self.screen.note(decision.text)
        self.log.log({"train/last_step": self.schedule.last, "train/dropped_steps": self.schedule.dropped})

    def steps(self) -> Iterator[tuple[StepBatches, float, Metrics]]:
        """Take the remaining optimizer steps. Yields each step, its learning rate, and its metrics on the device."""
        self.model.train()
        index = self.first_step = self.state.step
        while index < self.plan.steps:
            failed, plan = None, self.plan
            self.loader = Loader(self.builder.own(plan), self.config.loader, self.world.device)
            for step in self.loader.steps(index):
                index = step.index
                self._announce_stage(index)
                lr = self.schedule.rate(index)
                metrics = catch_out_of_memory(partial(self._try_step, step, lr))
                if isinstance(metrics, (MemoryExhausted, str)):
                    failed = metrics
                    break
                yield step, lr, metrics
                index += 1
                if self.plan is not plan:  # the run ends early
                    break
            del step  # and the batches on the device
            self.loader.close()
            if isinstance(failed, str):
                self._repeat_with_fastest_kernels(failed)
            elif failed is not None:
                self._halve(index, failed)

    def _try_step(self, step: StepBatches, lr: float) -> Metrics | str:
        """step(), or the operator that has no deterministic kernel, if the run goes on without one."""
        try:
            return self.step(step, lr)
        except (RuntimeError, UserError) as error:
            if (operator := self.builder.nondeterministic(error)) is None:
                raise
        return operator

    def _repeat_with_fastest_kernels(self, operator: str) -> None:
        """Repeat the step in which `operator` turned out to have no deterministic kernel. It changed no weight."""
        self.batch_sizes.free_memory()
        self.train_step.drop()
        self.builder.use_fastest_kernels(operator)
        self.screen.note(self.builder.notes[-1])

    def step(self, step: StepBatches, lr: float) -> Metrics:
        """Take one TrainStep. Handles signals, the checkpoint in progress, and out-of-memory errors."""
        train_step, first = self.train_step, step.index == self.first_step or self._has_new_rows(step.index)
        normalizer = self.objective.normalizer(self.plan, step.index)
        self.world.heartbeat.doing(FORWARD_BACKWARD, step.index + 1)
        self.rank_report.waited += step.wait_seconds
        name = f"Step {step.index + 1:,} of {self.plan.steps:,}"
        name += ", compiling" if first and self.techniques.compile.enabled else ""
        counted = phase(
            name, self.plan.micro_batches(step.index) // self.world.data_ranks, MICRO_BATCHES, announce=first
        )
        if train_step.in_backward:  # the pass changes the weights
            self.run_state.checkpoints.wait_for_copy()
        # Interruptible, because nothing has changed yet, and compiling can take minutes.
        with self._interruptible(changes=train_step.in_backward is not None), counted as work:
            batches = work.over(step.micro_batches)
            passes = partial(train_step.backward, batches, normalizer, step.data_step, step.counted, lr)
            backward = partial(self.rank_report.timed, passes)
            agree = self.rank_report.agree if self._collects(step.index + 1) else None
            # A signal between two averages of the ranks' weights waits for the next average. A run that is saved there
            # resumes with the same bits.
            metrics = together(self.world, backward, train_step.start_sums, train_step.ranks_agree, agree)
        # Ranks that have agreed on a step take it: a rank that runs out of memory from here on ends the run.
        self.run_state.checkpoints.wait_for_copy()  # PowerSGD's sums change its state, and the update the weights
        clipping: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.world.size > 1:
            clipping = partial(self.builder.oom_context, f"Clipping in step {step.index + 1}")
        with clipping():
            metrics = train_step.sum_over_ranks(metrics)
        with self.rank_report.timer.part(UPDATE):
            with clipping():
                train_step.clip(metrics)
            # An update that runs out of memory is not repeated: some weights may be updated already.
            with self.builder.oom_context(f"The update of step {step.index + 1}"):
                train_step.update(metrics, lr, step.data_step)
        return metrics

    def _has_new_rows(self, index: int) -> bool:
        """Whether rows have another length from step `index` on."""
        if index <= self.plan.sizes.dropped:
            return False
        before, now = (self.plan.step_rows.starts[self.plan.stage(step)] for step in (index - 1, index))
        return now.length != before.length

    def _announce_stage(self, index: int) -> None:
        """If rows have another length from step `index` on, say so and free the recordings of the earlier length."""
        if self._has_new_rows(index) and index > self.first_step:
            self.screen.note(f"From step {index + 1} on: {self.plan.step_rows.text(self.plan.stage(index))}.")
            self._drop_recordings()

    @contextmanager
    def _interruptible(self, changes: bool = False) -> Iterator[None]:
        """In the body a signal raises Stopped at once, unless the body `changes` the weights. With several ranks the
        signal is only recorded: the ranks must agree first, to stop together."""
        with SIGNALS.interruptible() if self.world.size == 1 and not changes else SIGNALS.held():
            yield

    def _collects(self, step: int) -> bool:
        """Whether the ranks exchange their figures after `step` steps: if the plan has a log line there."""
        return step == self.plan.steps or step % self.config.train.log_every == 0 or self.end.looks(step)

    def _halve(self, index: int, exhausted: MemoryExhausted) -> None:
        """Halve the micro-batches from step `index` on. Step `index` did not fit and is repeated."""
        if self.train_step.in_backward:  # two micro-batches would need all gradients
            raise self._out_of_memory_error("training", self.plan.sizes.micro_batch_size, exhausted.reason)
        self.batch_sizes.free_memory()  # also waits for gradients that are still being added up
        self.train_step.drop()
        sizes = self.plan.sizes
        hint = f"Step {index + 1} is repeated; its {self.plan.rows(index)} rows and its loss stay as they are. "
        hint += "Code is compiled for the new shape. " if self.techniques.compile.enabled else ""
        rows = self.batch_sizes.halve(
            "training",
            sizes.micro_batch_size,
            exhausted,
            sizes.global_batch_size,
            hint,
            multiple=self.plan.stream.rows_of_group,
        )
        self._set_plan(self.plan.with_micro_batch_size(rows))
        self.tracker.log(self.state.step, {"train/micro_batch_size": self.plan.sizes.micro_batch_size})

    def _set_plan(self, plan: Plan) -> None:
        self.plan = self.bad_batches.plan = plan

    def _drop_recordings(self) -> None:
        """Free the memory of recorded CUDA graphs; they are recorded again."""
        self.techniques.compile.drop()
        if self.train_step.recorder:
            self.train_step.recorder.drop()

    def _out_of_memory_error(self, part: str, rows: int, why: str) -> HardwareError:
        """Save the state and return the error that `part` ran out of memory at `rows` rows and cannot halve them."""
        if part == "training":
            rows = self.plan.micro_rows(self.state.step)  # a micro-batch has more rows where rows are shorter
        message = out_of_memory_message(part, rows, why)
        with SIGNALS.deferred():
            self._log_due_line()
            try:
                if self.train_step.torn:
                    self.run_state.checkpoints.wait()
                    message += "\nSome weights of this step were updated and others were not, so it is not saved."
                else:
                    self._ensure_saved()
                if saved := self.run_state.saved:
                    message += f"\nSaved after step {saved}: the same command resumes there, given more memory."
            except StorageError as error:
                message += f"\n{error}"
        if part == "training":
            return self.builder.out_of_memory(
                message,
                MemoryPhase.training,
                rows,
                self.plan.max_row_length(self.state.step),
                self.plan.micro_batches(self.state.step),
            )
        row_length = self.held_out.max_row_length if part == "evaluation" and self.held_out else None
        return self.builder.out_of_memory(message, MemoryPhase.forward, rows, row_length)

    def _stop(self, stop: Stopped) -> None:
        """Save the state and tell the user how to resume the run. Returns when the state is on the disk."""
        self._log_due_line()
        self._ensure_saved()
        stop.outcome = self.log.stopped(self.plan.steps, again=self.config.run.resume is not Resume.never)

    def _stop_at(self, error: LostImageError) -> None:
        """Save the steps before an image that has gone, and let the error name its row. Ranks that share rows or
        weights cannot save in the middle of a pass: their run goes on from its last checkpoint."""
        if not self.world.shares and self.train_step.ranks_agree:
            self.train_step.drop()
            self._log_due_line()
            self._ensure_saved()
        data, held_out = self.config.data, self.data.evaluation
        tables = [*self.data.tables, *(held_out.tables if held_out and data.eval_sources else ())]
        for source, table in zip((*data.sources, *data.eval_sources), tables, strict=False):
            if error.table is not None and table.folder == error.table.folder:
                with suppress(UserError, OSError, StopIteration):  # the data file may have gone, too
                    error.place = place_of_image(source, table, error.image, data)
                break

    def _pause(self) -> dict[str, Any]:
        """Save the state. Returns the last figures of the run so far."""
        self._log_due_line()
        self._ensure_saved()
        self.energy.end(self.state.tokens)
        self.tracker.finish(exit_code=GOES_ON)
        self.screen.finish()
        self.screen.note(
            f"Paused after step {self.state.step} of {self.schedule.last} (train.pause_after). The same command "
            "without this key, or with a later step, goes on."
        )
        return dict(self.state.figures)

    def _ensure_saved(self) -> None:
        self.world.heartbeat.doing(SAVING)
        shared(self.world, self.run_state.ensure_saved, "waiting for rank 0 to save")

    def _stop_if_not_finite(self) -> None:
        """End the run if too many steps in a row were not finite."""
        if self.monitor.must_stop:
            self.monitor.statistics.settle()  # a step issued after the counted steps may be finite
        if self.monitor.must_stop:
            self._log_due_line()
            if self.monitor.last_finite > self.run_state.saved:  # the present weights are in no checkpoint yet
                self.run_state.save()
            self.run_state.checkpoints.wait()
            router = self.trial.broken_router(self.plan, self.monitor.statistics.step - 1)
            raise self.monitor.stop_error(self.run_state.checkpoints.folder, router)

    def _log_due_line(self) -> None:
        """Log the steps up to state.step if a line is due. Waits for the device to finish these steps."""
        if not self.line_due:
            return
        self.line_due = False
        figures = self.monitor.read()
        startup = self.log.started()
        self.clock.reached(self.state.step)
        timings = self.run_state.checkpoints.save_timings()
        self.clock.last_seconds["saving"] = timings.get("checkpoint/seconds", self.clock.last_seconds["saving"])
        end = self.end.end_time(self.schedule)
        self.log.log(
            {
                "train/epoch": self.plan.epoch(self.state.step),
                "train/lr": self.lr,
                **figures,
                **self.meter.read(self.rank_report.longest_wait()),
                **self.rank_report.figures(),
                **timings,
                **self.energy.log(self.state.tokens),
                **({} if end is None else {"train/end_time": end}),
                **self.clock.figures(),
                **startup,
            }
        )
        self.log.compiled(f"training, stage {self.plan.stage(self.state.step - 1)}")

    def _evaluate(self) -> bool:
        """Evaluate on the held-out data, and on the questions if their answers can stop the run; log the figures.
        Returns whether to save this state.
        """
        self.state.evaluation_due = self.held_out is not None or self.end.asks
        if not self.state.evaluation_due:
            return False
        self.run_state.average()
        self.world.heartbeat.doing("evaluating")
        figures: dict[str, float] = {}
        with self.clock.evaluation(), self.train_step.optimizer.averaged(), self._interruptible():
            if self.held_out is not None:
                measure, rows = self.held_out.measure, self.config.train.micro_batch_size
                multiple = self.held_out.loader.plan.stream.rows_of_group
                means = self.batch_sizes.run("evaluation", rows, measure, multiple)
                figures = {f"eval/{name}": value for name, value in means.items()}
            if self.end.asks:
                self._exact_match()
                figures |= self._question_figures()
        self.state.evaluation_due = False
        self.log.log({**figures, "eval/share_of_time": self.clock.evaluation_share})
        self.log.compiled("evaluation")
        return self.end.evaluated(figures, self.schedule)

    def _ask_questions(self, when: str) -> None:
        with self.clock.timed("questions"), self._interruptible():
            self._exact_match(when)
        self.log.log(self._question_figures())

    def _question_figures(self) -> dict[str, float]:
        assert self.questions is not None
        return {f"questions/{name}": value for name, value in self.questions.scores.items()}

    def _exact_match(self, when: str = "") -> float:
        """The share of questions with an exactly right answer. `when`: the name under which the answers are kept."""
        assert self.questions is not None
        self.world.heartbeat.doing("answering questions")
        return self.questions.ask(self.language_model.prepared, when, self.batch_sizes, self.world)

    def _finish(self) -> dict[str, Any]:
        """Export the best or the last weights, ask the questions again, and tell the user where everything is."""
        state, checkpoints = self.state, self.run_state.checkpoints
        kind = "adapter" if self.techniques.lora.enabled else "model"
        output = self.folder.path / kind
        self.monitor.refuse_broken_weights(
            self.plan.steps, checkpoints.folder, partial(self.trial.all_finite, self.plan)
        )
        step = self.run_state.load_best() if self.config.run.export is Export.best else state.step
        self.run_state.use_averages()
        if self.questions:
            self._ask_questions("after")
        figures = {**state.figures, "train/peak_lr": self.peak_rate}
        note = weights_note(step, state, self.config.train.stop.metric)
        if note:
            best = {"eval/best_loss": state.best_loss, "eval/best_match": state.best_match}
            figures |= {name: value for name, value in best.items() if value is not None}
            figures |= {"eval/best_step": state.best_step, "export/step": step}
        self.world.heartbeat.doing(EXPORTING)
        with self._interruptible(), phase(f"Exporting the {kind}"):  # the export is complete or absent
            if self.world.main:
                self.run_state.make_room(export_all=not self.techniques.lora.enabled)
            card = {
                "data": self.plan.fingerprint,
                "weights": note,
                "figures": figures,
                "machine": self.facts,
                "config": self.recipe,
            }
            prepared, question = self.language_model.prepared, ending_probe(self.data, self.ends)
            at = self.folder.path / CHECKPOINTS
            proof = export(prepared, self.tokenizer, output, card, self.builder, question, at)
        figures |= proof.figures()
        exported = f"The {kind} is in {output}" + f": the {note}" * bool(note)
        with phase("Writing the last checkpoint", announce=False):
            try:
                checkpoints.wait()
            except StorageError as error:
                raise StorageError(f"{error} All steps are done. {exported}.") from error
        if timings := checkpoints.save_timings():
            self.log.log(timings)
            figures |= timings
        if reason := state.ending.get("reason"):
            figures["train/ended_early"] = reason
        energy = self.energy.end(state.tokens)
        figures |= energy | self.clock.figures()
        self.tracker.summary(figures)
        self.folder.finish(figures)
        self.end.done()
        lines = self.monitor.summary(self.plan.steps)
        if self.train_step.recorder:
            lines.append(self.train_step.recorder.summary())
        lines += conclusion(self.config, self.data, state.figures)
        if proof.asked is not None and proof.ended_after is None:
            lines.append(
                f"The {kind} has not learned to end: {proof.ending()}. Train longer, or look at the ends of the rows "
                "with `fxtune preview`"
            )
        if self.world.main and self.config.run.report:
            lines.append(write_report(self.folder.path))
        lines.append(exported)
        if used := sentence(energy):
            lines.append(used)
        lines.append(f"Next: {', '.join(next_commands(self.config, self.folder.path))}")
        self.log.ended(self.questions, lines)
        return figures


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
