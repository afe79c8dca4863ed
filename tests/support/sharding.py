"""Models whose weights are read or drawn apart from their construction."""

import torch

from fxtune.distributed.sharding import materialize
from fxtune.models import shards


def built(config, world):
    """A model without weights, with memory for them, and its pieces."""
    model = shards.empty(config, torch.float32, world, False)
    pieces = shards.pieces_of(model)
    materialize(model, world.device)
    return model, pieces


def assert_same(model, expected):
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in expected.named_parameters()}
    for (name, one), (_, other) in zip(
        [*model.named_parameters(), *model.named_buffers()],
        [*expected.named_parameters(), *expected.named_buffers()],
        strict=True,
    ):
        assert torch.equal(one, other), name
