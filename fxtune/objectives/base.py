"""The contract of an objective: what training minimises.

An objective reads log-probabilities of supervised tokens from a LanguageModel, token by token or summed over a document, and gives
a sum for each micro-batch. The training step divides by `normalizer`, once for the whole optimizer step: a mean of means would
weight a token by how few neighbours its micro-batch had (transformers#34191), and the loss would depend on how a step is split
into micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import Plan
from fxtune.objectives.language_model import LanguageModel


class Objective(Protocol):
    def loss(self, model: LanguageModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The differentiable loss of a micro-batch, a float32 scalar, and further metrics, float32 scalars without gradient.

        All are sums on the device, which become means by `normalizer`. A metric `name` is logged as `train/name` and
        `eval/name`, and must be there for every batch. Must not wait for the device: a pass may be recorded as a CUDA graph.
        """

    def normalizer(self, plan: Plan, step: int) -> float:
        """The divisor of the sums of an optimizer step, over all micro-batches and ranks; known from the plan alone."""

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Further figures of an evaluation, computed on the host from its means: `means["loss"]`, and each metric."""
