"""Causal language modelling: the cross-entropy of supervised tokens, divided by the number of them in a whole step.

The loss of a mixture of experts also has the auxiliary loss of its routers (techniques.router.aux_loss_coef). `loss`
is in nats per supervised token; `eval/perplexity` is e to the power of `eval/loss`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel


@dataclass
class CausalLM(Objective):
    unit: ClassVar[str] = "nats per supervised token"

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = model.summed_loss(batch)
        auxiliary, metrics = model.router_terms(batch, (batch.labels != IGNORE_INDEX).sum())
        return (loss if auxiliary is None else loss + auxiliary), metrics

    def normalizer(self, plan: Plan, step: int) -> float:
        return float(plan.supervised(step))

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"perplexity": math.exp(min(means["loss"], 700.0))}
