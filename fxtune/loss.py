"""The loss of a causal language model: cross-entropy summed over supervised tokens.

Summed, not averaged: the trainer divides once, by the supervised tokens of the whole optimizer step. A mean of means would
weight a token by how few neighbours its micro-batch had (transformers#34191), and the split into micro-batches would show.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from fxtune.data.batch import IGNORED, Batch
from fxtune.data.loader import Loader
from fxtune.technique import model_inputs
from fxtune.techniques.precision import Precision


def batch_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Loss of one micro-batch in nats, summed over its supervised tokens; a float32 scalar.

    No attention mask is passed: documents are kept apart by `position_ids` (see techniques/attention.py), and padding
    stands behind every real token, where causal attention never looks. `use_cache=False` keeps compiled layers from
    recompiling on the cache's state.
    """
    logits = model(**model_inputs(model, batch.input_ids, batch.position_ids, batch.cu_seqlens)).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


def token_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Loss of each token in nats, [rows, length] in float32; 0 where the position is not supervised."""
    logits = model(**model_inputs(model, batch.input_ids, batch.position_ids, batch.cu_seqlens)).logits
    losses = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(batch.targets)


@torch.no_grad()
def mean_loss(model: nn.Module, loader: Loader, precision: Precision) -> float:
    """Loss in nats a supervised token over the loader's whole plan, without dropout. The model's mode is left as it was."""
    training, device = model.training, loader.device
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for step in loader.steps():
        for batch in step.micro_batches:
            with precision.context(device):
                total += batch_loss(model, batch)
    model.train(training)
    return total.item() / sum(loader.plan.supervised(index) for index in range(loader.plan.steps))
