"""Trains a run, with one loop for LoRA and full fine-tuning. Read this file from top to bottom.

`Trainer.__init__` builds a run in order, and `_loop` is the loop. There are no callbacks: the loop calls everything by
name. The loop waits for the device only to log figures, after it has issued the next step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.checkpoint.run_folder import ABOUT, EVIDENCE, REPORT, ROLLOUTS, RunFolder, read_template_time, write_text
from fxtune.config.root import Config, Export, OutOfMemory, Resume
from fxtune.data.batches.batch_images import LostImageError
from fxtune.data.batches.plan import Plan
from fxtune.data.config import AUTO
from fxtune.data.tokenized.ends import learned_ends, template_ends
from fxtune.distributed.heartbeat import EXPORTING, SAVING
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, Stopped, StorageError, UserError
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.optim.schedule import EXTENDABLE, Schedule
from fxtune.settle.ranks import require_possible
from fxtune.system.files import environment
from fxtune.system.machine.tested_versions import outside_tested_range
from fxtune.system.process.oom import RowsExhausted, RowsPerPass
from fxtune.system.process.signals import SIGNALS
from fxtune.system.terminal import progress
from fxtune.system.terminal.library_log import LIBRARY_LOG
from fxtune.system.terminal.progress import STEPS, phase
from fxtune.system.terminal.redact import redact
from fxtune.system.terminal.startup import FIRST_STEPS, STARTUP
from fxtune.tracking import tracker
from fxtune.tracking.display import Display, display
from fxtune.tracking.worker import GOES_ON
from fxtune.training.agreement import interruptible, shared
from fxtune.training.answers import AnswerEvaluation
from fxtune.training.benchmarks import Benchmarks
from fxtune.training.data.run_data import name_lost_image, teach_ends, untrained_tokens
from fxtune.training.evaluation import HeldOutEvaluation, evaluation_steps
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.general_text import GeneralText, general_plan
from fxtune.training.monitors.bad_batches import BadBatches
from fxtune.training.monitors.clock import RunClock
from fxtune.training.monitors.energy import RunEnergy, sentence
from fxtune.training.rollouts.collector import Collector, make_collector, require_servers
from fxtune.training.rollouts.evaluation import RewardEvaluation
from fxtune.training.rollouts.folder import Rollouts
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.run.about import contents_of_rows, describe_run
from fxtune.training.run.end import RunEnd
from fxtune.training.run.export import export, require_whole_export, write_report
from fxtune.training.run.extension import require_extendable, schedule_of_run
from fxtune.training.run.log import RunLog, conclusion, introduction, next_commands
from fxtune.training.run.resume_check import ResumeCheck, build_for_run, claim_folder, require_same_recipe
from fxtune.training.run.state import RunState, weights_note
from fxtune.training.step_monitor import StepMonitor
from fxtune.training.steps import Steps
from fxtune.training.trial import Trial


def run(config: Config) -> dict[str, Any]:
    """Train as `config` says and return the run's last figures."""
    return train(config)[1]


