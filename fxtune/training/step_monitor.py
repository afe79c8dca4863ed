"""Whether a run's numbers are sound: steps whose loss or gradient is not finite, and loss spikes.

What to do about them is decided on the device, where the step is; here they are counted, told with their samples, and too many of
them end the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxtune.config.root import Spikes, TrainConfig
from fxtune.errors import NumbersError
from fxtune.training.bad_batches import BadBatches
from fxtune.training.interval import Interval, Taken
from fxtune.training.spikes import SpikeWindow


class StepMonitor:
    """Those of one run. `spikes` and `interval` are the loop's to use. `scaled`: a float16 loss scale is in play."""

    def __init__(self, config: TrainConfig, spikes: SpikeWindow, suspects: BadBatches, scaled: bool) -> None:
        self.config, self.spikes, self.suspects = config, spikes, suspects
        self.interval = Interval(scaled=scaled, skips_spikes=config.spikes is Spikes.skip)

    def read(self) -> dict[str, Any]:
        """The figures of the steps since the last reading; tells those that are suspect. Waits for the device."""
        figures = self.interval.read()
        self._tell()
        return figures

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to count, to judge and to log on alike. Waits for the device."""
        interval = self.interval
        interval.settle()
        self._tell()  # a kill after the save that this is for must not leave them untold
        rows = [[value if math.isfinite(value) else None for value in row] for row in interval.rows]
        return {
            "skipped": interval.skipped,
            "in_a_row": interval.in_a_row,
            "spikes": interval.spikes,
            "unlogged": rows,
            "window": self.spikes.state(),
        }

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Take back what `state` gave, after `step` steps."""
        interval = self.interval
        interval.step = step
        interval.skipped, interval.in_a_row, interval.spikes = (
            state.get(name, 0) for name in ("skipped", "in_a_row", "spikes")
        )
        interval.rows = [
            Taken._make(math.nan if value is None else value for value in row) for row in state.get("unlogged", [])
        ]
        self.spikes.load(state.get("window", {}))

    @property
    def too_many(self) -> bool:
        """So many steps in a row were not finite that the run is to stop."""
        return self.interval.in_a_row >= self.config.max_skipped_steps

    @property
    def last_sound(self) -> int:
        """The number of steps up to the last one that was finite: how far the weights have come."""
        return self.interval.step - self.interval.in_a_row

    @property
    def doubtful(self) -> bool:
        """The steps so far end in one that was not finite, or none of them was taken."""
        return self.interval.in_a_row > 0 or self.interval.skipped >= self.interval.step

    def too_many_error(self, checkpoints: Path) -> NumbersError:
        """The error of too_many. `checkpoints`: where the state is saved."""
        interval = self.interval
        return self._error(
            f"The loss or the gradient was not finite in {interval.in_a_row} steps in a row, up to step {interval.step}. None of "
            f"them touched the weights, and those are saved: {checkpoints}."
        )

    def refuse_broken(self, steps: int, checkpoints: Path, gives_finite_loss: Callable[[int], bool]) -> None:
        """Raise NumbersError where a run of `steps` steps ends in ones that were not finite, and its weights give no finite loss
        either, on the batch of the last step that had one.
        """
        sound = self.last_sound - 1
        if not self.doubtful or (sound >= 0 and self.interval.skipped < steps and gives_finite_loss(sound)):
            return
        raise self._error(
            f"{self.interval.skipped} of {steps} steps were skipped, the last ones for a loss or gradient that was not finite, "
            f"and the weights give no finite loss elsewhere: nothing was exported. The state is saved: {checkpoints}."
        )

    def told(self, steps: int) -> list[str]:
        """Lines for the end of the run."""
        interval, lines = self.interval, []
        if interval.skipped:
            spikes = ", or their loss a spike" * interval.skips_spikes
            last = f". The last {interval.in_a_row} too, but the weights give a finite loss" * bool(interval.in_a_row)
            lines.append(
                f"{interval.skipped} of {steps} steps were skipped: their loss or gradient was not finite"
                f"{spikes}{last}."
            )
        if interval.spikes:
            lines.append(f"{interval.spikes} loss spikes: {self.suspects.folder / 'spikes'}")
        return lines

    def _tell(self) -> None:
        rows, self.interval.suspects = self.interval.suspects, []
        self.suspects.tell(rows, self.interval.skips_spikes)

    def _error(self, what: str) -> NumbersError:
        half = ", use bfloat16 in place of float16" if self.interval.scaled else ""
        return NumbersError(
            f"{what} Lower optimizer.lr{half}, or look at the data of these steps: {self.suspects.folder / 'skipped'}."
        )
