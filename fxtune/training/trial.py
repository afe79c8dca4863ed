"""Tries batches without training, to find the cause of a loss that is not finite."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxtune.data.batches.plan import Plan
from fxtune.models.routers import broken_router
from fxtune.models.structure import without_dropout
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.training.builder import RunBuilder


@dataclass(frozen=True)
class Trial:
    builder: RunBuilder
    model: LanguageModel
    objective: Objective

    def all_finite(self, plan: Plan, step: int) -> bool:
        """Whether the first micro-batch of `step` has a finite loss on each rank."""
        broken = not self._is_finite(self.builder.own(plan.of_step(step)), step)
        return not self.builder.world.agree(broken, "trying the last weights")

    @torch.no_grad()
    def _is_finite(self, own: Plan, step: int, micro_batch: int = 0) -> bool:
        """Whether a micro-batch of this rank has a finite loss, without dropout. Waits for the device."""
        device, precision = self.builder.world.device, self.builder.techniques.precision
        batch = own.batch(step, micro_batch).to(device)
        eager = torch.compiler.set_stance("force_eager")
        with without_dropout(self.model.model), eager, precision.context(device):
            return bool(self.objective.loss(self.model, batch)[0].isfinite().item())

    def broken_router(self, plan: Plan, step: int) -> str | None:
        """The name of a router that gives NaN or infinite logits for `step` on any rank; None if no router does."""
        routers, own = self.model.routers, self.builder.own(plan.of_step(step))

        def run() -> None:
            for micro_batch in range(own.micro_batches(step)):
                self._is_finite(own, step, micro_batch)

        try:
            name = broken_router(self.model.model, routers, run) if routers is not None else None
        except Exception:  # noqa: BLE001  a failure in this search must not hide the error about the loss
            name = None
        found = self.builder.world.gather(name, "looking for a broken router")
        return next((router for router in found if router), None)
