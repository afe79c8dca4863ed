"""Takes the optimizer steps of a run, one TrainStep for the batches of each step.

A step that runs out of memory is repeated with half the rows in its micro-batches. A step with an operator that has no
deterministic kernel is repeated with the fastest kernels. In both cases the failed step has not changed a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from fxtune.data.batches.loader import Loader, StepBatches
from fxtune.data.batches.plan import Plan
from fxtune.distributed.heartbeat import FORWARD_BACKWARD
from fxtune.errors import UserError
from fxtune.optim.schedule import Schedule
from fxtune.settle.freed_gradients import refuse_halved
from fxtune.system.process.oom import MemoryExhausted, RowsExhausted, RowsPerPass, catch_out_of_memory
from fxtune.system.process.signals import SIGNALS
from fxtune.system.terminal.progress import MICRO_BATCHES, phase
from fxtune.tracking.tracker import Tracker
from fxtune.training.agreement import interruptible, together
from fxtune.training.builder import RunBuilder
from fxtune.training.monitors.rank_report import UPDATE
from fxtune.training.rollouts.collector import Collector
from fxtune.training.rollouts.plan import RolloutPlan
from fxtune.training.run.end import RunEnd
from fxtune.training.run.state import RunState
from fxtune.training.step import Metrics


class Steps:
    """The remaining steps of a run. Iteration takes each step and yields (step, its learning rate, its metrics on the
    device)."""

    def __init__(
        self,
        builder: RunBuilder,
        run_state: RunState,
        rows_per_pass: RowsPerPass,
        end: RunEnd,
        tracker: Tracker,
        plan: Plan,
        schedule: Schedule,
        collector: Collector | None = None,
    ) -> None:
        """`collector`: writes the rollouts of a step before it is taken; None: the plan has all data."""
        self.collector = collector
        self.builder, self.world, self.config = builder, builder.world, builder.config
        self.run_state, self.train_step, self.note = run_state, run_state.train_step, run_state.note
        self.rows_per_pass, self.end, self.tracker = rows_per_pass, end, tracker
        self.first = run_state.state.step
        """The index of the first step that this process takes."""
        self.loader: Loader | None = None
        rows = rows_per_pass.rows("training", self.config.train.micro_batch_size)
        self.plan = plan.with_micro_batch_size(rows)
        """The plan of the remaining data, up to the end of `schedule`. Its micro-batches have no more rows than fit in
        memory."""
        self.follow(schedule)
        if self.train_step.in_backward and rows < self.config.train.micro_batch_size:
            # A step of several micro-batches needs all gradients before the update.
            self.note(refuse_halved(self.config.optimizer.in_backward, rows))
            builder.stage = replace(builder.stage, facts=replace(builder.stage.facts, in_backward=False))
            self.train_step.in_backward = None

    def follow(self, schedule: Schedule) -> None:
        """Take the learning rates of `schedule`, up to its last step."""
        self.schedule = schedule
        self._replace_plan(self.plan.until(schedule.last, schedule.dropped))

    def _replace_plan(self, plan: Plan) -> None:
        self.plan = self.run_state.monitor.bad_batches.plan = plan

    def __iter__(self) -> Iterator[tuple[StepBatches, float, Metrics]]:
        self.train_step.model.model.train()
        index = self.first
        while index < self.plan.steps:
            failed, plan = None, self.plan
            if self.collector is not None:
                self._collect(self.collector, index)
            # A step of rollouts is small, and is read only once, so workers would cost more than they save.
            loading = replace(self.config.loader, num_workers=0) if self.collector else self.config.loader
            self.loader = Loader(self.builder.own(plan.of_step(index)), loading, self.world.device)
            for step in self.loader.steps(index):
                index, step.data_step = step.index, step.index - plan.sizes.dropped
                if self._has_new_rows(index) and index > self.first:
                    self.note(f"From step {index + 1} on: {self.plan.step_rows.text(self.plan.stage(index))}.")
                    self.rows_per_pass.drop()  # the recordings for the earlier length
                lr = self.schedule.rate(index)
                metrics = catch_out_of_memory(partial(self._try, step, lr))
                if isinstance(metrics, (MemoryExhausted, str)):
                    failed = metrics
                    break
                yield step, lr, metrics
                index += 1
                if self.plan is not plan:  # the run ends early
                    break
            del step  # frees its batches on the device
            self.loader.close()
            if isinstance(failed, str):
                self.rows_per_pass.free_memory()
                self.train_step.drop()
                self.builder.use_fastest_kernels(operator=failed)
                self.note(self.builder.notes[-1])
            elif failed is not None:
                self._halve(index, failed)

    def _collect(self, collector: Collector, index: int) -> None:
        assert isinstance(self.plan, RolloutPlan)
        self.world.heartbeat.doing("sampling", index + 1)
        with self.builder.oom_context(f"Sampling in step {index + 1}"), interruptible(self.world):
            collector.collect(self.plan, index)

    def _try(self, step: StepBatches, lr: float) -> Metrics | str:
        """Call take(). If an operator has no deterministic kernel and the run may go on without it, return that
        operator."""
        try:
            return self.take(step, lr)
        except (RuntimeError, UserError) as error:
            if (operator := self.builder.nondeterministic(error)) is None:
                raise
        return operator

    def take(self, step: StepBatches, lr: float) -> Metrics:
        """Take one TrainStep. Handles signals and the checkpoint in progress."""
        metrics = self._backward(step, lr)
        # The ranks have agreed to take this step. So a rank that runs out of memory after this line ends the run.
        self.run_state.checkpoints.wait_for_copy()  # sums change PowerSGD's state, the update the weights
        clipping: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.world.size > 1:
            clipping = partial(self.builder.oom_context, f"Clipping in step {step.index + 1}")
        with clipping():
            metrics = self.train_step.sum_over_ranks(metrics)
        with self.train_step.rank_report.timer.part(UPDATE):
            with clipping():
                self.train_step.clip(metrics)
            # An update that runs out of memory is not repeated, because some weights may be updated already.
            with self.builder.oom_context(f"The update of step {step.index + 1}"):
                self.train_step.update(metrics, lr, step.data_step)
        return metrics

    def _backward(self, step: StepBatches, lr: float) -> Metrics:
        """Run the forward and backward passes of `step`, and agree with the other ranks to take this step."""
        train_step, index, report = self.train_step, step.index, self.train_step.rank_report
        first, plan = index == self.first or self._has_new_rows(index), self.plan.of_step(index)
        normalizer = train_step.objective.normalizer(plan, index)
        self.world.heartbeat.doing(FORWARD_BACKWARD, index + 1)
        report.waited += step.wait_seconds
        name = f"Step {index + 1:,} of {self.plan.steps:,}"
        name += ", which also compiles" if first and self.builder.techniques.compile.enabled else ""
        counted = phase(name, plan.micro_batches(index) // self.world.data_ranks, MICRO_BATCHES, announce=first)
        # Interruptible, because nothing has changed yet and compiling can take minutes.
        signals = interruptible(self.world)
        if train_step.in_backward:  # the pass changes the weights
            self.run_state.checkpoints.wait_for_copy()
            signals = SIGNALS.held()
        with signals, counted as work:
            batches = work.over(step.micro_batches)
            passes = partial(train_step.backward, batches, normalizer, step.data_step, step.counted, lr)
            logs = index + 1 == self.plan.steps or self.end.log_line_due(index + 1)
            agree = report.agree if logs else None  # this agreement also exchanges the ranks' figures
            # A signal between two averages of the ranks' weights waits for the next average. A run that is saved at an
            # average resumes with the same bits.
            return together(
                self.world, partial(report.timed, passes), train_step.start_sums, train_step.ranks_agree, agree
            )

    def _has_new_rows(self, index: int) -> bool:
        """Whether the length of rows changes at step `index`."""
        if index <= self.plan.sizes.dropped:
            return False
        before, now = (self.plan.step_rows.starts[self.plan.stage(step)] for step in (index - 1, index))
        return now.length != before.length

    def _halve(self, index: int, exhausted: MemoryExhausted) -> None:
        """Halve the micro-batches from step `index` on. That step did not fit and is repeated. Raises
        RowsExhausted."""
        sizes = self.plan.sizes
        if self.train_step.in_backward:  # several micro-batches a step would need all gradients
            raise RowsExhausted("training", sizes.micro_batch_size, exhausted.reason)
        self.rows_per_pass.free_memory()  # also waits for running sums of gradients
        self.train_step.drop()
        hint = f"Step {index + 1} is repeated; its {self.plan.rows(index)} rows and its loss stay as they are. "
        hint += "Code is compiled for the new shape. " if self.builder.techniques.compile.enabled else ""
        multiple = self.plan.stream.rows_of_group
        rows = self.rows_per_pass.halve(
            "training", sizes.micro_batch_size, exhausted, sizes.global_batch_size, hint, multiple
        )
        self._replace_plan(self.plan.with_micro_batch_size(rows))
        self.tracker.log(self.run_state.state.step, {"train/micro_batch_size": self.plan.sizes.micro_batch_size})
