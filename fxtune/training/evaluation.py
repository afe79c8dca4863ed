"""The held-out data of a run, and the model's loss on it."""

from __future__ import annotations

import torch

from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.plan import Plan
from fxtune.objectives.causal_lm import Loss, mean_loss
from fxtune.techniques.precision import Precision


class HeldOutEvaluation:
    """`plan` says what is held out, and how many rows are taken at once until measure() is asked for fewer."""

    def __init__(
        self, plan: Plan, config: LoaderConfig, device: torch.device, loss: Loss, precision: Precision
    ) -> None:
        self.config, self.device, self.loss, self.precision = config, device, loss, precision
        self.loader = Loader(plan, config, device)

    def measure(self, rows: int) -> float:
        """The mean loss in nats a supervised token, `rows` rows at once."""
        if rows != self.loader.plan.sizes.micro_batch_size:
            self.loader.close()
            self.loader = Loader(self.loader.plan.with_micro_batch_size(rows), self.config, self.device)
        return mean_loss(self.loss, self.loader, self.precision)

    def close(self) -> None:
        """End the processes that load it."""
        self.loader.close()

    @property
    def widest(self) -> int:
        """Tokens of the longest row."""
        plan = self.loader.plan
        return max(map(plan.max_row_length, range(plan.steps)))
