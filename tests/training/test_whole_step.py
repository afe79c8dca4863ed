"""The parts of a step on one rank. tests/objectives/test_kto.py and test_embedding.py run two ranks."""

from __future__ import annotations

import pytest
import torch

from fxtune.distributed.world import World
from fxtune.training.whole_step import step_parts


class Mean:
    def step_parts(self, values):
        return values.mean(0).expand_as(values)


ALONE = World(torch.device("cpu"))


def test_each_micro_batch_gets_its_rows():
    one, other = step_parts(Mean(), [torch.ones(2, 1), torch.full((1, 1), 4.0)], ALONE)
    assert (one.tolist(), other.tolist()) == ([[2.0], [2.0]], [[2.0]])


def test_error_of_the_values_is_raised():
    with pytest.raises(RuntimeError, match="no values"):
        step_parts(Mean(), [], ALONE, RuntimeError("no values"))
