"""Odds ratio preference optimization (Hong et al., arXiv:2403.07691): supervised tuning on the chosen answer, and a
term that lowers the odds of the rejected answer. It needs no reference and no supervised training before it.

    loss = -mean of chosen - beta * log sigmoid(log odds of chosen - log odds of rejected)
    log odds = m - log(1 - exp(m)),  m = mean log-probability of a token

Only the answer's tokens count. The prompt is not learned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from fxtune.objectives.preferences import Answers, PairObjective, ScoredPairs

LARGEST_MEAN = -1e-6
"""Upper limit for mean log-probabilities. At a mean of 0 the answer is certain, and its odds are infinite."""


@dataclass
class ORPO(PairObjective):
    beta: float = field(default=0.1, metadata={"above": 0})
    """The paper's lambda: the weight of the odds ratio beside the likelihood of the chosen answer."""

    def rewards(self, pairs: ScoredPairs) -> Answers:
        return pairs.means * self.beta

    def pair_losses(self, pairs: ScoredPairs) -> torch.Tensor:
        means = pairs.means
        odds = Answers(_log_odds(means.chosen), _log_odds(means.rejected))
        return -means.chosen - self.beta * F.logsigmoid(odds.margin)


def _log_odds(mean: torch.Tensor) -> torch.Tensor:
    mean = mean.clamp(max=LARGEST_MEAN)
    return mean - torch.log(-torch.expm1(mean))
