"""The teacher of distillation: a frozen model whose logits the student learns from.

A teacher computes the hidden states of a whole micro-batch at once, without gradient. Its head then runs on chunks of
rows, so that the logits of teacher and student exist for one chunk at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from fxtune.data.batches.batch import Batch
from fxtune.kernels.divergence import TopTargets
from fxtune.objectives.language_model import LanguageModel

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
            hidden, head = self.model.head_input(batch)

        def of_rows(rows: slice) -> torch.Tensor:
            with self.active():
                return head(hidden[rows])

        return of_rows
