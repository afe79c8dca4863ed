"""Direct preference optimization (Rafailov et al., arXiv:2305.18290): the model itself is the reward model.

    loss = -log sigmoid(beta * (log ratio of chosen - log ratio of rejected)),  log ratio = log(policy / reference)

Log ratios are sums over the answer's tokens. With policy = reference, as in the first step, the loss is ln 2.

Variants: `label_smoothing` is for data in which this share of the labels is wrong (conservative DPO, Mitchell 2023).
`loss_type=hinge` is SLiC's loss (arXiv:2305.10425). `sft_weight` adds the chosen answer's mean negative log-likelihood
per token (RPO, arXiv:2404.19733). With `length_normalized` below 1 the tokens beyond the shorter answer's length count
less (LD-DPO, arXiv:2409.06411), both for the trained model and for the reference.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import Batch
from fxtune.objectives.needs import Needs
from fxtune.objectives.preferences import Answers, PairObjective, ScoredPairs, is_first_of_pair
from fxtune.objectives.reference import WithReference


class PairLoss(str, Enum):
    sigmoid = "sigmoid"
    hinge = "hinge"


@dataclass
class DPO(PairObjective, WithReference):
    needs: ClassVar[Needs] = Needs(documents=(2, 2), labels=None, reference=True)
    beta: float = field(default=0.1, metadata={"above": 0})
    """How strongly the model is held to its reference. A larger value keeps the model closer to it."""
    loss_type: PairLoss = PairLoss.sigmoid
    """`sigmoid`: the logistic loss of DPO. `hinge`: max(0, 1 - beta * margin)."""
    label_smoothing: float = field(default=0.0, metadata={"min": 0, "below": 0.5})
    """The assumed share of pairs whose chosen answer is in fact the worse one (cDPO)."""
    sft_weight: float = field(default=0.0, metadata={"min": 0})
    """Weight of the chosen answer's negative log-likelihood, the mean over its tokens (RPO has 1)."""
    length_normalized: float = field(default=1.0, metadata={"min": 0, "max": 1})
    """Weight of the tokens beyond the length of the pair's shorter answer (LD-DPO has 0.5). 1: all tokens count the
    same."""

    def token_weights(self, batch: Batch, lengths: torch.Tensor) -> torch.Tensor | None:
        if self.length_normalized == 1:
            return None
        first = is_first_of_pair(batch)
        answers = Answers.of(lengths)
        shorter = torch.minimum(answers.chosen, answers.rejected)
        # Copy a pair's shorter length to the slots of both documents.
        shorter = torch.where(first, shorter, F.pad(shorter[:-1], (1, 0)))
        document = batch.document_of_target()
        place = torch.arange(len(document), device=document.device) - (lengths.cumsum(0) - lengths).long()[document]
        return torch.where(place < shorter[document], 1.0, self.length_normalized)

    def rewards(self, pairs: ScoredPairs) -> Answers:
        return pairs.log_ratios * self.beta

    def pair_losses(self, pairs: ScoredPairs) -> torch.Tensor:
        margin = self.rewards(pairs).margin
        if self.loss_type is PairLoss.hinge:
            right, wrong = F.relu(1 - margin), F.relu(1 + margin)
        else:
            right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
        losses = (1 - self.label_smoothing) * right + self.label_smoothing * wrong if self.label_smoothing else right
        return losses - self.sft_weight * pairs.means.chosen if self.sft_weight else losses
