"""Training: one loop for LoRA and full fine-tuning, read top to bottom.

`Trainer.__init__` is the order in which a run comes to be, `run` is the loop, `step` is one optimizer step. There are no
callbacks: the loop names what it calls. The device is waited for only where figures are logged, and then for a step that is past:
the next one is under way by then.
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

from fxtune import model as models
from fxtune import tracking
from fxtune.checkpoint import Checkpoints, TrainState
from fxtune.config import Config
from fxtune.data.loader import Loader, Step, load
from fxtune.display import Display, display
from fxtune.errors import ConfigError, NumbersError, UserError
from fxtune.generation import Exam
from fxtune.kernels.recorded import Recorder
from fxtune.loss import backward, mean_loss, one_pass
from fxtune.metrics import Meter, StartUp
from fxtune.optimizer import Optimizer
from fxtune.runfolder import RunFolder, claim
from fxtune.schedule import learning_rate
from fxtune.setting import Setting, out_of_memory
from fxtune.techniques.precision import Autocast

Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of a step, scalars on the device: loss, gradient norm, whether both were finite, loss scale (see Trainer.step)."""


def run(config: Config) -> dict[str, Any]:
    """Train as `config` says and return the run's last figures. This is what `python -m fxtune +recipe=...` calls."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))  # enums become their values
    folder = claim(config.run.name, config.run.dir, config.run.resume.value, plain)
    screen = display(config.tracking.display.value)
    try:
        if folder.finished:
            screen.note(f"{folder.path} holds this run, finished: nothing to do. Set run.dir to a new folder to train again.")
            return json.loads((folder.path / "result.json").read_text())
        return Trainer(config, folder, screen, plain).run()
    except UserError:
        folder.abandon()
        raise
    except torch.OutOfMemoryError as error:
        raise out_of_memory(error) from error
    finally:
        screen.finish()
        folder.release()


class Trainer:
    def __init__(self, config: Config, folder: RunFolder, screen: Display, plain: dict[str, Any]):
        self.config, self.folder, self.screen, self.plain = config, folder, screen, plain
        self.startup = StartUp()
        # What cannot work is refused first, from configs alone: no weight is loaded, no row is read.
        setting = Setting(config)
        self.world, self.facts = setting.world, setting.facts
        self.techniques, self.decided = setting.techniques, setting.decided
        if reasons := list(tracking.check(config.tracking, self.facts)):
            raise ConfigError("\n".join(reasons))
        self.startup.done("checks")
        self.tokenizer, self.data = setting.read(quarantine=folder.path / "quarantine.jsonl")
        self.plan = self.data.training
        self.held_out = Loader(self.data.evaluation, config.loader, self.world.device) if self.data.evaluation else None
        self.exam = Exam.open(config.data.questions, self.tokenizer, folder.path, config.data.chat_template)
        self._say_setting()
        self.startup.done("data")
        self.model = setting.build()
        self.startup.done("model")
        self.loss = setting.loss(self.model)
        evidence = setting.prove(self.loss)
        (folder.path / "evidence.json").write_text(json.dumps([dataclasses.asdict(seen) for seen in evidence], indent=1))
        screen.evidence(evidence)
        self.startup.done("proofs")
        if self.facts.dtype == "bfloat16" and not self.techniques.lora.enabled and not config.optimizer.stochastic_rounding:
            screen.note("The weights that are trained are bfloat16, where an update below 1/256 of a weight is lost: small "
                        "learning rates learn little. optimizer.stochastic_rounding=true loses none on average; "
                        "model.dtype=float32 with techniques.precision.autocast=bfloat16 loses none, for twice the memory.")
        # The optimizer comes after the techniques: they replace modules, and a replaced weight would never move.
        self.optimizer = Optimizer(self.model, config.optimizer, self.techniques.compile.keep_gradients)
        self.loss_scale = self.techniques.precision.loss_scale(self.facts.dtype, self.world.device)
        pass_of = partial(one_pass, self.loss, self.techniques.precision, self.loss_scale)
        self.recorder = Recorder(pass_of, self.world.device) if self.techniques.compile.records else None
        self.checkpoints = Checkpoints(folder.path / "checkpoints", config.checkpoint)
        self.state = self._load_state()
        self.tracker = tracking.Tracker(config.tracking, folder.path, config.run.name, plain, self.state.wandb_id,
                                        self.state.step, note=screen.note)
        self.state.wandb_id = self.tracker.wandb_id or self.state.wandb_id  # a stretch without W&B does not part the rest
        self.told: set[str] = set()
        self.reads_late = self.world.device.type == "cuda"
        """A GPU must not stand still while a line is written, so its next step is issued first."""

    def run(self) -> dict[str, Any]:
        """From the state that is there to the last step. Returns the last value of each metric."""
        with self.tracker:
            self.screen.start(self.plan.steps, self.folder.path.name, self.state.step)
            if self.exam and self.state.step == 0:
                self._log({"questions/exact_match": self.exam.ask(self.model, "before")})
            self.startup.done("optimizer and questions")
            self._loop()
            return self._finish()

    def _loop(self) -> None:
        config, state, plan = self.config, self.state, self.plan
        interval = Interval(state.skipped_steps, self.loss_scale.active)
        meter = self.meter()
        due: float | None = None  # the learning rate of a step whose line is due: it is read when the next step is under way
        for step, lr, outcome in self.steps():
            if due is not None:
                self._line(due, interval, meter)
            interval.add(*outcome)
            meter.add(step.index, step.waited)
            state.step, state.tokens, state.supervised_tokens = step.index + 1, meter.tokens, meter.supervised_tokens
            last = state.step == plan.steps
            evaluate, save = (last or _due(state.step, every) for every in (config.train.eval_every, config.checkpoint.every))
            due = lr if last or state.step % config.train.log_every == 0 else None
            if due is not None:
                interval.post()
                if evaluate or save or not self.reads_late:
                    self._line(due, interval, meter)
                    due = None
            if evaluate or save:
                with meter.paused():
                    best = evaluate and self._evaluate()
                    if save or best:
                        interval.settle()
                        state.skipped_steps = interval.skipped
                        self._save()

    def _line(self, lr: float, interval: Interval, meter: Meter) -> None:
        """Log the steps up to state.step. Waits for the device to have done them."""
        figures = interval.read()
        if "start-up" not in self.told:
            self.told.add("start-up")
            self.startup.done("first steps")
            self.screen.note(self.startup.told())
        self.state.skipped_steps = interval.skipped
        self._log({"train/epoch": self.plan.epoch(self.state.step), "train/lr": lr, **figures, **meter.read()})
        self._tell_compiled("training")
        self._stop_on_bad_numbers(interval)

    def steps(self) -> Iterator[tuple[Step, float, Outcome]]:
        """Take the optimizer steps that are left, each when it is asked for: which one, at what learning rate, what step() gave.

        Training and `fxtune bench` share it, so what the one measures is what the other does.
        """
        self.model.train()
        for step in load(self.plan, self.config.loader, self.world.device, start_step=self.state.step):
            lr = learning_rate(self.config.schedule, self.config.optimizer.lr, step.index, self.plan.steps)
            yield step, lr, self.step(step, lr)

    def meter(self) -> Meter:
        """Of the work that the steps do, from what the run has seen so far."""
        autocast = self.techniques.precision.autocast
        return Meter(self.model, self.plan, self.world.device, self.state.tokens, self.state.supervised_tokens,
                     dtype=None if autocast is Autocast.none else autocast.value)

    def step(self, step: Step, lr: float) -> Outcome:
        """One optimizer step. Returns the mean loss in nats a supervised token, the gradient's norm before clipping, whether
        both were finite (if not, nothing was updated), and the loss scale that was used: scalars on the device.
        """
        torch.manual_seed(_derive(self.config.run.seed, step.index))  # dropout depends on the step alone, so resume is exact
        supervised = self.plan.supervised(step.index)  # of all micro-batches together: the split cannot be seen in the loss
        loss = backward(self.loss, step.micro_batches, supervised, self.techniques.precision, self.loss_scale, self.recorder)
        self.loss_scale.unscale(list(self.optimizer.names))
        norm = self.optimizer.clip(self.config.train.max_grad_norm)
        finite = torch.isfinite(norm) & torch.isfinite(loss)
        self.optimizer.step(lr, finite)
        scale = self.loss_scale.scale
        self.loss_scale.update(finite)
        return loss, norm, finite, scale

    def _evaluate(self) -> bool:
        """Log loss and perplexity of the held-out data. Returns whether this is the best so far, to be kept."""
        if self.held_out is None:
            return False
        loss = mean_loss(self.loss, self.held_out, self.techniques.precision)
        self._log({"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))})
        self._tell_compiled("evaluation")
        if self.state.best_loss is not None and not loss < self.state.best_loss:
            return False
        self.state.best_loss, self.state.best_step = loss, self.state.step
        return self.config.checkpoint.keep_best

    def _log(self, figures: dict[str, Any]) -> None:
        self.state.figures.update({"train/step": self.state.step, **figures})
        self.tracker.log(self.state.step, figures)
        self.screen.log(self.state.step, figures)

    def _tell_compiled(self, after: str) -> None:
        """Once after the first steps of each kind: what the compiler made of the model, and what it could not."""
        if after in self.told or not self.techniques.compile.enabled:
            return
        self.told.add(after)
        report = self.techniques.compile.report()
        (self.folder.path / "compile.json").write_text(json.dumps(report.plain(), indent=1))
        self.tracker.log(self.state.step, {"compile/graphs": report.graphs, "compile/graph_breaks": len(report.breaks),
                                           "compile/recompilations": report.recompilations, "compile/seconds": report.seconds})
        for line in report.lines():
            self.screen.note(line)

    def _say_setting(self) -> None:
        """What `auto` and null became here, and what the data came to."""
        loader = self.config.loader.resolved(self.world.device)
        self.screen.note(f"run folder: {self.folder.path}")
        self.screen.note(f"{self.world.device}: {self.facts.device_name}; weights in {self.facts.dtype}; {loader.num_workers} "
                         f"loader processes, pinned memory {'on' if loader.pin_memory else 'off'}")
        for note in [*self.config.techniques.idle(), *self.decided, *self.plan.notes()]:
            self.screen.note(note)
        seen = self.plan.summary()
        self.screen.note(f"{seen['steps']} steps of {self.config.train.global_batch_size} rows, {seen['epochs']:.2f} epochs; "
                         f"{seen['supervised_share']:.1%} of the tokens supervised, {seen['padding_share']:.1%} padding")
        if self.data.evaluation:
            held = self.data.evaluation.summary()
            self.screen.note(f"held out for evaluation: {held['documents']:,} documents, "
                             f"{held['supervised_tokens']:,} supervised tokens")

    def _stop_on_bad_numbers(self, interval: Interval) -> None:
        if interval.in_a_row >= self.config.train.max_skipped_steps:
            kept = (f"checkpoints are in {self.checkpoints.folder}" if any(self.checkpoints.folder.glob("step-*"))
                    else "no checkpoint was due yet")
            half = ", use bfloat16 in place of float16" if self.loss_scale.active else ""
            raise NumbersError(
                f"The loss or the gradient was not finite in {interval.in_a_row} steps in a row, up to step {self.state.step}. "
                f"None of them touched the weights; {kept}. Lower optimizer.lr{half}, or look at the data of these steps.")

    def _load_state(self) -> TrainState:
        """The newest checkpoint's state, with its weights and moments in place; a new state where there is none."""
        saved = self.checkpoints.newest() if self.folder.resumed else None
        if saved is None:
            if self.folder.resumed:
                self.screen.note(f"{self.folder.path} was broken off before its first checkpoint, so it starts again.")
            return TrainState(data_fingerprint=self.plan.fingerprint)
        if saved.state.data_fingerprint != self.plan.fingerprint:
            raise ConfigError(f"The data changed since {self.folder.path} was started (its rows, the tokenizer or the chat "
                              "template), so its run cannot go on where it stopped. Bring them back as they were, or start "
                              "anew with run.resume=never.")
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(saved.weights[name])
        self.optimizer.load(saved.moments, saved.state.optimizer)
        self.loss_scale.load(saved.state.loss_scale)
        self.screen.note(f"Going on with {self.folder.path} after step {saved.state.step} (run.resume=never starts anew).")
        return saved.state

    def _save(self) -> None:
        moments, self.state.optimizer = self.optimizer.state()
        self.state.loss_scale = self.loss_scale.state()
        weights = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.checkpoints.save(self.state, weights, moments)

    def _finish(self) -> dict[str, Any]:
        """Export what was trained, ask the questions again, say where everything is."""
        kind = "adapter" if self.techniques.lora.enabled else "model"
        output = self.folder.path / kind
        if self.exam:
            self._log({"questions/exact_match": self.exam.ask(self.model, "after")})
        models.save(self.model, self.tokenizer, output, card={
            "data": self.plan.fingerprint, "figures": self.state.figures, "facts": self.facts, "config": self.plain})
        self.tracker.summary(self.state.figures)
        self.folder.finish(self.state.figures)
        self.screen.finish()
        if self.exam:
            self.screen.answers(self.exam.shown())
            self.screen.note(self.exam.verdict())
        if skipped := self.state.skipped_steps:
            end = "." if self.state.figures.get("train/loss") is not None else (
                f", at the end too: the {kind} may be of no use. Lower optimizer.lr.")
            self.screen.note(f"{skipped} of {self.plan.steps} steps were skipped, their loss or gradient was not finite{end}")
        if self.recorder:
            self.screen.note(self.recorder.told())
        self.screen.note(f"The {kind} is in {output}")
        return self.state.figures


