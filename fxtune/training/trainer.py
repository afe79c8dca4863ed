"""Training: one loop for LoRA and full fine-tuning, read top to bottom.

`Trainer.__init__` shows the order in which a run is built, `_loop` is the loop. There are no callbacks: the loop calls
everything by name. It waits for the device only to log figures; by then the next step is already issued.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import RunFolder, claim
from fxtune.config.introspection import with_defaults
from fxtune.config.root import Config, Export, OutOfMemory, Resume
from fxtune.data.batches.loader import Loader, StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.data.config import AUTO
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError, UserError
from fxtune.models.save import save_model
from fxtune.objectives.base import Objective
from fxtune.objectives.causal_lm import CausalLM
from fxtune.system import progress
from fxtune.system.oom import BatchSizes, MemoryExhausted, catch_out_of_memory, out_of_memory_message
from fxtune.system.progress import MICRO_BATCHES, STEPS, phase
from fxtune.system.redact import redact
from fxtune.system.signals import SIGNALS
from fxtune.tracking import tracker
from fxtune.tracking.display import Display, display
from fxtune.tracking.throughput import StartupTimer
from fxtune.training.agreement import together
from fxtune.training.answers import AnswerEvaluation
from fxtune.training.bad_batches import BadBatches
from fxtune.training.builder import build_for_run
from fxtune.training.evaluation import HeldOutEvaluation, gives_finite_loss
from fxtune.training.oom_advice import MemoryPhase
from fxtune.training.run_log import RunLog, introduction
from fxtune.training.run_state import RunState, weights_note
from fxtune.training.step import Metrics
from fxtune.training.step_monitor import StepMonitor


def run(config: Config, objective: Objective | None = None) -> dict[str, Any]:
    """Train as `config` says and return the run's last figures. `objective` is minimised; None means CausalLM."""
    with SIGNALS:
        SIGNALS.check()  # a signal ends a whole sweep, not one of its runs
        # Enums become their values: the recipe is written to files.
        recipe = redact(json.loads(json.dumps(dataclasses.asdict(config))))
        with World.create(config.run.device, config.run.memory_gib) as world:
            return _run_in_folder(_claim(world, config, recipe), config, recipe, objective, world)


def _run_in_folder(
    folder: RunFolder, config: Config, recipe: dict[str, Any], objective: Objective | None, world: World
) -> dict[str, Any]:
    packing = (folder.config.get("data") or {}).get("packing", AUTO)
    if config.data.packing == AUTO != packing:  # the run was begun before packing could be `auto`
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))
    shown = config.tracking.display.value if world.main else "none"
    screen = display(shown)
    progress.show(shown)
    try:
        if folder.finished:
            screen.note(
                f"{folder.path} holds this run, finished: nothing to do. Set run.dir to a new folder to train again."
            )
            return folder.result()
        with SIGNALS.interruptible():
            trainer = Trainer(config, folder, screen, recipe, objective)
        return trainer.run()
    except UserError:
        folder.abandon()
        raise
    finally:
        screen.finish()
        progress.hide()
        folder.release()


def _claim(world: World, config: Config, recipe: dict[str, Any]) -> RunFolder:
    """The run's folder: rank 0 finds and locks it, the others get its path."""
    run, completed = config.run, partial(with_defaults, Config)

    def work() -> RunFolder | None:
        return claim(run.name, run.dir, run.resume.value, recipe, completed) if world.main else None

    found = world.main_first(work, "waiting for rank 0 to find the run folder")
    path, resumed, before = world.broadcast(
        (found.path, found.resumed, found.config) if found else (Path(), False, {})
    )
    return found or RunFolder(path, resumed, None, before)