def train(config: Config) -> tuple[Path, dict[str, Any]]:
    """Train as run() does, and also return the run's folder."""
    with SIGNALS:
        SIGNALS.check()  # in a sweep, a signal must end all runs
        # The recipe is written to files, so enums become their values.
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
            with phase("Checking the export", announce=False):  # a large model takes seconds
                world.from_main(partial(require_whole_export, folder.path), "checking the export")
            screen.note(
                f"{folder.path} holds this run, finished: nothing to do. Set run.dir to a new folder to train again."
            )
            if world.main and config.run.report and not (folder.path / REPORT).exists():  # killed before the page
                screen.note(write_report(folder.path))
            screen.note(f"Next: {', '.join(next_commands(config, folder.path))}")
            return folder.result()
        if line := outside_tested_range():
            screen.note(line)
        if folder.passed_over:
            screen.note(
                f"This run starts from its beginning in {folder.path}. An unfinished run of this name cannot go on "
                "with this recipe:\n" + "\n".join(folder.passed_over)
            )
        elif finished := folder.finished_before:
            way = f"model.init=pretrained model.path={finished / 'model'} starts from its weights"
            if config.techniques.lora.enabled:
                way = f"model.adapter={finished / 'adapter'} starts from its weights"
            staged = config.train.batch_ramp or config.data.length_schedule
            if config.schedule.name in EXTENDABLE and not staged:
                way = f"run.dir={finished} goes on with it"
            screen.note(
                f"This run starts from its beginning in {folder.path}. {finished} is a shorter, finished run of this "
                f"recipe: {way}."
            )
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
        # Impossible recipes are refused here, from configs alone, before a weight is loaded or a row is read.
        self.builder, resume_check = build_for_run(config, folder, screen.note)
        builder, self.world = self.builder, self.builder.world
        self.energy = RunEnergy(folder, self.world, config.tracking.cost)
        if config.objective.needs.rollouts:
            self.world.from_main(partial(require_servers, config), "looking for servers")
        if reasons := list(tracker.check(config.tracking, builder.facts)):
            raise ConfigError("\n".join(reasons))
        self.benchmarks = Benchmarks.open(config, self.world, folder.path)
        self.tokenizer, self.data = builder.read(folder.path / "quarantine.jsonl", read_template_time(folder.path))
        self.objective = builder.config.objective
        plan, self.peak_rate = self.data.training, builder.config.optimizer.lr
        if self.objective.needs.rollouts:
            rollouts = Rollouts(folder.path / ROLLOUTS, self.data.images)
            plan = RolloutPlan.of(plan, rollouts, builder.config.data)
            if not folder.resumed and self.world.main:
                rollouts.clear()
        resume_check.check_data(self.data.tables, self.peak_rate if config.optimizer.lr == AUTO else None)
        self.questions = AnswerEvaluation.open(builder.config.data, self.tokenizer, folder.path, self.data.images)
        general = general_plan(builder, self.tokenizer, self.data.images)
        self.ends = learned_ends(self.data.tables, self.tokenizer)
        if self.objective.needs.rollouts:
            self.ends = template_ends(self.tokenizer, builder.config.data)
        if self.world.main:
            facts = environment.machine(torch.version.cuda, builder.facts.device_name)
            write_text(folder.path / environment.FILE, environment.lock(facts))
            time, contents = builder.config.data.template_time, contents_of_rows(self.data.tables, builder.config.data)
            folder.write(ABOUT, describe_run(self.data, self.ends, time, self.objective, contents))
        for line in (f"run folder: {folder.path}", *introduction(config, builder, self.data)):
            screen.note(line)
        self.language_model = self._proven_model(resume_check)
        self.model = self.language_model.model
        self.general = GeneralText(builder, general, self.language_model, screen.note) if general else None
        self.trial = Trial(builder, self.language_model, self.objective)
        # The optimizer is built after the techniques, because they replace modules. Otherwise it would update replaced
        # weights.
        self.train_step = builder.train_step(self.language_model, self.objective)
        self.train_step.rank_report.energy = self.energy
        bad_batches = BadBatches(folder.path, plan, self.tokenizer.decode, screen.note, writes=self.world.main)
        self.monitor = StepMonitor(config.train, self.train_step, bad_batches)
        self.run_state = RunState(folder, config.checkpoint, self.train_step, self.monitor, self.clock, screen.note)
        with builder.oom_context("Loading the checkpoint"):
            self.state = self.run_state.load(plan.fingerprint)
        compile, steps = builder.techniques.compile, evaluation_steps(self.data) if config.train.max_minutes else 0.0
        self.end = RunEnd(config, folder.path, self.world, self.clock, self.state, compile.enabled, steps)
        self.rows_per_pass = RowsPerPass(
            self.world.device,
            self.state.rows,
            screen.note if config.train.out_of_memory is OutOfMemory.halve else None,
            drop=self._drop_recordings,
        )
        planned = Schedule.of(config.schedule, self.peak_rate, plan.steps)
        schedule = schedule_of_run(self.run_state, planned, plan, recipe)
        self.collector = self._collector(plan) if isinstance(plan, RolloutPlan) else None
        self.held_out: HeldOutEvaluation | RewardEvaluation | None = None
        if self.data.evaluation and self.collector:
            self.held_out = RewardEvaluation(self.data.evaluation, self.collector)
        elif self.data.evaluation:
            self.held_out = builder.held_out(self.data.evaluation, self.language_model, self.objective)
        self.tracker: tracker.Tracker = tracker.NoTracker()
        if self.world.main:
            run, state = (folder.path, config.run.name, recipe), self.state
            done = state.wandb_id, state.step, state.figures.get("train/step")
            self.tracker = tracker.Tracker(config.tracking, *run, *done, note=screen.note)
        # The id is kept even if W&B is off now. If the run is later resumed with W&B on, it continues the same W&B
        # run.
        self.state.wandb_id = self.tracker.wandb_id or self.state.wandb_id
        self.log = RunLog(folder, screen, self.tracker, self.state, STARTUP, compile)
        self.steps = Steps(
            builder, self.run_state, self.rows_per_pass, self.end, self.tracker, plan, schedule, self.collector
        )
        self.logs_late = self.world.device.type == "cuda" and self.collector is None
        """Whether a line is logged only after the next step is issued. This keeps a GPU from being idle. A step on
        rollouts begins when the step before has ended, and then the collector has its figures."""
        self.line_due = False
        """Whether a log line is due after the last step and not written yet."""
        self.lr = 0.0
        """The learning rate of the last step."""

    @property
    def plan(self) -> Plan:
        return self.steps.plan

    def _collector(self, plan: RolloutPlan) -> Collector:
        """The collector of the rollouts, with its sampler."""
        config, precision = self.builder.config, self.builder.techniques.precision
        model, sizes, note = self.language_model, self.rows_per_pass, self.screen.note
        collector = make_collector(config, model, self.tokenizer, plan.rollouts, precision, self.world, sizes, note)
        if self.questions and any(reward.name != "environment" for reward in collector.objective.rewards):
            self.questions.judge = collector.judge  # a question has no environment
        return collector

    def _proven_model(self, resume_check: ResumeCheck) -> LanguageModel:
        """Build the model, and show and write the evidence that its techniques acted."""
        builder = self.builder
        self.world.heartbeat.doing("building the model")
        language_model, evidence = builder.proven_model(self.data.training)
        prepared, lora = language_model.prepared, self.builder.techniques.lora
        for line in (
            *teach_ends(prepared, self.tokenizer, self.ends, self.config.model.adapter, lora),
            *untrained_tokens(prepared, self.tokenizer, self.data, lora),
        ):
            self.screen.note(line)
        evidence += builder.prove_objective(language_model, self.objective, self.data.training)
        resume_check.check_model(prepared, builder.techniques.options())
        self.evidence = evidence
        self._write_evidence()
        self.screen.evidence(evidence)
        return language_model

    def _write_evidence(self) -> None:
        self.folder.write(EVIDENCE, [dataclasses.asdict(observation) for observation in self.evidence])

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
                    self.builder.facts.optimizer,
                    export_all=not self.builder.techniques.lora.enabled,
                    evaluates=self.held_out is not None or self.end.asks,
                )
                self.energy.meter.start()
                self.screen.start(self.plan.steps, self.folder.path.name, self.state.step)
                if self.state.step == 0:
                    self._measure_before()
                self.end.require_time()
                with phase("Training", self.plan.steps, STEPS, False, FIRST_STEPS) as self.training:
                    self._loop()
                self.clock.stop()
                return self._pause() if self._pauses() else self._finish()
            except Stopped as stop:
                self._log_due_line()
                self._ensure_saved()
                stop.outcome = self.log.stopped(self.plan.steps, again=self.config.run.resume is not Resume.never)
                raise
            except LostImageError as error:
                self._stop_at(error)
                raise
            except RowsExhausted as error:
                raise self._out_of_memory(*error.args) from error
            finally:
                self.close()

    def close(self) -> None:
        """End the loader processes and the measurement of energy. Call this last, so that after a signal the
        checkpoint does not wait for loader processes."""
        for loading in (self.steps.loader, self.held_out, self.collector):
            if loading is not None:
                loading.close()
        self.energy.close()

    def _loop(self) -> None:
        config, state, statistics = self.config, self.state, self.monitor.statistics
        meter = self.meter = self.builder.meter(self.model, self.plan, state.tokens, state.supervised_tokens)
        self.clock.start(state.step)
        if state.step:  # an evaluation or `fxtune finish` may be pending
            self._end_step(evaluate=state.evaluation_due, save=state.evaluation_due, looks=True)
        for step, lr, metrics in self.steps if not self._pauses() else ():
            self._log_due_line()
            statistics.add(metrics)
            meter.plan = self.plan.of_step(step.index)
            meter.add(step.index, step.wait_seconds)
            self.training.done = step.index + 1
            state.step, state.tokens, state.supervised_tokens = step.index + 1, meter.tokens, meter.supervised_tokens
            schedule, every = self.steps.schedule, config.checkpoint.every
            last, looks = state.step == schedule.last, self.end.log_line_due(state.step)
            evaluate = self.end.evaluation_due(state.step, schedule)
            save = (
                self.end.begins_end(schedule, self.plan.full_steps) or last or bool(every and state.step % every == 0)
            )
            # A run may end after any evaluation that can stop it, so such an evaluation needs a log line.
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
        """Whether train.pause_after ends this process here, before the run's last step."""
        after = self.config.train.pause_after
        return after is not None and after <= self.state.step < self.steps.schedule.last

    def _end_step(self, evaluate: bool, save: bool, looks: bool) -> None:
        """Evaluate if `evaluate`, decide whether the run ends early, and save if `save` or if one of these demands it.
        `looks`: see RunEnd.decide()."""
        if evaluate:
            with self.meter.paused():
                save = self._evaluate() or save
        decision = self.end.decide(self.steps.schedule, evaluate, looks)
        if decision is not None:
            self._log_due_line()
        if decision is not None and decision.origin is not None and not self.run_state.go_back(decision.origin):
            self.screen.note("The decay begins from the present weights.")
            self.state.branch_step = None
            decision = self.end.decide(self.steps.schedule, evaluate, looks)
        if decision is not None:
            self.monitor.report()  # bad steps so far belong to the old plan
            self.end.take(decision)
            self.steps.follow(decision.schedule)
            self.meter.plan = self.plan
            self.training.total = last = decision.schedule.last
            self.screen.ends_at(last)
            self.screen.note(decision.text)
            self.log.log({"train/last_step": last, "train/dropped_steps": decision.schedule.dropped})
            save = True  # the decision is part of the state
            if self.state.step == last and not evaluate:  # the last step of a run is evaluated
                with self.meter.paused():
                    self._evaluate()
        if save:
            self.run_state.save()

    def _drop_recordings(self) -> None:
        """Free the memory of recorded CUDA graphs. They are recorded again when needed."""
        self.builder.techniques.compile.drop()
        if self.train_step.recorder:
            self.train_step.recorder.drop()

    def _out_of_memory(self, part: str, rows: int, reason: str) -> HardwareError:
        """Save the state. Returns an error that says that `part` ran out of memory with `rows` rows and that these
        cannot be halved."""
        row_length, micro_batches = None, 1
        if part == "training":
            step, plan = self.state.step, self.plan.of_step(self.state.step)
            rows = plan.micro_rows(step)  # micro-batches of shorter rows have more of them
            row_length, micro_batches = plan.max_row_length(step), plan.micro_batches(step)
        elif part == "evaluation" and self.held_out:
            row_length = self.held_out.max_row_length
        message = str(RowsExhausted(part, rows, reason))
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
        phase = MemoryPhase.training if part == "training" else MemoryPhase.forward
        return self.builder.out_of_memory(message, phase, rows, row_length, micro_batches)

    def _stop_at(self, error: LostImageError) -> None:
        """Save the state before a step with a lost image, and make the error name the image's row. Ranks that share
        rows or weights cannot save in the middle of a pass. Their run resumes from its last checkpoint."""
        if not self.world.shares and self.train_step.ranks_agree:
            self.train_step.drop()
            self._log_due_line()
            self._ensure_saved()
        name_lost_image(error, self.config.data, self.data)

    def _pause(self) -> dict[str, Any]:
        """Save the state. Returns the last figures of the run so far."""
        self._log_due_line()
        self._ensure_saved()
        self.energy.end(self.state.tokens)
        self.tracker.finish(exit_code=GOES_ON)
        self.screen.finish()
        self.screen.note(
            f"Paused after step {self.state.step} of {self.steps.schedule.last} (train.pause_after). The same command "
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
            if self.monitor.last_finite > self.run_state.saved:  # no checkpoint has the current weights yet
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
        if startup and self.collector:  # the first line
            self.evidence.append(self.collector.evidence())
            self._write_evidence()
        self.clock.reached(self.state.step)
        timings = self.run_state.checkpoints.save_timings()
        self.clock.last_seconds["saving"] = timings.get("checkpoint/seconds", self.clock.last_seconds["saving"])
        end = self.end.end_time(self.steps.schedule)
        self.log.log(
            {
                "train/epoch": self.plan.epoch(self.state.step),
                "train/lr": self.lr,
                **figures,
                **self.meter.read(self.train_step.rank_report.longest_wait()),
                **self.train_step.rank_report.figures(),
                **timings,
                **(self.collector.figures if self.collector else {}),
                **self.energy.log(self.state.tokens),
                **({} if end is None else {"train/end_time": end}),
                **self.clock.figures(),
                **startup,
            }
        )
        self.log.compiled(f"training, stage {self.plan.stage(self.state.step - 1)}")

    def _evaluate(self) -> bool:
        """Evaluate on the held-out data, and on the questions if their answers can stop the run. Log the figures.
        Returns whether to save this state."""
        self.state.evaluation_due = self.held_out is not None or self.end.asks
        if not self.state.evaluation_due:
            return False
        self.run_state.average()
        self.world.heartbeat.doing("evaluating")
        figures: dict[str, float] = {}
        with self.clock.evaluation(), self.train_step.optimizer.averaged(), interruptible(self.world):
            if self.held_out is not None:
                figures = self.held_out.figures(self.rows_per_pass, self.config.train.micro_batch_size)
            if self.end.asks:
                figures |= self._answer()
        self.state.evaluation_due = False
        self.log.log({**figures, "eval/share_of_time": self.clock.evaluation_share})
        self.log.compiled("evaluation")
        return self.end.evaluated(figures, self.steps.schedule)

    def _measure_before(self) -> None:
        """Measure the model that training starts from. Figures of the held-out data are before/accuracy and so on."""
        if self.questions:
            self._measure(partial(self._answer, "before"))
        if self.general:
            self._measure(self.general.loss, "general")
        if self.held_out is not None and self.objective.compared:
            judge = partial(self.held_out.figures, self.rows_per_pass, self.config.train.micro_batch_size)
            self._measure(lambda: {name.replace("eval/", "before/", 1): value for name, value in judge().items()})
        if self.benchmarks:
            self._measure(partial(self._score, self.benchmarks, "base"))

    def _measure(self, measure: Callable[[], dict[str, float]], part: str = "questions") -> None:
        """Log the figures of measure(). `part`: the part of the run's time that it belongs to."""
        self.world.heartbeat.doing("evaluating")
        with self.clock.timed(part), interruptible(self.world):
            figures = measure()
        self.log.log(figures)

    def _try_to_measure(self, measure: Callable[[], dict[str, float]], part: str, change: str) -> None:
        """As _measure(). An error, which all ranks get, becomes a line with `change`, so that the run is not lost."""
        try:
            self._measure(measure, part)
        except (ConfigError, HardwareError, StorageError) as error:
            self.screen.note(f"Not measured: {error} {change}")

    def _answer(self, when: str = "") -> dict[str, float]:
        """Answer the questions. `when`: see AnswerEvaluation.ask()."""
        assert self.questions is not None
        self.world.heartbeat.doing("answering questions")
        return self.questions.ask(self.language_model.prepared, when, self.rows_per_pass, self.world)

    def _score(self, benchmarks: Benchmarks, side: str) -> dict[str, float]:
        self.world.heartbeat.doing("measuring benchmarks")
        prepared, rows = self.language_model.prepared, self.config.train.micro_batch_size
        with prepared.encoder_on_device():
            return benchmarks.measure(prepared.module, self.tokenizer, side, rows, self.world)

    def _finish(self) -> dict[str, Any]:
        """Ask the questions again, export the best or the last weights, and tell the user where everything is."""
        state, checkpoints = self.state, self.run_state.checkpoints
        finite = partial(self.trial.all_finite, self.plan)
        self.monitor.refuse_broken_weights(self.plan.steps, checkpoints.folder, finite)
        step, measured = state.step, state.figures
        if self.config.run.export is Export.best:
            step, measured = self.run_state.load_best()
        self.run_state.use_averages()
        if self.general:
            self._try_to_measure(self.general.moved, "general", "data.general=[] measures no general text.")
        if self.questions:
            self._measure(partial(self._answer, "after"))
        if self.benchmarks:
            later = f"Then: fxtune eval {self.folder.path}"
            self._try_to_measure(partial(self._score, self.benchmarks, "tuned"), "questions", later)
        figures = {**state.figures, "train/peak_lr": self.peak_rate}
        note = weights_note(step, state, self.config)
        if note:
            best = {"eval/best_loss": state.best_loss, "eval/best_match": state.best_match}
            figures |= {name: value for name, value in best.items() if value is not None}
            figures |= {"eval/best_step": state.best_step, "export/step": step}
        kind = "adapter" if self.builder.techniques.lora.enabled else "model"
        self.world.heartbeat.doing(EXPORTING)
        with interruptible(self.world), phase(f"Exporting the {kind}"):  # after a signal no part of an export stays
            if self.world.main:
                self.run_state.make_room(export_all=kind == "model")
            card = {"weights": note, "figures": figures, "config": self.recipe}
            prepared, output = self.language_model.prepared, self.folder.path / kind
            self.objective.conclude(prepared.module.config, measured)
            with prepared.encoder_on_device():
                proof = export(self.builder, prepared, self.tokenizer, self.data, self.ends, output, card)
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
        lines += conclusion(self.config, self.objective, self.data, state.figures, proof)
        if self.world.main and self.config.run.report:
            lines.append(write_report(self.folder.path))
        lines += [exported, *filter(None, [sentence(energy)])]
        lines.append(f"Next: {', '.join(next_commands(self.config, self.folder.path))}")
        self.log.ended(self.questions, lines)
        return figures
