"""Evaluation: the loss on held-out data, without gradients and dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.models.structure import observed
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.precision import Precision


class HeldOutEvaluation:
    """Evaluates `model` on `plan`, the held-out data of a run."""

    def __init__(
        self,
        plan: Plan,
        load: Callable[[Plan], Loader],
        model: LanguageModel,
        objective: Objective,
        precision: Precision,
    ) -> None:
        self.load, self.model, self.objective, self.precision = load, model, objective, precision
        self.loader = load(plan)

    def measure(self, rows: int) -> dict[str, float]:
        """evaluate() with micro-batches of `rows` rows."""
        if rows != self.loader.plan.sizes.micro_batch_size:
            self.loader.close()
            self.loader = self.load(self.loader.plan.with_micro_batch_size(rows))
        return evaluate(self.model, self.objective, self.loader, self.precision)

    def close(self) -> None:
        """End the loader's processes."""
        self.loader.close()

    @property
    def widest(self) -> int:
        """Tokens of the longest row."""
        plan = self.loader.plan
        return max(map(plan.max_row_length, range(plan.steps)))


@torch.no_grad()
def evaluate(model: LanguageModel, objective: Objective, loader: Loader, precision: Precision) -> dict[str, float]:
    """Means of the objective over the plan, without dropout: `loss`, its metrics, and figures derived from them."""
    plan, training = loader.plan, model.model.training
    sums: dict[str, torch.Tensor] = {}
    try:
        model.model.eval()
        for step in loader.steps():
            for batch in step.micro_batches:
                with precision.context(loader.device):
                    loss, metrics = objective.loss(model, batch)
                    for name, value in {"loss": loss, **metrics}.items():
                        total = sums.setdefault(name, torch.zeros((), dtype=torch.float64, device=loader.device))
                        total += value
    finally:
        model.model.train(training)
    normalizer = sum(objective.normalizer(plan, index) for index in range(plan.steps))
    means = {name: total.item() / normalizer for name, total in sums.items()}
    return {**means, **objective.derived(means)}


@torch.no_grad()
def gives_finite_loss(model: LanguageModel, objective: Objective, batch: Batch, precision: Precision) -> bool:
    """Whether the loss on `batch` is finite, without dropout. Waits for the device."""
    with observed(model.model), torch.compiler.set_stance("force_eager"), precision.context(batch.input_ids.device):
        return bool(objective.loss(model, batch)[0].isfinite().item())