class Interval:
    """What steps leave on the device between two log lines; `read`, and `settle` before a checkpoint, wait for it.

    `skipped`: steps of the whole run that were not finite. `scaled`: a loss scale is in play, and worth a figure.
    """

    def __init__(self, skipped: int, scaled: bool = False):
        self.steps: list[torch.Tensor] = []
        self.posted: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """What is on its way to the host, and what says that it has arrived."""
        self.rows: list[list[float]] = []
        self.skipped, self.scaled = skipped, scaled
        self.in_a_row = 0
        """How many of the latest steps were not finite and not for their loss scale alone."""

    def add(self, loss: torch.Tensor, norm: torch.Tensor, finite: torch.Tensor, scale: torch.Tensor) -> None:
        self.steps.append(torch.stack([loss, norm, finite.to(loss.dtype), scale]))

    def post(self) -> None:
        """Send the figures of the steps so far on their way to the host."""
        if not self.steps:
            return
        figures, arrived = torch.stack(self.steps), None
        if figures.is_cuda:
            figures = torch.empty_like(figures, device="cpu", pin_memory=True).copy_(figures, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.posted.append((figures, arrived))
        self.steps.clear()

    def settle(self) -> None:
        """Count the skipped ones among the steps so far."""
        self.post()
        rows = []
        for figures, arrived in self.posted:
            if arrived is not None:
                arrived.synchronize()
            rows += figures.tolist()
        self.posted.clear()
        for loss, _, finite, scale in rows:
            # A gradient that overflowed under a scale above 1 says that the scale is too large yet, and it was halved.
            # From 65536 that happens 16 times at most, so a run whose numbers are bad still ends.
            if finite:
                self.in_a_row = 0
            elif scale <= 1 or not math.isfinite(loss):
                self.in_a_row += 1
            self.skipped += not finite
        self.rows += rows

    def read(self) -> dict[str, Any]:
        """Mean loss and gradient norm of the finite steps since the last reading; None where there was none."""
        self.settle()
        rows, self.rows = self.rows, []
        sound = [row[:2] for row in rows if row[2]]
        mean = [sum(column) / len(sound) for column in zip(*sound, strict=True)] if sound else [None, None]
        figures = {"train/loss": mean[0], "train/grad_norm": mean[1], "train/skipped_steps": self.skipped}
        return {**figures, "train/loss_scale": rows[-1][3]} if self.scaled and rows else figures


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _derive(seed: int, step: int) -> int:
    """A seed for each step, far from those of its neighbours."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest()) >> 1
