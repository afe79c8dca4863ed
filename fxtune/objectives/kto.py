"""Kahneman-Tversky optimization (Ethayarajh et al., arXiv:2402.01306): answers that are each judged good or bad.

    r  = log(policy / reference) of the answer,  z0 = max(0, mean r of mismatched answers)
    loss = desirable_weight   * (1 - sigmoid(beta * (r - z0)))   for a good answer
           undesirable_weight * (1 - sigmoid(beta * (z0 - r)))   for a bad one

z0 estimates how far the model has moved from its reference. A mismatched answer is the answer of another row after the
prompt of this row (data/tokenized/mismatched.py). z0 is a mean over the mismatched answers of a whole step on all
ranks, so the loss does not depend on train.micro_batch_size. A pass without gradient computes z0 before the losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, OnLong
from fxtune.data.tokenized.mismatched import with_mismatched
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError
from fxtune.objectives.base import GroupLosses, GroupObjective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs, same_label_refusals
from fxtune.objectives.reference import WithReference

MOST_GOOD = 4 / 3
"""In the paper (weight x number of good answers) / (weight x number of bad answers) is between 1 and this number."""


def _judgments(plan: Plan) -> tuple[int, int]:
    """The numbers of good and of bad answers on which the plan trains."""
    labels = plan.stream.labels()
    return int((labels > 0).sum()), int((labels <= 0).sum())


@dataclass
class KTO(GroupObjective, WithReference):
    needs: ClassVar[Needs] = Needs(labels=True, reference=True, whole_step=True)
    metrics: ClassVar[Mapping[str, str]] = {
        "reward_accuracy": "share of answers that the model has moved towards if good, and away from if bad",
        "reward_margin": "beta times how far the model has moved in that direction, beyond kl",
        "kl": "z0: the mean log ratio of mismatched answers, at least 0",
        "log_probs": "mean log-probability of a token of the answers",
        "length": "tokens of an answer",
    }
    beta: float = field(default=0.1, metadata={"above": 0})
    """How strongly the model is held to its reference. A larger value keeps the model closer to it."""
    desirable_weight: float = field(default=1.0, metadata={"above": 0})
    """Weight of good answers. Raise it if good answers are few: in the paper, weight x number of the good answers is 1
    to 4/3 times weight x number of the bad answers."""
    undesirable_weight: float = field(default=1.0, metadata={"above": 0})
    """Weight of bad answers."""

    def accept(
        self, tables: Sequence[TokenTable], held_out: Sequence[TokenTable], data: DataConfig
    ) -> tuple[list[TokenTable], list[TokenTable]]:
        super().accept(tables, held_out, data)
        if refusals := [*same_label_refusals(self.name, tables), *same_label_refusals(self.name, held_out)]:
            raise ConfigError("\n".join(refusals))
        longest = data.sequence_length if data.on_long is OnLong.truncate else None
        made = [[with_mismatched(table, longest, data.packs) for table in side] for side in (tables, held_out)]
        return made[0], made[1]

    def plan_refusals(self, plan: Plan) -> Iterator[str]:
        good, bad = _judgments(plan)
        if good and bad:
            return
        held_out = (
            f"data.eval_fraction={plan.stream.settings.share(0):g} holds out"
            if any(counts.other_side for counts in plan.stream.counts)
            else "data.on_long and data.dedup leave out"
        )
        yield (
            f"{', '.join(table.name for table in plan.tables)}: all {good + bad:,} answers to train on are "
            f"{'good' if good else 'bad'} by their `label`, and objective={self.name} learns from good and bad ones: "
            f"{held_out} the others. Change it, or add rows."
        )

    def plan_notes(self, plan: Plan) -> Iterator[str]:
        good, bad = _judgments(plan)
        if not good or not bad:
            return
        share = self.desirable_weight * good / (self.undesirable_weight * bad)
        if 1 / (2 * MOST_GOOD) <= share <= 2 * MOST_GOOD:
            return
        key, weight = "undesirable_weight", self.desirable_weight * good / bad
        if good < bad:
            key, weight = "desirable_weight", self.undesirable_weight * bad / good
        yield (
            f"objective={self.name}: {good:,} good and {bad:,} bad answers; with their weights the good ones count "
            f"{share:.3g} times as much as the bad ones (1 to 4/3 in the paper): objective.{key}={weight:.3g}."
        )

    def step_values(self, model: LanguageModel, batch: Batch) -> torch.Tensor:
        """For each document, its log ratio and 1 if it is a mismatched answer, else zeros."""
        assert batch.document_labels is not None
        assert batch.group_of is not None
        ratios = batch.document_sums(model.log_probs(batch) - model.reference_log_probs(batch))
        mismatched = (batch.group_of >= 0) & batch.document_labels.isnan()
        return torch.stack([torch.where(mismatched, ratios, 0.0), mismatched.float()], dim=1)

    def step_parts(self, values: torch.Tensor) -> torch.Tensor:
        """For each document, the sum of the log ratios of all mismatched answers, and the number of these answers."""
        return values.sum(0).expand_as(values)

    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        assert batch.document_labels is not None
        total, number = self.step_part(model, batch)[0]
        reference = model.reference_log_probs(batch)
        policy = model.log_probs(batch)
        ratios = batch.document_sums(policy - reference)
        kl = (total / number).clamp(min=0)
        is_answer, is_good = ~batch.document_labels.isnan(), batch.document_labels > 0
        sign = torch.where(is_good, 1.0, -1.0)
        margins = sign * self.beta * (ratios - kl)
        weight = torch.where(is_good, self.desirable_weight, self.undesirable_weight)
        lengths = batch.document_sums((batch.labels != IGNORE_INDEX).float())
        log_probs = batch.document_sums(policy.detach()) / lengths.clamp(min=1)
        metrics = {
            "reward_accuracy": (margins > 0).float(),
            "reward_margin": margins,
            "kl": kl.expand_as(ratios),
            "log_probs": log_probs,
            "length": lengths,
        }
        return GroupLosses(is_answer, weight * torch.sigmoid(-margins), metrics)
