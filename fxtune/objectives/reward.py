"""Reward models (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155): a number for each answer, the chosen one's
above the rejected one's.

    loss = -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2

Only differences of rewards matter for the first term, so rewards could drift; the second one keeps them around zero
(Eisenstein et al., arXiv:2312.09244). `margin` asks for a larger difference where the labels of a pair say that it is
large (Touvron et al., arXiv:2307.09288).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs
from fxtune.objectives.preferences import Answers, is_first_of_pair


@dataclass
class Reward(Objective):
    needs: ClassVar[Needs] = Needs(head="score", documents=(2, 2), labels=None)
    center: float = field(default=0.01, metadata={"min": 0})
    """Weight of the squared sum of a pair's rewards, which keeps them around zero."""
    margin: bool = False
    """Whether the chosen reward must win by the difference of the pair's labels (`margin` of a row, or `score_chosen`
    minus `score_rejected`). A pair without labels has margin 0."""

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rewards = Answers.of(model.scores(batch))
        lengths = Answers.of(batch.document_sums((batch.labels != IGNORE_INDEX).float()))
        is_pair = is_first_of_pair(batch)

        def total(values: torch.Tensor) -> torch.Tensor:
            return torch.where(is_pair, values, 0.0).sum()

        margin = rewards.margin
        if self.margin:
            assert batch.document_labels is not None
            margin = margin - Answers.of(batch.document_labels).margin.nan_to_num(0.0)
        loss = total(-F.logsigmoid(margin) + self.center * (rewards.chosen + rewards.rejected).square())
        metrics = {
            "reward_accuracy": (rewards.margin > 0).float(),
            "reward_margin": rewards.margin,
            "reward_chosen": rewards.chosen,
            "reward_rejected": rewards.rejected,
            "length_chosen": lengths.chosen,
            "length_rejected": lengths.rejected,
        }
        auxiliary, routers = model.router_terms(batch, is_pair.sum())
        sums = {name: total(values.detach()) for name, values in metrics.items()}
        return (loss if auxiliary is None else loss + auxiliary), {**sums, **routers}

    def normalizer(self, plan: Plan, step: int) -> float:
        return float(plan.groups(step))
