"""The teacher of distillation: a frozen model whose logits or log-probabilities the student learns from.

A teacher computes the hidden states of a whole micro-batch at once, without gradient. Its head then runs on chunks of
rows, so that the logits of teacher and student exist for one chunk at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Optional

import torch

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import Plan
from fxtune.facts.options import WeightFormat
from fxtune.facts.run import Facts
from fxtune.kernels.divergence import TopTargets
from fxtune.models.load import FrozenModelConfig, ModelConfig, frozen_model, with_shipped_config
from fxtune.objectives.base import Objective
from fxtune.objectives.language_model import LanguageModel

BASE = "base"
"""The teacher that is the student without its adapters."""
Targets = Callable[[slice], torch.Tensor | TopTargets]
"""A function from rows, in the order of `Batch.labels`, to the teacher's logits or to its likeliest tokens."""


class StoredTeacher:
    """A teacher whose likeliest tokens lie beside the token table."""

    def targets(self, batch: Batch) -> Targets:
        stored = batch.teacher_ids, batch.teacher_log_probs, batch.teacher_tail
        return TopTargets(*(values for values in stored if values is not None)).__getitem__


class Teacher:
    """`model`: computes the teacher's logits inside the context `active`, which switches gradients off. The model may
    be the student's own, if the context switches its adapters off."""

    def __init__(self, model: LanguageModel, active: Callable[[], AbstractContextManager[None]]) -> None:
        self.model, self.active = model, active

    def targets(self, batch: Batch) -> Targets:
        """The logits of the supervised tokens of `batch`. Call this before the student's pass, so that
        LanguageModel.router_terms() reads the student's routers."""
        with self.active():
            hidden, head = self.model.prepared.with_head(lambda: self.model.head_input(batch))

        def of_rows(rows: slice) -> torch.Tensor:
            with self.active():
                return head(hidden[rows])

        return of_rows


@dataclass
class WithTeacher(Objective):
    """An objective with a teacher."""

    teacher: str = ""
    """The model that teaches: a folder, a hub id, or `builtin:NAME`, of a model or of an adapter, with the student's
    tokens. `base`: the student without its adapters, so that tuning forgets less. With objective=policy also the
    address of a vLLM server, or several, separated by commas."""
    teacher_revision: Optional[str] = None
    """Commit, tag or branch of a teacher from the hub."""
    teacher_quantize: Optional[WeightFormat] = None
    """Store the teacher's linears in `nf4`, `int8` or `fp8`, or its experts in `mxfp4` (see techniques.quantize.type).
    The student is not quantized by this. null: the teacher's weights keep model.dtype."""

    def __post_init__(self) -> None:
        self._plans = False

    def normalizer(self, plan: Plan, step: int) -> float:
        return float(plan.supervised(step))

    @property
    def teacher_is_server(self) -> bool:
        return self.teacher.startswith(("http://", "https://"))

    def frozen_model(self, trained: ModelConfig) -> FrozenModelConfig | None:
        if self.teacher in ("", BASE) or self.teacher_is_server:
            return None
        if self._plans:
            model = FrozenModelConfig(path=self.teacher, revision=self.teacher_revision, dtype=trained.dtype)
            if (shipped := with_shipped_config(model, plans=True)) is not model:
                return replace(shipped, quantize=self.teacher_quantize)
        model = frozen_model(self.teacher, self.teacher_revision, trained.dtype)
        return replace(model, quantize=self.teacher_quantize)

    def for_plan(self) -> Objective:
        planned = copy.copy(self)
        planned._plans = True
        return planned

    def refusals(self, facts: Facts) -> Iterator[str]:
        yield from super().refusals(facts)
        lora = facts.techniques.lora
        if self.teacher == BASE and not lora.enabled:
            yield (
                "objective.teacher=base: full fine-tuning has no adapters to switch off. Set objective.teacher to the "
                "model of model.path, which is then loaded a second time."
            )
        if self.teacher == BASE and self.teacher_quantize:
            yield (
                "objective.teacher_quantize: with objective.teacher=base the teacher has the student's own weights. "
                "Set techniques.quantize.enabled=true to quantize both, or set this to null."
            )
        if self.teacher == BASE and lora.enabled and lora.factored:
            yield (
                "objective.teacher=base: techniques.lora.init moves a part of the base's weights into the adapters, "
                "so the model without them is not the base. Set techniques.lora.init=default."
            )
        if self.teacher_is_server and not self.needs.rollouts:
            yield (
                f"objective.teacher={self.teacher}: a server gives log-probabilities of given tokens only, and this "
                "objective needs whole distributions. Name a model, or set objective=distill_on_policy."
            )
        if self.teacher_is_server and (self.teacher_quantize or self.teacher_revision):
            yield "objective.teacher_quantize, teacher_revision: a server decides them. Set both to null."
        if (
            self.teacher not in ("", BASE)
            and not self.teacher_is_server
            and (facts.degrees.shard > 1 or facts.degrees.context > 1)
        ):
            yield (
                f"objective.teacher={self.teacher}: each rank has a whole teacher and whole rows, and this run has "
                f"{facts.degrees}. Set parallel.shard=1 and parallel.context=1."
            )
