"""Steps without a run: their config and data, and trials of batches to find why a loss is not finite."""

from __future__ import annotations

import copy
import tempfile
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxtune.config.root import Config, OutOfMemory
from fxtune.data.batches.build import PreparedData
from fxtune.data.batches.plan import Plan
from fxtune.models.routers import broken_router
from fxtune.models.structure import without_dropout
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.tracking.tracker import DisplayKind, TrackingConfig
from fxtune.training.builder import RunBuilder
from fxtune.training.rollouts.made_up import made_up_plan


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


def steps_only(config: Config, steps: int) -> Config:
    """A copy of `config` that takes `steps` steps over the same data, without evaluation, checkpoints and trackers.

    data.eval_fraction stays, because it decides which documents are trained on.
    """
    config = copy.deepcopy(config)
    config.train.max_steps, config.train.epochs = steps, None
    config.train.batch_ramp, config.data.length_schedule = [], []  # all steps have the longest rows
    config.train.out_of_memory = OutOfMemory.stop  # a smaller micro-batch would be another recipe
    config.data.eval_fraction = 0.0 if config.data.eval_sources else config.data.eval_fraction
    config.data.questions.path, config.data.eval_sources = None, []
    config.checkpoint.every = 0
    config.tracking = TrackingConfig(display=DisplayKind.none)
    return config


def trial_data(builder: RunBuilder) -> tuple[Any, PreparedData]:
    """builder.read(), for commands that take steps without a run. Rollouts have made-up answers there."""
    tokenizer, data = builder.read()
    if builder.config.objective.needs.rollouts:
        folder = tempfile.TemporaryDirectory(prefix="fxtune-")
        weakref.finalize(builder, folder.cleanup)
        data = replace(data, training=made_up_plan(builder.config, data.training, Path(folder.name)))
    return tokenizer, data
