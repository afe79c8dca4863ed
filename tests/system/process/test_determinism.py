"""Deterministic kernels of torch, and the operators that have none."""

from __future__ import annotations

import pytest
import torch

from fxtune.errors import ConfigError
from fxtune.system.process.determinism import nondeterministic_operator, use_deterministic_kernels


@pytest.fixture
def deterministic():
    use_deterministic_kernels(True)
    yield
    use_deterministic_kernels(False)


def put():
    torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))


@pytest.mark.usefixtures("deterministic")
def test_the_operator_without_a_deterministic_kernel_is_named():
    with pytest.raises(RuntimeError) as caught:
        put()
    assert nondeterministic_operator(caught.value) == "put_"
    outer = ConfigError("a plugin failed")
    outer.__cause__ = caught.value
    assert nondeterministic_operator(outer) == "put_"
    assert nondeterministic_operator(ValueError("another")) is None


@pytest.mark.usefixtures("deterministic")
def test_new_tensors_are_not_filled():
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_switched_off_again_every_operator_runs(deterministic):
    use_deterministic_kernels(False)
    put()
    assert not torch.are_deterministic_algorithms_enabled()
