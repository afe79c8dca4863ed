"""Rerankers: the model gives each candidate of a query a score, and better candidates higher scores.

    pointwise  mean over candidates of binary cross-entropy of sigmoid(score) and the relevance, which is 0 to 1
    pairwise   mean over pairs with different relevances of -log sigmoid(difference of scores)   (RankNet,
               Burges et al., 2005)
    listwise   cross-entropy of softmax(scores) and softmax(relevances)                         (ListNet,
               Cao et al., 2007)

Each query counts once, whatever the number of its candidates. A document is what the tokenizer makes of the query and
a candidate: tokenizer(query, candidate).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import Plan
from fxtune.facts.run import Facts
from fxtune.models.dims import Shape
from fxtune.models.kinds.scorer import RELEVANCE_LABEL, SCORE_WORDS, with_label
from fxtune.objectives.base import GroupLosses, GroupObjective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs, one_number_refusals
from fxtune.objectives.score_model import ScoreModel

CUT = 10
"""Ranks up to which MRR and nDCG count."""


class RankingLoss(str, Enum):
    pointwise = "pointwise"
    pairwise = "pairwise"
    listwise = "listwise"


@dataclass
class Ranking(GroupObjective):
    needs: ClassVar[Needs] = Needs(documents=(2, None), labels=True, head="score", row_format="candidates")
    interface: ClassVar[type[LanguageModel]] = ScoreModel
    unit: ClassVar[str] = "mean loss of a query"
    metrics: ClassVar[Mapping[str, str]] = {
        "first": "share of queries whose highest score is of a candidate with the highest relevance",
        "mrr": "mean of 1 / rank of the first candidate with the highest relevance, 0 beyond rank 10",
        "ndcg": "discounted gain of the first ten ranks, by the gain of the best order",
    }
    compared: ClassVar[tuple[str, ...]] = ("first", "mrr", "ndcg")
    losses: RankingLoss = RankingLoss.listwise
    """`pointwise`, `pairwise` or `listwise`."""
    words: list[str] = field(default_factory=list)
    """`[no, yes]`: the score starts as the base's logit of the second word minus its logit of the first one, after the
    last token. Such a base has learned to answer with these words, as Qwen3-Reranker. Empty: the head is drawn."""

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        yield from one_number_refusals("a relevance", facts)
        if self.words and (len(self.words) != 2 or not Shape.of(facts.model).causal):
            yield "objective.words: name two words, and a decoder in model.path, whose head predicts the next word."

    def configured(self, hf_config: Any) -> Any:
        config = with_label(hf_config, RELEVANCE_LABEL)
        if self.words:
            setattr(config, SCORE_WORDS, self.words)
        return config

    def plan_refusals(self, plan: Plan) -> Iterator[str]:
        labels = plan.stream.labels()
        if self.losses is RankingLoss.pointwise and ((labels < 0) | (labels > 1)).any():
            yield (
                "objective.losses=pointwise learns relevances from 0 to 1, and the rows have others. Divide them by "
                "the largest, or set objective.losses=listwise."
            )

    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        scores, relevances, groups = model.scores(batch), batch.document_labels, batch.group_of
        assert relevances is not None
        assert groups is not None
        is_document = groups >= 0
        relevances = relevances.nan_to_num(0.0)
        same = (groups[:, None] == groups) & is_document[:, None]  # [slots, slots]; false for slots without documents
        slot = torch.arange(len(groups), device=groups.device)
        first = is_document & ~(same & (slot[:, None] > slot)).any(1)
        metrics = _metrics(scores.detach(), relevances, same, slot)
        return GroupLosses(first, self._losses(scores, relevances, same), metrics)

    def _losses(self, scores: torch.Tensor, relevances: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
        """The loss of each document's group: [slots]."""
        sizes = same.sum(1).clamp(min=1)
        if self.losses is RankingLoss.pointwise:
            each = F.binary_cross_entropy_with_logits(scores, relevances.clamp(0, 1), reduction="none")
            return same.float() @ each / sizes
        if self.losses is RankingLoss.pairwise:
            better = same & (relevances[:, None] > relevances)
            each = torch.where(better, F.softplus(scores - scores[:, None]), 0.0).sum(1)
            return same.float() @ each / (same.float() @ better.sum(1).float()).clamp(min=1)
        wanted, shares = (_log_softmax(of, same) for of in (relevances, scores))
        return -(same.float() @ (wanted.exp() * shares))


def _log_softmax(values: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """The logarithm of the softmax of each document within its group: [slots]. 0 for slots without documents."""
    inside = torch.where(same, values, torch.finfo(values.dtype).min)
    return torch.where(same.any(1), values - inside.logsumexp(1), 0.0)


def _metrics(
    scores: torch.Tensor, relevances: torch.Tensor, same: torch.Tensor, slot: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The metrics of each document's group: [slots]. Equal scores rank worse candidates first: a model that gives all
    candidates one score has ranked nothing."""

    def ranks(keys: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
        before = (keys > keys[:, None]) | ((keys == keys[:, None]) & ties)
        return 1 + (same & before).sum(1)

    later = slot < slot[:, None]
    worse = (relevances < relevances[:, None]) | ((relevances == relevances[:, None]) & later)
    rank, best_rank = ranks(scores, worse), ranks(relevances, later)
    best = torch.where(same, relevances, -torch.inf).amax(1)
    first_best = torch.where(same & (relevances == best[:, None]), rank, len(slot) + 1).amin(1)
    gain = torch.exp2(relevances) - 1

    def discounted(at: torch.Tensor) -> torch.Tensor:
        return same.float() @ torch.where(at <= CUT, gain / torch.log2(1.0 + at), 0.0)

    return {
        "first": (first_best == 1).float(),
        "mrr": torch.where(first_best <= CUT, 1.0 / first_best, 0.0),
        "ndcg": discounted(rank) / discounted(best_rank).clamp(min=1e-9),
    }
