"""Simple preference optimization (Meng et al., arXiv:2405.14734): no reference, and mean log-probabilities per token,
so that a longer answer has no advantage.

    loss = -log sigmoid(beta * (mean of chosen - mean of rejected) - gamma),  mean = mean log-probability of a token

The paper chooses beta between 2 and 2.5 (up to 10) and gamma / beta around 0.5. In full fine-tuning with a learning
rate of 1e-5 its models broke.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from fxtune.objectives.preferences import Answers, PairObjective, ScoredPairs


@dataclass
class SimPO(PairObjective):
    beta: float = field(default=2.0, metadata={"above": 0})
    """Scale of the difference of mean log-probabilities."""
    gamma: float = field(default=1.0, metadata={"min": 0})
    """The margin, after multiplication by `beta`, by which the chosen answer must win."""
    sft_weight: float = field(default=0.0, metadata={"min": 0})
    """Weight of the chosen answer's negative log-likelihood, the mean over its tokens (CPO-SimPO)."""

    def rewards(self, pairs: ScoredPairs) -> Answers:
        return pairs.means * self.beta

    def pair_losses(self, pairs: ScoredPairs) -> torch.Tensor:
        losses = -F.logsigmoid(self.rewards(pairs).margin - self.gamma)
        return losses - self.sft_weight * pairs.means.chosen if self.sft_weight else losses
