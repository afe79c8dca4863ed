"""Statistics of steps. They stay on the device until the next log line, and are then counted, logged, and checked for
bad steps.

The step itself decides on the device whether it is skipped (step.py). This file counts skipped steps and loss spikes
and reports them with their samples. Too many steps in a row that were not finite end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fxtune.config.root import Spikes, TrainConfig
from fxtune.errors import NumbersError
from fxtune.training.monitors.bad_batches import BadBatches
from fxtune.training.monitors.noise_scale import NAMES, NoiseScale
from fxtune.training.monitors.step_record import MONITORED, StepRecord
from fxtune.training.step import TrainStep


class StepStatistics:
    """Collects the metrics of steps. Only read() and settle() wait for the device.

    `scaled`: whether a loss scale is used and logged. `skips_spikes`: whether spikes do not update the weights.
    """

    def __init__(self, scaled: bool = False, skips_spikes: bool = False) -> None:
        self.scaled, self.skips_spikes = scaled, skips_spikes
        self.names: tuple[str, ...] = ()
        self.pending: list[torch.Tensor] = []
        """Metrics of each step, [len(names)] on the device."""
        self.posted: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """Metrics being copied to the host, [steps, len(names)], and the event that ends each copy."""
        self.records: list[StepRecord] = []
        """Steps since the last log line."""
        self.unreported: list[StepRecord] = []
        """Bad steps that were not yet reported to the user."""
        self.step = 0
        """Steps of the run counted so far."""
        self.skipped = 0
        """Steps that did not update the weights."""
        self.consecutive_bad = 0
        """How many of the latest steps in a row were not finite. Steps that were not finite because of the loss scale
        do not count."""
        self.spikes = 0
        self.noise = NoiseScale()
        """With train.noise_scale: the noise scale over the steps that updated the weights."""

    def add(self, metrics: Mapping[str, torch.Tensor]) -> None:
        """Add the metrics of the next step, scalars on the device."""
        self.names = tuple(metrics)
        self.pending.append(torch.stack([value.to(metrics["loss"].dtype) for value in metrics.values()]))

    def post(self) -> None:
        """Start copying the metrics of the steps so far to the host."""
        if not self.pending:
            return
        values, arrived = torch.stack(self.pending), None
        if values.is_cuda:
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self.posted.append((values, arrived))
        self.pending.clear()

    def settle(self) -> None:
        """Wait for the steps so far, then count them."""
        self.post()
        for values, arrived in self.posted:
            if arrived is not None:
                arrived.synchronize()
            for row in values.tolist():
                metrics = dict(zip(self.names, row, strict=True))
                monitored = {name: metrics.pop(name) for name in MONITORED}
                noise = [metrics.pop(name) for name in NAMES if name in metrics]
                record = StepRecord(**monitored, step=self.step, metrics=metrics)
                self._count(record)
                if noise and record.finite and not record.spike:
                    self.noise.add(record.grad_norm, *noise)
                self.step += 1
        self.posted.clear()

    def _count(self, record: StepRecord) -> None:
        self.records.append(record)
        self.spikes += record.spike
        self.skipped += not record.finite or (record.spike and self.skips_spikes)
        if record.finite:
            self.consecutive_bad = 0
        elif not record.scale_too_large:
            self.consecutive_bad += 1
        if record.bad:
            self.unreported.append(record)

    def read(self) -> dict[str, Any]:
        """The means of loss, gradient norm and metrics over the steps since the last read(). Skipped steps are left
        out.

        A mean is None if all steps were skipped.
        """
        self.settle()
        records, self.records = self.records, []
        rows = [
            {"loss": record.loss, "grad_norm": record.grad_norm, **record.metrics}
            for record in records
            if record.finite and not (record.spike and self.skips_spikes)
        ]
        names = ["loss", "grad_norm", *(records[-1].metrics if records else ())]
        figures = {f"train/{name}": sum(row[name] for row in rows) / len(rows) if rows else None for name in names}
        figures["train/skipped_steps"] = self.skipped
        if (noise := self.noise.rows) is not None:
            figures["train/noise_scale"] = noise
        return {**figures, "train/loss_scale": records[-1].loss_scale} if self.scaled and records else figures


class StepMonitor:
    """Watches the steps of a run for losses and gradients that are not finite, and for spikes."""

    def __init__(self, config: TrainConfig, train_step: TrainStep, bad_batches: BadBatches) -> None:
        self.config, self.train_step, self.bad_batches = config, train_step, bad_batches
        self.spikes = train_step.spikes
        self.statistics = StepStatistics(train_step.loss_scale.active, skips_spikes=config.spikes is Spikes.skip)

    def read(self) -> dict[str, Any]:
        """Figures of the steps since the last read(); reports bad steps. Waits for the device."""
        figures = self.statistics.read()
        self.report()
        return figures

    def state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs to count, judge and log steps as this run would. Waits for the
        device."""
        statistics = self.statistics
        self.report()  # before the save, or a run killed right after it would never report them
        return {
            "skipped": statistics.skipped,
            "in_a_row": statistics.consecutive_bad,
            "spikes": statistics.spikes,
            "unlogged": [record.to_json() for record in statistics.records],
            "window": self.spikes.state(),
            **({"noise": statistics.noise.state()} if self.config.noise_scale else {}),
        }

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Restore what state() returned after `step` steps."""
        statistics = self.statistics
        statistics.step = step
        statistics.skipped, statistics.consecutive_bad, statistics.spikes = (
            state[name] for name in ("skipped", "in_a_row", "spikes")
        )
        statistics.records = [StepRecord.from_json(row) for row in state["unlogged"]]
        self.spikes.load(state["window"])
        if noise := state.get("noise"):
            statistics.noise.load(noise)

    @property
    def must_stop(self) -> bool:
        """Whether train.max_skipped_steps steps in a row were not finite."""
        return self.statistics.consecutive_bad >= self.config.max_skipped_steps

    @property
    def last_finite(self) -> int:
        """The number of steps up to and including the last finite step. That step gave the current weights."""
        return self.statistics.step - self.statistics.consecutive_bad

    def stop_error(self, checkpoints: Path, router: str | None = None) -> NumbersError:
        """The error to raise if must_stop. `checkpoints`: the folder where the state is saved. `router`: the name of
        the router that caused the error, or None."""
        untouched = "These steps did not change the weights"
        if self.train_step.in_backward:
            untouched = "No gradient that was not finite changed a weight"
        cause = f"The router {router} gives NaN or infinite logits: " if router else ""
        return self._error(
            f"{cause}The loss or the gradient was not finite in {self.statistics.consecutive_bad} steps in a row, up "
            f"to step {self.statistics.step}. {untouched}. The weights are saved: {checkpoints}."
        )

    def refuse_broken_weights(self, steps: int, checkpoints: Path, gives_finite_loss: Callable[[int], bool]) -> None:
        """Raise NumbersError if the run's last step was not finite, or all `steps` were skipped, and the weights give
        no finite loss on the batch of the last finite step. `gives_finite_loss`: tries the batch of a step."""
        skipped, last_finite = self.statistics.skipped, self.last_finite - 1
        if self.statistics.consecutive_bad == 0 and skipped < self.statistics.step:
            return
        if last_finite >= 0 and skipped < steps and gives_finite_loss(last_finite):
            return
        raise self._error(
            f"{skipped} of {steps} steps were skipped, the last of them for a loss or gradient that was not finite, "
            "and the weights give no finite loss on other data: nothing was exported. The state is saved: "
            f"{checkpoints}."
        )

    def summary(self, steps: int) -> list[str]:
        """Lines for the end of the run."""
        statistics, lines = self.statistics, []
        if statistics.skipped:
            line = f"{statistics.skipped} of {steps} steps were skipped: their loss or gradient was not finite"
            line += ", or their loss a spike" * statistics.skips_spikes
            if statistics.consecutive_bad:
                line += f". The last {statistics.consecutive_bad} too, but the weights give a finite loss"
            lines.append(f"{line}.")
        if statistics.spikes:
            lines.append(f"{statistics.spikes} loss spikes: {self.bad_batches.folder / 'spikes'}")
        if self.config.noise_scale:
            lines.append(statistics.noise.advice(self.config.largest_batch))
        return lines

    def report(self) -> None:
        """Report the bad steps so far, with their samples in the current plan. Waits for the device."""
        self.statistics.settle()
        records, self.statistics.unreported = self.statistics.unreported, []
        spikes = [record for record in records if record.spike]
        not_finite = [record for record in records if not record.spike]
        self.bad_batches.report("skipped", not_finite, "its loss or gradient was not finite")
        self.bad_batches.report("spikes", spikes, "a loss spike" + ", skipped" * self.statistics.skips_spikes)

    def _error(self, message: str) -> NumbersError:
        half = ", use bfloat16 in place of float16" if self.statistics.scaled else ""
        return NumbersError(
            f"{message} Lower optimizer.lr{half}, or look at the data of these steps: "
            f"{self.bad_batches.folder / 'skipped'}."
        )
