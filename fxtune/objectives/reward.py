"""Reward models (Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155): the model gives each answer a number, and
the chosen answer a higher number than the rejected answer.

    loss = -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2

The first term depends only on differences of rewards, so all rewards could drift. The second term keeps rewards around
zero (Eisenstein et al., arXiv:2312.09244). With `margin`, pairs whose labels differ more must have a larger difference
of rewards (Touvron et al., arXiv:2307.09288).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch.nn import functional as F

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.facts.run import Facts
from fxtune.models.kinds.scorer import SCORE_LABEL, with_label
from fxtune.objectives.base import GroupLosses, GroupObjective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs, one_number_refusals
from fxtune.objectives.preferences import Answers, contradictions, is_first_of_pair, pair_metrics
from fxtune.objectives.score_model import ScoreModel


def _margins(plan: Plan) -> np.ndarray:
    """The margin of each pair, float32 [pairs]. A pair without labels has NaN."""
    labels = plan.stream.labels().reshape(-1, 2)
    return np.asarray(labels[:, 0] - labels[:, 1])


@dataclass
class Reward(GroupObjective):
    needs: ClassVar[Needs] = Needs(head="score", documents=(2, 2), labels=None)
    interface: ClassVar[type[LanguageModel]] = ScoreModel
    center: float = field(default=0.01, metadata={"min": 0})
    """Weight of the squared sum of a pair's rewards, which keeps them around zero."""
    margin: bool = False
    """Whether the chosen answer's reward must exceed the rejected answer's by the difference of the pair's labels
    (`margin` of a row, or `score_chosen` minus `score_rejected`). A pair without labels has margin 0."""

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        yield from one_number_refusals("a reward", facts)

    def configured(self, hf_config: Any) -> Any:
        return with_label(hf_config, SCORE_LABEL)

    def plan_refusals(self, plan: Plan) -> Iterator[str]:
        if self.margin and np.isnan(_margins(plan)).all():
            yield (
                "objective.margin: no pair has a `margin`, or `score_chosen` and `score_rejected`, so it would change "
                "nothing. Add them to the rows, or set it to false."
            )

    def plan_notes(self, plan: Plan) -> Iterator[str]:
        yield from contradictions(plan)
        margins = _margins(plan) if self.margin else np.zeros(0)
        if low := int((margins <= 0).sum()):
            yield (
                f"objective.margin: {low:,} of {len(margins):,} pairs have a margin of 0 or below: they ask for no "
                "lead of the chosen answer, or for a lead of the rejected one. Are the scores of the two exchanged?"
            )
        if without := int(np.isnan(margins).sum()):
            yield f"objective.margin: {without:,} of {len(margins):,} pairs have no labels, and so a margin of 0."

    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        rewards = Answers.of(model.scores(batch))
        lengths = Answers.of(batch.document_sums((batch.labels != IGNORE_INDEX).float()))
        margin = rewards.margin
        if self.margin:
            assert batch.document_labels is not None
            margin = margin - Answers.of(batch.document_labels).margin.nan_to_num(0.0)
        losses = -F.logsigmoid(margin) + self.center * (rewards.chosen + rewards.rejected).square()
        return GroupLosses(is_first_of_pair(batch), losses, pair_metrics(rewards, lengths))
