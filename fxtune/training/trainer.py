"""Training: one loop for LoRA and full fine-tuning, read top to bottom.

`Trainer.__init__` is the order in which a run comes to be, `run` is the loop, `step` is one optimizer step. There are no
callbacks: the loop names what it calls. The device is waited for only where figures are logged, and then for a step that is past:
the next one is under way by then. What is saved is in progress.py, what is said in journal.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fxtune.checkpoint.run_folder import RunFolder, claim
from fxtune.config.root import Config, OutOfMemory, Resume
from fxtune.data.batches.loader import Loader, StepBatches
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError, UserError
from fxtune.models.save import save_model
from fxtune.objectives.causal_lm import backward, is_finite, one_pass
from fxtune.optim.optimizer import Optimizer
from fxtune.optim.schedule import learning_rate
from fxtune.system.oom import BatchSizes, MemoryExhausted, catch_out_of_memory, out_of_memory_message
from fxtune.system.redact import redact
from fxtune.system.signals import SIGNALS
from fxtune.techniques.compile.cuda_graphs import Recorder
from fxtune.techniques.precision import Autocast
from fxtune.tracking import tracker
from fxtune.tracking.display import Display, display
from fxtune.tracking.throughput import Meter, StartupTimer
from fxtune.training.answers import AnswerEvaluation
from fxtune.training.bad_batches import BadBatches
from fxtune.training.builder import of_run
from fxtune.training.evaluation import HeldOutEvaluation
from fxtune.training.interval import Outcome
from fxtune.training.oom_advice import Stage
from fxtune.training.run_log import RunLog, introduction
from fxtune.training.run_state import Progress
from fxtune.training.spikes import SpikeWindow
from fxtune.training.step_monitor import StepMonitor


def run(config: Config) -> dict[str, Any]:
    """Train as `config` says and return the run's last figures. This is what `python -m fxtune +recipe=...` calls."""
    with SIGNALS:
        SIGNALS.check()  # the runs of a sweep end with the one that was told to
        plain = redact(
            json.loads(json.dumps(dataclasses.asdict(config)))
        )  # enums become their values; it is written to files
        folder = claim(config.run.name, config.run.dir, config.run.resume.value, plain)
        screen = display(config.tracking.display.value)
        try:
            if folder.finished:
                screen.note(
                    f"{folder.path} holds this run, finished: nothing to do. Set run.dir to a new folder to train again."
                )
                return folder.result()
            with SIGNALS.interruptible():
                trainer = Trainer(config, folder, screen, plain)
            return trainer.run()
        except UserError:
            folder.abandon()
            raise
        finally:
            screen.finish()
            folder.release()


