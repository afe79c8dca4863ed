"""The common part of objectives over pairs of answers. A group is a pair: the chosen answer, then the rejected one.

An objective gets the summed log-probabilities of both answers of each pair, under the trained model and under the
reference, and returns a loss for each pair. The step divides the sum of losses by its number of pairs, so a pair
counts once, however long its answers are.

The metrics show changes that a falling loss hides. Often `log_probs_chosen` falls, too, while `log_probs_rejected`
falls faster. `length_chosen` and `length_rejected` show whether the data prefers long answers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.objectives.base import GroupLosses, GroupObjective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs

METRICS = {
    "reward_accuracy": "share of pairs whose chosen answer has the higher reward; equal rewards count 0",
    "reward_margin": "reward of the chosen answer minus reward of the rejected one, the mean over pairs",
    "reward_chosen": "reward of the chosen answer: by how much the model prefers it, in the objective's measure",
    "reward_rejected": "reward of the rejected answer",
    "log_probs_chosen": "log-probability of a token of the chosen answer, in nats; falls where training goes too far",
    "log_probs_rejected": "log-probability of a token of the rejected answer, in nats",
    "length_chosen": "tokens of the chosen answer",
    "length_rejected": "tokens of the rejected answer; if it is much shorter, the model may learn length alone",
}
"""The metrics by name, with a line about each."""


@dataclass(frozen=True)
class Answers:
    """A number for the chosen and one for the rejected answer of each pair, float32 [slots]. Both are in the slot of
    the pair's first document in `Batch.cu_seqlens`. Other slots are meaningless, but finite."""

    chosen: torch.Tensor
    rejected: torch.Tensor

    @staticmethod
    def of(documents: torch.Tensor) -> Answers:
        """Make Answers from a tensor with a number for each document [slots]."""
        return Answers(documents, F.pad(documents[1:], (0, 1)))

    @property
    def margin(self) -> torch.Tensor:
        return self.chosen - self.rejected

    def at_least(self, least: float) -> Answers:
        return Answers(self.chosen.clamp(min=least), self.rejected.clamp(min=least))

    def __truediv__(self, other: Answers) -> Answers:
        return Answers(self.chosen / other.chosen, self.rejected / other.rejected)

    def __sub__(self, other: Answers) -> Answers:
        return Answers(self.chosen - other.chosen, self.rejected - other.rejected)

    def __mul__(self, factor: float) -> Answers:
        return Answers(self.chosen * factor, self.rejected * factor)


@dataclass(frozen=True)
class ScoredPairs:
    """The log-probabilities of a micro-batch of pairs, in nats."""

    policy: Answers
    """The log-probability of each answer under the trained model, summed over its tokens. Only this has a gradient."""
    reference: Answers | None
    """The log-probability of each answer under the reference. None if the objective has no reference."""
    length: Answers
    """The number of supervised tokens of each answer, at least 1."""

    @property
    def log_ratios(self) -> Answers:
        """log(policy / reference) of each answer."""
        assert self.reference is not None
        return self.policy - self.reference

    @property
    def means(self) -> Answers:
        """Mean log-probability of a token of each answer, under the trained model."""
        return self.policy / self.length


def is_first_of_pair(batch: Batch) -> torch.Tensor:
    """bool [slots]: whether each document of `batch.cu_seqlens` is the first one of its group."""
    assert batch.group_of is not None
    return (batch.group_of >= 0) & (batch.group_of != F.pad(batch.group_of[:-1], (1, 0), value=-1))


def pair_metrics(rewards: Answers, lengths: Answers) -> dict[str, torch.Tensor]:
    """The metrics that all objectives over pairs have, each float32 [slots]."""
    return {
        "reward_accuracy": (rewards.margin > 0).float(),
        "reward_margin": rewards.margin,
        "reward_chosen": rewards.chosen,
        "reward_rejected": rewards.rejected,
        "length_chosen": lengths.chosen,
        "length_rejected": lengths.rejected,
    }


def contradictions(plan: Plan) -> Iterator[str]:
    """Yield a line if the plan has pairs of the same two answers in both orders."""
    found = plan.stream.spans(np.arange(len(plan.stream.segments)))
    texts = [
        hash(plan.tables[source].ids[slice(*plan.tables[source].offsets[document : document + 2])].tobytes())
        for source, document in zip(found.source.tolist(), found.document.tolist(), strict=True)
    ]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    known = {*pairs}
    if count := sum((rejected, chosen) in known for chosen, rejected in pairs):
        yield (
            f"{count:,} of {len(pairs):,} pairs contradict others, which choose the answer that these reject: they "
            "teach nothing together. Keep one order."
        )


@dataclass
class PairObjective(GroupObjective):
    """An objective over pairs. A subclass defines pair_losses() and rewards()."""

    needs: ClassVar[Needs] = Needs(documents=(2, 2), labels=None)
    metrics: ClassVar[Mapping[str, str]] = METRICS

    def plan_notes(self, plan: Plan) -> Iterator[str]:
        yield from contradictions(plan)

    @abstractmethod
    def pair_losses(self, pairs: ScoredPairs) -> torch.Tensor:
        """The loss of each pair, float32 [slots]."""

    @abstractmethod
    def rewards(self, pairs: ScoredPairs) -> Answers:
        """How strongly the trained model prefers each answer, in the objective's measure."""

    def token_weights(self, batch: Batch, lengths: torch.Tensor) -> torch.Tensor | None:
        """The weight of each target in the sums, float32 [supervised]. None: all targets have weight 1. `lengths`
        [slots]: the number of supervised tokens of each document."""
        return None

    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        reference = model.reference_log_probs(batch) if self.needs.reference else None
        policy = model.log_probs(batch)
        lengths = batch.document_sums((batch.labels != IGNORE_INDEX).float())
        weights = self.token_weights(batch, lengths)

        def answers(log_probs: torch.Tensor) -> Answers:
            return Answers.of(batch.document_sums(log_probs if weights is None else log_probs * weights))

        length = Answers.of(lengths).at_least(1)
        pairs = ScoredPairs(answers(policy), None if reference is None else answers(reference), length)
        by_token = Answers.of(batch.document_sums(policy)) / length
        metrics = {
            **pair_metrics(self.rewards(pairs), length),
            "log_probs_chosen": by_token.chosen,
            "log_probs_rejected": by_token.rejected,
        }
        return GroupLosses(is_first_of_pair(batch), self.pair_losses(pairs), metrics)