class Trainer:
    """One run. `recipe`: the config as plain data, without secrets."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        screen: Display,
        recipe: dict[str, Any],
        objective: Objective | None = None,
    ) -> None:
        self.config, self.folder, self.screen, self.recipe = config, folder, screen, recipe
        self.objective = objective or CausalLM()
        self.startup = StartupTimer()
        # Impossible recipes are refused first, from configs alone: no weight is loaded, no row is read.
        builder, resume_check = build_for_run(config, folder, screen.note)
        self.builder = builder
        self.world, self.facts, self.techniques = builder.world, builder.facts, builder.techniques
        if reasons := list(tracker.check(config.tracking, self.facts)):
            raise ConfigError("\n".join(reasons))
        self.startup.done("checks")
        self.tokenizer, self.data = builder.read(quarantine=folder.path / "quarantine.jsonl")
        self.world.heartbeat.doing("building the model")
        self.plan = self.data.training
        resume_check.check_data(self.data.tables)
        data = config.data
        self.questions = AnswerEvaluation.open(
            data.own_questions(), self.tokenizer, folder.path, data.chat_template, data.system
        )
        for line in (f"run folder: {folder.path}", *introduction(config, builder, self.data)):
            screen.note(line)
        self.startup.done("data")
        self.model = builder.build()
        self.startup.done("model")
        self.language_model = builder.language_model(self.model)
        evidence = builder.prove(self.language_model)
        resume_check.check_model(self.model, builder.techniques.options())
        folder.write("evidence.json", [dataclasses.asdict(one) for one in evidence])
        screen.evidence(evidence)
        self.startup.done("proofs")
        # The optimizer is built after the techniques: they replace modules, and it would go on updating a replaced
        # weight.
        self.train_step = builder.train_step(self.language_model, self.objective)
        self.bad_batches = BadBatches(
            folder.path, self.plan, self.tokenizer.decode, screen.note, writes=self.world.main
        )
        self.monitor = StepMonitor(
            config.train, self.train_step.spikes, self.bad_batches, self.train_step.loss_scale.active
        )
        self.run_state = RunState(folder, config.checkpoint, self.model, self.train_step, self.monitor, screen.note)
        with phase("Loading the checkpoint", announce=False), builder.oom_context("Loading the checkpoint"):
            self.state = self.run_state.load(self.plan.fingerprint)
        self.run_state.compare_ranks()
        self.batch_sizes = BatchSizes(
            self.world.device,
            self.state.rows,
            screen.note if config.train.out_of_memory is OutOfMemory.halve else None,
            self._out_of_memory_error,
            self._drop_recordings,
        )
        self._cut_plan(self.batch_sizes.rows("training", config.train.micro_batch_size))
        self.held_out: HeldOutEvaluation | None = None
        if self.data.evaluation:
            self.held_out = builder.held_out(self.data.evaluation, self.language_model, self.objective)
        self.loader: Loader | None = None
        self.tracker: tracker.Tracker = tracker.NoTracker()
        if self.world.main:
            self.tracker = tracker.Tracker(
                config.tracking,
                folder.path,
                config.run.name,
                recipe,
                self.state.wandb_id,
                self.state.step,
                self.state.figures.get("train/step"),
                note=screen.note,
            )
        # The id is kept even if W&B is off now: when the run is resumed with W&B on, it continues the same W&B run.
        self.state.wandb_id = self.tracker.wandb_id or self.state.wandb_id
        self.log = RunLog(folder, screen, self.tracker, self.state, self.startup, self.techniques.compile)
        self.logs_late = self.world.device.type == "cuda"
        """On a GPU a line is logged after the next step is issued, so that the device is never idle."""
        self.unlogged_lr: float | None = None
        """The learning rate of a step whose log line is due; None: no line is due."""

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
                    self.plan.steps, self.facts.optimizer, export_all=not self.techniques.lora.enabled
                )
                self.screen.start(self.plan.steps, self.folder.path.name, self.state.step)
                if self.questions and self.state.step == 0:
                    self._ask_questions("before")
                self.startup.done("optimizer and questions")
                with phase("Training", self.plan.steps, STEPS, announce=False) as self.training:
                    self._loop()
                return self._finish()
            except Stopped as stop:
                self._stop(stop)
                raise
            finally:
                self.close()

    def close(self) -> None:
        """End the loader processes. This comes last, so that the checkpoint after a signal does not wait for them."""
        for loading in (self.loader, self.held_out):
            if loading is not None:
                loading.close()

    def _loop(self) -> None:
        config, state, plan, statistics = self.config, self.state, self.plan, self.monitor.statistics
        meter = self.meter = self.builder.meter(self.model, plan, state.tokens, state.supervised_tokens)
        if state.evaluation_due:  # a signal interrupted the evaluation
            self._evaluate()
            self.run_state.save()
        for step, lr, metrics in self.steps():
            if self.unlogged_lr is not None:
                self._log_line(self.unlogged_lr)
            statistics.add(metrics)
            meter.add(step.index, step.wait_seconds)
            self.training.done = step.index + 1
            state.step, state.tokens, state.supervised_tokens = step.index + 1, meter.tokens, meter.supervised_tokens
            last = state.step == plan.steps
            evaluate, save = (
                last or _due(state.step, every) for every in (config.train.eval_every, config.checkpoint.every)
            )
            self.unlogged_lr = lr if last or state.step % config.train.log_every == 0 else None
            state.evaluation_due = evaluate
            if self.world.size == 1:  # several ranks agree on a signal in the next step
                SIGNALS.check()
            if self.unlogged_lr is not None:
                statistics.post()
                if evaluate or save or not self.logs_late:
                    self._log_line(self.unlogged_lr)
            self._stop_if_not_finite()
            if evaluate:
                with meter.paused():
                    save = self._evaluate() or save
            if save:
                self.run_state.save()

    def steps(self) -> Iterator[tuple[StepBatches, float, Metrics]]:
        """Take the remaining optimizer steps. Yields each step, its learning rate, and its metrics on the device."""
        self.model.train()
        index = self.first_step = self.state.step
        while index < self.plan.steps:
            exhausted = None
            self.loader = Loader(self._own(self.plan), self.config.loader, self.world.device)
            for step in self.loader.steps(index):
                index = step.index
                lr = self.builder.learning_rate(index, self.plan.steps)
                metrics = catch_out_of_memory(partial(self.step, step, lr))
                if isinstance(metrics, MemoryExhausted):
                    exhausted = metrics
                    break
                yield step, lr, metrics
                index += 1
            del step  # and the batches on the device
            self.loader.close()
            if exhausted is not None:
                self._halve(index, exhausted)

    def step(self, step: StepBatches, lr: float) -> Metrics:
        """Take one TrainStep. Handles signals, the checkpoint in progress, and out-of-memory errors."""
        take, first = self.train_step, step.index == self.first_step
        normalizer = self.objective.normalizer(self.plan, step.index)
        self.world.heartbeat.doing("forward and backward", step.index + 1)
        name = f"Step {step.index + 1:,} of {self.plan.steps:,}"
        name += ", compiling" if first and self.techniques.compile.enabled else ""
        counted = phase(
            name, self.plan.micro_batches(step.index) // self.world.data_ranks, MICRO_BATCHES, announce=first
        )
        # Interruptible, because nothing has changed yet, and compiling can take minutes.
        with self._interruptible(), counted as work:
            batches = work.over(step.micro_batches)
            backward = partial(take.backward, batches, normalizer, step.index, step.own)
            # A signal between two averages of the ranks' weights waits for the next: what is saved there goes on as if
            # nothing had happened.
            metrics = together(self.world, backward, take.start_sums, stops=take.ranks_agree)
        # Ranks that have agreed on a step take it: one that runs out of memory from here on ends the run.
        with nullcontext() if self.world.size == 1 else self.builder.oom_context(f"Clipping in step {step.index + 1}"):
            metrics = take.sum_over_ranks(metrics)
            take.clip(metrics)
        self.run_state.checkpoints.wait_for_copy()
        # Not repeated when it runs out of memory: some weights may be updated already.
        with self.builder.oom_context(f"The update of step {step.index + 1}"):
            take.update(metrics, lr)
        return metrics

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """A signal ends the body at once. With several ranks it waits: they must agree first, to stop together."""
        with SIGNALS.interruptible() if self.world.size == 1 else SIGNALS.held():
            yield

    def _halve(self, index: int, found: MemoryExhausted) -> None:
        """Halve the micro-batches from step `index` on. That step did not fit and is repeated."""
        self.batch_sizes.free_memory()  # which also waits for gradients that are still being added up
        self.train_step.drop()
        sizes = self.plan.sizes
        again = f"Step {index + 1} is repeated; its {sizes.global_batch_size} rows and its loss stay as they are. "
        again += "Code is compiled for the new shape. " if self.techniques.compile.enabled else ""
        self._cut_plan(
            self.batch_sizes.halve("training", sizes.micro_batch_size, found, sizes.global_batch_size, again)
        )
        self.tracker.log(self.state.step, {"train/micro_batch_size": self.plan.sizes.micro_batch_size})

    def _cut_plan(self, micro_batch_size: int) -> None:
        self.plan = self.bad_batches.plan = self.plan.with_micro_batch_size(micro_batch_size)

    def _drop_recordings(self) -> None:
        """Free the memory of recorded CUDA graphs; they are recorded again."""
        self.techniques.compile.drop()
        if self.train_step.recorder:
            self.train_step.recorder.drop()

    def _out_of_memory_error(self, part: str, rows: int, why: str) -> HardwareError:
        """Save the state and return the error that `part` ran out of memory at `rows` rows and cannot halve them."""
        message = out_of_memory_message(part, rows, why)
        with SIGNALS.deferred():
            if self.unlogged_lr is not None:
                self._log_line(self.unlogged_lr)
            try:
                self.run_state.ensure_saved(alone=part == "questions")
                if self.state.step:
                    message += (
                        f"\nSaved after step {self.state.step}: the same command resumes there, given more memory."
                    )
            except StorageError as error:
                message += f"\n{error}"
        if part == "training":
            return self.builder.out_of_memory(
                message, MemoryPhase.training, rows, self.plan.max_row_length(self.state.step)
            )
        width = self.held_out.widest if part == "evaluation" and self.held_out else None
        return self.builder.out_of_memory(message, MemoryPhase.forward, rows, width)

    def _stop(self, stop: Stopped) -> None:
        """Save the state and tell the user how to resume the run. Returns when the state is on the disk."""
        if self.unlogged_lr is not None:
            self._log_line(self.unlogged_lr)
        self.run_state.ensure_saved()
        stop.outcome = self.log.stopped(self.plan.steps, again=self.config.run.resume is not Resume.never)

    def _stop_if_not_finite(self) -> None:
        """End the run if too many steps in a row were not finite."""
        if self.monitor.must_stop:
            self.monitor.statistics.settle()  # a step issued since may be finite
        if self.monitor.must_stop:
            if self.unlogged_lr is not None:
                self._log_line(self.unlogged_lr)
            if self.monitor.last_finite > self.run_state.saved:  # its weights are in no checkpoint yet
                self.run_state.save()
            self.run_state.checkpoints.wait()
            raise self.monitor.stop_error(self.run_state.checkpoints.folder)

    def _log_line(self, lr: float) -> None:
        """Log the steps up to state.step. Waits for the device to finish them."""
        self.unlogged_lr = None
        figures = self.monitor.read()
        self.log.started()
        self.log.log(
            {
                "train/epoch": self.plan.epoch(self.state.step),
                "train/lr": lr,
                **figures,
                **self.meter.read(),
                **self.run_state.checkpoints.save_timings(),
            }
        )
        self.log.compiled("training")

    def _evaluate(self) -> bool:
        """Evaluate on the held-out data and log the figures. Returns whether to keep this state as the best so far."""
        if self.held_out is None:
            self.state.evaluation_due = False
            return False
        self.run_state.average()
        with self._interruptible():
            figures = self.batch_sizes.run("evaluation", self.config.train.micro_batch_size, self.held_out.measure)
        self.state.evaluation_due = False
        self.log.log({f"eval/{name}": value for name, value in figures.items()})
        self.log.compiled("evaluation")
        if not figures["loss"] < (math.inf if self.state.best_loss is None else self.state.best_loss):  # also if NaN
            return False
        self.state.best_loss, self.state.best_step = figures["loss"], self.state.step
        return self.config.checkpoint.keep_best

    def _ask_questions(self, when: str) -> None:
        assert self.questions is not None
        share = 0.0
        with self._interruptible():
            if self.world.main:
                share = self.questions.ask(self.model, when, self.batch_sizes)
            share = self.world.broadcast(share, "waiting for rank 0 to ask the questions")
        self.log.log({"questions/exact_match": share})

    def _finish(self) -> dict[str, Any]:
        """Export the best or the last weights, ask the questions again, and tell the user where everything is."""
        state, whole_model = self.state, not self.techniques.lora.enabled
        kind = "model" if whole_model else "adapter"
        output = self.folder.path / kind
        self.monitor.refuse_broken_weights(self.plan.steps, self.run_state.checkpoints.folder, self._gives_finite_loss)
        step = state.step
        if self.config.run.export is Export.best and self.world.main:
            step = self.run_state.load_best()
        if self.questions:
            self._ask_questions("after")
        figures, note = dict(state.figures), weights_note(step, state)
        if note:
            figures |= {"eval/best_loss": state.best_loss, "eval/best_step": state.best_step, "export/step": step}
        card = {
            "data": self.plan.fingerprint,
            "weights": note,
            "figures": figures,
            "facts": self.facts,
            "config": self.recipe,
        }
        with self._interruptible(), phase(f"Exporting the {kind}"):  # the export is complete or absent
            if self.world.main:
                self.run_state.make_room(whole_model)
                save_model(self.model, self.tokenizer, output, card=card)
            self.world.agree(0, "waiting for rank 0 to export the weights")
        with phase("Writing the last checkpoint", announce=False):
            self.run_state.checkpoints.wait()
        if timings := self.run_state.checkpoints.save_timings():
            self.log.log(timings)
            figures |= timings
        self.tracker.summary(figures)
        self.folder.finish(figures)
        recorder = self.train_step.recorder
        recorded = [recorder.summary()] if recorder else []
        exported = f"The {kind} is in {output}" + f": the {note}" * bool(note)
        self.log.ended(self.questions, [*self.monitor.summary(self.plan.steps), *recorded, exported])
        return figures

    def _own(self, plan: Plan) -> Plan:
        """What this rank takes of `plan`: its micro-batches, and its piece of their rows."""
        world = self.world
        return plan.for_rank(world.data_rank, world.data_ranks).cut(world.context_rank, world.context_ranks)

    def _gives_finite_loss(self, step: int) -> bool:
        batch = self._own(self.plan).batch(step, 0).to(self.world.device)
        finite = gives_finite_loss(self.language_model, self.objective, batch, self.techniques.precision)
        return not self.world.agree(not finite, "trying the last weights")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