class Trainer:
    def __init__(self, config: Config, folder: RunFolder, screen: Display, plain: dict[str, Any]):
        self.config, self.folder, self.screen, self.plain = config, folder, screen, plain
        self.startup = StartupTimer()
        # What cannot work is refused first, from configs alone: no weight is loaded, no row is read.
        setting, same = of_run(config, folder, screen.note)
        self.setting = setting
        self.world, self.facts = setting.world, setting.facts
        self.techniques, self.decided = setting.techniques, setting.decided
        if reasons := list(tracker.check(config.tracking, self.facts)):
            raise ConfigError("\n".join(reasons))
        self.startup.done("checks")
        self.tokenizer, self.data = setting.read(quarantine=folder.path / "quarantine.jsonl")
        self.plan = self.data.training
        same.read(self.data.tables)
        self.exam = AnswerEvaluation.open(
            config.data.questions, self.tokenizer, folder.path, config.data.chat_template
        )
        for line in (f"run folder: {folder.path}", *introduction(config, setting, self.data)):
            screen.note(line)
        self.startup.done("data")
        self.model = setting.build()
        self.startup.done("model")
        self.loss = setting.loss(self.model)
        evidence = setting.prove(self.loss)
        same.built(self.model, setting.techniques.options())
        folder.write("evidence.json", [dataclasses.asdict(seen) for seen in evidence])
        screen.evidence(evidence)
        self.startup.done("proofs")
        # The optimizer comes after the techniques: they replace modules, and a replaced weight would never move.
        with setting.oom_context("Making the optimizer"):
            self.optimizer = Optimizer(self.model, config.optimizer, self.techniques.compile.keep_gradients)
        self.loss_scale = self.techniques.precision.loss_scale(self.facts.dtype, self.world.device)
        pass_of = partial(one_pass, self.loss, self.techniques.precision, self.loss_scale)
        self.recorder = (
            Recorder(pass_of, self.world.device, self.optimizer.reached) if self.techniques.compile.records else None
        )
        self.spikes = SpikeWindow(
            self.world.device, config.train.spikes, config.train.spike_window, config.train.spike_threshold
        )
        suspects = BadBatches(folder.path, self.plan, self.tokenizer.decode, screen.note)
        self.numbers = StepMonitor(config.train, self.spikes, suspects, self.loss_scale.active)
        self.progress = Progress(
            folder, config.checkpoint, plain, self.model, self.optimizer, self.loss_scale, self.numbers, screen.note
        )
        with setting.oom_context("Loading the checkpoint"):
            self.state = self.progress.load(self.plan.fingerprint)
        halves = config.train.out_of_memory is OutOfMemory.halve
        self.halving = BatchSizes(
            self.world.device,
            self.state.rows,
            screen.note if halves else None,
            self._does_not_fit,
            self._drop_recordings,
        )
        self.plan = suspects.plan = self.plan.with_micro_batch_size(
            self.halving.rows("training", config.train.micro_batch_size)
        )
        self.held_out = (
            HeldOutEvaluation(
                self.data.evaluation, config.loader, self.world.device, self.loss, self.techniques.precision
            )
            if self.data.evaluation
            else None
        )
        self.loader: Loader | None = None
        self.tracker = tracker.Tracker(
            config.tracking,
            folder.path,
            config.run.name,
            plain,
            self.state.wandb_id,
            self.state.step,
            self.state.figures.get("train/step"),
            note=screen.note,
        )
        self.state.wandb_id = (
            self.tracker.wandb_id or self.state.wandb_id
        )  # a stretch without W&B does not part the rest
        self.journal = RunLog(folder, screen, self.tracker, self.state, self.startup, self.techniques.compile)
        self.reads_late = self.world.device.type == "cuda"
        """A GPU must not stand still while a line is written, so its next step is issued first."""
        self.due: float | None = None
        """The learning rate of a step whose line is due: it is read when the next step is under way."""

    def run(self) -> dict[str, Any]:
        """From the state that is there to the last step. Returns the last value of each metric."""
        with SIGNALS.deferred(), self.tracker, self.progress, self.setting.oom_context("Training", Stage.training):
            try:
                self.progress.check_room(self.plan.steps, self.facts.optimizer, whole=not self.techniques.lora.enabled)
                self.screen.start(self.plan.steps, self.folder.path.name, self.state.step)
                if self.exam and self.state.step == 0:
                    self._ask("before")
                self.startup.done("optimizer and questions")
                self._loop()
                return self._finish()
            except Stopped as stop:
                self._stop(stop)
                raise
            finally:
                self.close()

    def close(self) -> None:
        """End the processes that load data: last of all, for a signal's checkpoint does not wait for them."""
        for loading in (self.loader, self.held_out):
            if loading is not None:
                loading.close()

    def _loop(self) -> None:
        config, state, plan, interval = self.config, self.state, self.plan, self.numbers.interval
        meter = self.work = self.meter()
        if state.evaluation_due:  # a signal broke it off
            self._evaluate()
            self.progress.save()
        for step, lr, outcome in self.steps():
            if self.due is not None:
                self._line(self.due)
            interval.add(*outcome)
            meter.add(step.index, step.wait_seconds)
            state.step, state.tokens, state.supervised_tokens = step.index + 1, meter.tokens, meter.supervised_tokens
            last = state.step == plan.steps
            evaluate, save = (
                last or _due(state.step, every) for every in (config.train.eval_every, config.checkpoint.every)
            )
            self.due = lr if last or state.step % config.train.log_every == 0 else None
            state.evaluation_due = evaluate
            SIGNALS.check()
            if self.due is not None:
                interval.post()
                if evaluate or save or not self.reads_late:
                    self._line(self.due)
            self._stop_on_bad_numbers()
            if evaluate:
                with meter.paused():
                    save = self._evaluate() or save
            if save:
                self.progress.save()

    def _stop(self, stop: Stopped) -> None:
        """Save what the run has come to, and say how it goes on. Returns when it is on the disk."""
        if self.due is not None:
            self._line(self.due)
        self.progress.secure()
        stop.outcome = self.journal.stopped(self.plan.steps, again=self.config.run.resume is not Resume.never)

    def _line(self, lr: float) -> None:
        """Log the steps up to state.step. Waits for the device to have done them."""
        self.due = None
        figures = self.numbers.read()
        self.journal.started()
        self.journal.log(
            {
                "train/epoch": self.plan.epoch(self.state.step),
                "train/lr": lr,
                **figures,
                **self.work.read(),
                **self.progress.checkpoints.save_timings(),
            }
        )
        self.journal.compiled("training")

    def steps(self) -> Iterator[tuple[StepBatches, float, Outcome]]:
        """Take the optimizer steps that are left, each when it is asked for: which one, at what learning rate, what step() gave.

        Training and `fxtune bench` share it, so what the one measures is what the other does.
        """
        self.model.train()
        index = self.state.step
        while index < self.plan.steps:
            exhausted = None
            self.loader = Loader(self.plan, self.config.loader, self.world.device)
            for step in self.loader.steps(index):
                lr, index = (
                    learning_rate(self.config.schedule, self.config.optimizer.lr, step.index, self.plan.steps),
                    step.index,
                )
                outcome = catch_out_of_memory(partial(self.step, step, lr))
                if isinstance(outcome, MemoryExhausted):
                    exhausted = outcome
                    break
                yield step, lr, outcome
                index += 1
            del step  # with what it holds on the device
            self.loader.close()
            if exhausted is not None:
                self._halve(index, exhausted)

    def meter(self) -> Meter:
        """Of the work that the steps do, from what the run has seen so far."""
        autocast = self.techniques.precision.autocast
        return Meter(
            self.model,
            self.plan,
            self.world.device,
            self.state.tokens,
            self.state.supervised_tokens,
            dtype=None if autocast is Autocast.none else autocast.value,
        )

    def step(self, step: StepBatches, lr: float) -> Outcome:
        """One optimizer step. Returns the mean loss in nats a supervised token, the gradient's norm before clipping, whether
        both were finite (if not, nothing was updated), the loss scale that was used, and the loss above which this is a spike:
        scalars on the device.
        """
        torch.manual_seed(
            _derive(self.config.run.seed, step.index)
        )  # dropout depends on the step alone, so resume is exact
        supervised = self.plan.supervised(
            step.index
        )  # of all micro-batches together: the split cannot be seen in the loss
        with SIGNALS.interruptible():  # nothing has changed yet, and compiling can take minutes
            loss = backward(
                self.loss, step.micro_batches, supervised, self.techniques.precision, self.loss_scale, self.recorder
            )
        self.loss_scale.unscale(list(self.optimizer.names))
        norm = self.optimizer.clip(self.config.train.max_grad_norm)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        limit = self.spikes.limit(loss)
        self.progress.checkpoints.wait_for_copy()
        with self.setting.oom_context(
            f"The update of step {step.index + 1}"
        ):  # some of it may be done: it is not tried again
            self.optimizer.step(lr, self.spikes.taken_up(limit, loss, finite))
        scale = self.loss_scale.scale
        self.loss_scale.update(finite)
        return Outcome(loss, norm, finite, scale, limit)

    def _halve(self, index: int, found: MemoryExhausted) -> None:
        """Cut the steps from `index` on, of which the first did not fit and is taken again, into smaller micro-batches."""
        self.halving.free_memory()  # which also waits for what is still added to gradients
        self.optimizer.drop()  # they hold a part of the sum
        sizes = self.plan.sizes
        again = f"Step {index + 1} is taken again; its {sizes.global_batch_size} rows and its loss stay as they are. "
        again += "Code is compiled for the new shape. " if self.techniques.compile.enabled else ""
        self.plan = self.numbers.suspects.plan = self.plan.with_micro_batch_size(
            self.halving.halve("training", sizes.micro_batch_size, found, sizes.global_batch_size, again)
        )
        self.tracker.log(self.state.step, {"train/micro_batch_size": self.plan.sizes.micro_batch_size})

    def _drop_recordings(self) -> None:
        """They own memory that nothing else can use, and are made again."""
        self.techniques.compile.drop()
        if self.recorder:
            self.recorder.drop()

    def _does_not_fit(self, part: str, rows: int, why: str) -> HardwareError:
        """The error where `part` ran out of memory with `rows` rows at once, and no fewer can be tried. The state is saved."""
        what = out_of_memory_message(part, rows, why)
        with SIGNALS.deferred():
            if self.due is not None:
                self._line(self.due)
            try:
                self.progress.secure()
                told = (
                    f"Saved after step {self.state.step}: the same command goes on there, where there is more memory."
                )
                what += f"\n{told}" if self.state.step else ""
            except StorageError as error:
                what += f"\n{error}"
        if part == "training":
            return self.setting.out_of_memory(what, Stage.training, rows, self.plan.max_row_length(self.state.step))
        width = self.held_out.widest if part == "evaluation" and self.held_out else None
        return self.setting.out_of_memory(what, Stage.forward, rows, width)

    def _evaluate(self) -> bool:
        """Log loss and perplexity of the held-out data. Returns whether this is the best so far, to be kept."""
        if self.held_out is None:
            self.state.evaluation_due = False
            return False
        with SIGNALS.interruptible():
            loss = self.halving.run("evaluation", self.config.train.micro_batch_size, self.held_out.measure)
        self.state.evaluation_due = False
        self.journal.log({"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))})
        self.journal.compiled("evaluation")
        if self.state.best_loss is not None and not loss < self.state.best_loss:
            return False
        self.state.best_loss, self.state.best_step = loss, self.state.step
        return self.config.checkpoint.keep_best

    def _ask(self, when: str) -> None:
        assert self.exam is not None
        with SIGNALS.interruptible():
            right = self.exam.ask(self.model, when, self.halving)
        self.journal.log({"questions/exact_match": right})

    def _stop_on_bad_numbers(self) -> None:
        """End the run where too many steps in a row were not finite, as far as they were read."""
        if self.numbers.too_many:
            self.numbers.interval.settle()  # a step that was under way meanwhile, and may have been sound again
        if self.numbers.too_many:
            if self.due is not None:
                self._line(self.due)
            if self.numbers.last_sound > self.progress.saved:  # its weights are in no checkpoint yet
                self.progress.save()
            self.progress.checkpoints.wait()
            raise self.numbers.too_many_error(self.progress.checkpoints.folder)

    def _finish(self) -> dict[str, Any]:
        """Export what was trained, ask the questions again, say where everything is."""
        kind = "adapter" if self.techniques.lora.enabled else "model"
        output = self.folder.path / kind
        self.numbers.refuse_broken(
            self.plan.steps,
            self.progress.checkpoints.folder,
            lambda step: is_finite(
                self.loss, self.plan.batch(step, 0).to(self.world.device), self.techniques.precision
            ),
        )
        if self.exam:
            self._ask("after")
        with SIGNALS.interruptible():  # what is there then is whole or absent
            save_model(
                self.model,
                self.tokenizer,
                output,
                card={
                    "data": self.plan.fingerprint,
                    "figures": self.state.figures,
                    "facts": self.facts,
                    "config": self.plain,
                },
            )
        self.progress.checkpoints.wait()
        if figures := self.progress.checkpoints.save_timings():
            self.journal.log(figures)
        self.tracker.summary(self.state.figures)
        self.folder.finish(self.state.figures)
        recorded = [self.recorder.told()] if self.recorder else []
        self.journal.ended(self.exam, [*self.numbers.told(self.plan.steps), *recorded, f"The {kind} is in {output}"])
        return self.state.figures


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _derive(seed: int, step: int) -> int:
    """A seed for each step, far from those of its neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()) >> 1
