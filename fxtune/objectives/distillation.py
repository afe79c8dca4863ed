"""Distillation (Hinton et al., arXiv:1503.02531): the student learns the teacher's distribution of the next token, at
each supervised token of the text.

    loss = (1 - text_weight) * divergence(teacher, student) + text_weight * cross-entropy of the text

The loss is a sum over supervised tokens, divided by the number of them in the whole step. kernels/divergence.py
defines the divergences. The forward KL makes the student cover all that the teacher finds likely. The reverse KL lets
a small student leave out what it cannot learn (MiniLLM, arXiv:2306.08543). The Jensen-Shannon divergence lies between
both (GKD, arXiv:2306.13649).

The teacher is another model with the same tokens. Or it is the base of the student's adapters: then the text teaches,
and the divergence keeps the student from forgetting what the base could do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Optional

import torch

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.facts.run import Facts
from fxtune.kernels.divergence import Divergence, Measure
from fxtune.models.reference import ReferenceModel
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.teacher import BASE, StoredTeacher, Teacher, WithTeacher


@dataclass
class Distillation(WithTeacher):
    logit_tensors: ClassVar[int] = 8
    unit: ClassVar[str] = "loss per supervised token"
    metrics: ClassVar[Mapping[str, str]] = {
        "kl": "KL(teacher | student) of the next token in nats, at objective.temperature, whatever the divergence is",
        "text_loss": "cross-entropy of the text's own tokens in nats: the loss of objective=causal_lm",
    }
    compared: ClassVar[tuple[str, ...]] = ("kl",)
    divergence: Measure = Measure.forward_kl
    """`forward_kl`: KL(teacher | student). `reverse_kl`: KL(student | teacher). `jensen_shannon`: between both."""
    teacher_share: float = field(default=0.5, metadata={"above": 0, "below": 1})
    """GKD's beta: the teacher's share of the mixture in the Jensen-Shannon divergence. Small: like the forward KL;
    large: like the reverse KL."""
    temperature: float = field(default=1.0, metadata={"above": 0})
    """Divides the logits of teacher and student in the divergence. Above 1, unlikely tokens count more."""
    store: Optional[int] = field(default=None, metadata={"min": 1})
    """Compute the teacher's likeliest tokens once, this many for each supervised token, and store them beside the
    cached tokens. The teacher is then in memory only before the first step. null: the teacher computes each step."""
    text_weight: float = field(default=0.0, metadata={"min": 0, "max": 1})
    """The weight of the text's own cross-entropy in the loss. The divergence has the rest. With 1, the student learns
    the text alone, and the teacher only measures `kl`."""

    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert model.teacher is not None, "prepare() has set it"
        targets = model.teacher.targets(batch)
        divergence = Divergence(self.divergence, self.teacher_share, self.temperature, self.text_weight)

        def chunk_sums(logits: torch.Tensor, rows: slice, gradient: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
            return divergence.sums(logits, targets(rows), batch.labels[rows], gradient)

        loss, kl, text = model.sums_over_logits(batch, chunk_sums).unbind()
        auxiliary, routers = model.router_terms(batch, (batch.labels != IGNORE_INDEX).sum())
        metrics = {"kl": kl.detach(), "text_loss": text.detach(), **routers}
        return (loss if auxiliary is None else loss + auxiliary), metrics

    @property
    def forward_passes(self) -> int:
        return super().forward_passes + (self.teacher == BASE)

    @property
    def stored_tokens(self) -> int:
        return self.store or 0

    def prepare(self, model: LanguageModel, build_frozen: Callable[[], LanguageModel]) -> None:
        if self.store:
            model.teacher = StoredTeacher()
        elif self.teacher == BASE:
            model.teacher = Teacher(model, ReferenceModel(model.prepared, keeps_start=False).active)
        else:
            model.teacher = Teacher(build_frozen(), torch.no_grad)

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        if not self.teacher:
            yield (
                "objective.teacher: there is no teacher. Name its folder or hub id, or set it to base to hold the "
                "student to the model without its adapters."
            )
        if self.teacher == BASE and not self.text_weight:
            yield (
                "objective.teacher=base: the student starts as its own teacher, and without the text it would learn "
                "nothing. Set objective.text_weight, for example to 0.5."
            )
        if self.store and (self.divergence is not Measure.forward_kl or self.teacher == BASE):
            yield (
                f"objective.store={self.store}: stored tokens give the forward KL of another model alone. Set "
                "objective.divergence=forward_kl and name a teacher, or set objective.store=null."
            )
