"""Identity preference optimization (Azar et al., arXiv:2310.12036): a squared loss, so that the margin does not grow
without bound if all pairs agree.

    loss = (margin - 1 / (2 beta))^2,  margin = log ratio of chosen - log ratio of rejected

The paper writes sums over tokens. Its authors confirmed that their experiments took means (huggingface/trl#1265), as
other implementations do, so means are the default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fxtune.objectives.needs import Needs
from fxtune.objectives.preferences import Answers, PairObjective, ScoredPairs
from fxtune.objectives.reference import WithReference


@dataclass
class IPO(PairObjective, WithReference):
    needs: ClassVar[Needs] = Needs(documents=(2, 2), labels=None, reference=True)
    beta: float = field(default=0.1, metadata={"above": 0})
    """The paper's tau. The loss is smallest at a margin of 1 / (2 beta)."""
    by_token: bool = True
    """true: log ratios are means over the answer's tokens. false: they are sums, as in the paper's text."""

    def _log_ratios(self, pairs: ScoredPairs) -> Answers:
        return pairs.log_ratios / pairs.length if self.by_token else pairs.log_ratios

    def rewards(self, pairs: ScoredPairs) -> Answers:
        return self._log_ratios(pairs) * self.beta

    def pair_losses(self, pairs: ScoredPairs) -> torch.Tensor:
        return (self._log_ratios(pairs).margin - 1 / (2 * self.beta)).square()
