"""Vectors of documents: the tokens from which each is made."""

from __future__ import annotations

import torch

from fxtune.data.batches.batch import Batch
from fxtune.objectives.language_model import Pool
from fxtune.objectives.vector_model import pooled


def test_pooling_takes_the_tokens_of_each_document_and_no_padding():
    states = torch.arange(20.0).view(20, 1)
    batch = Batch(
        *[torch.zeros(2, 10, dtype=torch.long)] * 3,
        torch.tensor([0, 10, 20], dtype=torch.int32),
        torch.tensor([0]),
        torch.tensor([0]),
        tokens=14,
        filled=torch.tensor([10, 4]),
    )
    assert pooled(states, batch, Pool.last).flatten().tolist() == [9, 13]
    assert pooled(states, batch, Pool.cls).flatten().tolist() == [0, 10]
    assert pooled(states, batch, Pool.mean).flatten().tolist() == [4.5, 11.5]
