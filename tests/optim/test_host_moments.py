"""Moments in host memory (optimizer.offload): the same bits as without, in any order of updates, and page-locked
memory that ends with its owner."""

from __future__ import annotations

import mmap
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.optimizers import YES
from torch import nn

from fxtune.errors import HardwareError
from fxtune.optim.config import Moments, OptimizerConfig
from fxtune.optim.host_moments import PinnedMemory
from fxtune.optim.optimizer import Optimizer
from fxtune.system.process.oom import catch_out_of_memory
from fxtune.training.in_backward import InBackward

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": dict(stochastic_rounding=True, moments=Moments.bfloat16),
    "lr_vision": dict(lr_vision=1e-3),
}
ON_AND_OFF = [(before, after) for before in (False, True) for after in (False, True)]
"""Whether moments are offloaded before and after a resume."""


def model(case: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32), nn.Linear(32, 48)]
    return nn.Sequential(*layers).to(torch.bfloat16 if case == "bfloat16" else torch.float32)


def made(case: str, trained: nn.Sequential, offload: bool, one_by_one: bool = False) -> Optimizer:
    config = OptimizerConfig(offload=offload, weight_decay=0.1, **CASES[case])
    return Optimizer(trained, config, one_by_one=one_by_one, for_images=[*trained[0].parameters()])


def steps(optimizer: Optimizer, trained: nn.Module, numbers: range) -> None:
    for number in numbers:
        torch.manual_seed(number)
        for index, parameter in enumerate(trained.parameters()):
            # Sometimes a weight has no gradient, so the order of updates changes. The largest weight comes late.
            present = (index + number) % 5 and not (index == 4 and number < 2)
            parameter.grad = torch.randn_like(parameter) if present else None
        optimizer.clip(1.0)
        optimizer.step(1e-2, YES if number != 3 else ~YES, seed=number)


def bits(trained: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {**{name: weight.detach() for name, weight in trained.named_parameters()}, **optimizer.state()[0]}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_offloaded_moments_change_no_bit_also_after_a_resume_with_or_without(case, one_by_one):
    found = []
    for before, after in ON_AND_OFF:
        trained = model(case)
        optimizer = made(case, trained, before, one_by_one)
        steps(optimizer, trained, range(7))
        saved = {name: tensor.clone() for name, tensor in optimizer.state()[0].items()}
        resumed = made(case, trained, after, one_by_one)
        resumed.load(saved, optimizer.state()[1])
        steps(resumed, trained, range(7, 10))
        found.append(bits(trained, resumed))
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.parametrize("case", CASES)
def test_updates_in_the_backward_pass_have_the_bits_of_an_ordinary_step(case):
    found = []
    for offload, in_backward in ((False, False), (True, False), (True, True)):
        trained = model(case)
        optimizer = made(case, trained, offload, in_backward)
        updating = InBackward(optimizer) if in_backward else None
        for number in range(4):
            finite = YES if number != 2 else ~YES
            if updating:
                updating.begin(1e-2, finite, number)
            torch.manual_seed(number)
            trained(torch.randn(8, 32).to(next(trained.parameters()).dtype)).float().square().mean().backward()
            if updating:
                updating.end()
            else:
                optimizer.step(1e-2, finite, number)
        found.append(bits(trained, optimizer))
    for other in found[1:]:
        assert_equal(other, found[0])


def test_a_weight_may_be_larger_than_all_before_it():
    """The larger weight gets its first gradient when the slots exist, and is then copied ahead of its update."""
    found = []
    for offload in (False, True):
        torch.manual_seed(0)
        trained = nn.ModuleList([nn.Linear(8, 8), nn.Linear(64, 64), nn.Linear(8, 8)])
        optimizer = Optimizer(trained, OptimizerConfig(offload=offload))
        for number in range(6):
            for name, parameter in trained.named_parameters():
                parameter.grad = torch.randn_like(parameter) if number > 2 or not name.startswith("1") else None
            optimizer.step(1e-2, YES, number)
        found.append(bits(trained, optimizer))
    assert_equal(found[1], found[0])


def test_an_update_that_fails_leaves_the_moments_of_the_last_step():
    trained = model("float32")
    optimizer = Optimizer(trained, OptimizerConfig(offload=True))
    steps(optimizer, trained, range(2))
    before = {name: tensor.clone() for name, tensor in optimizer.state()[0].items()}
    part, moments = optimizer.parts[0], optimizer.host_moments
    assert moments

    def fail() -> None:
        with moments.on_device(part):
            next(iter(part.state.values()))["exp_avg"].zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_equal(optimizer.state()[0], before)


class Driver:
    """The driver's register of page-locked memory: address -> bytes. It holds at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.locked: dict[int, int] = {}
        self.limit = limit

    def cudaHostRegister(self, address: int, size: int, _: int) -> int:
        if size + sum(self.locked.values()) > self.limit:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver(1 << 20)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return driver


def test_moments_share_no_page_and_are_unlocked_when_their_owner_dies(driver):
    memory = PinnedMemory(torch.device("cuda"))
    values = [torch.arange(size, dtype=torch.bfloat16) for size in (1, 3, 5000, 1025)] + [torch.randn(7, 9).T]
    copies = [memory.copy(value) for value in values]
    assert sorted(driver.locked) == sorted(copy.data_ptr() for copy in copies)
    assert all(address % mmap.PAGESIZE == 0 for address in driver.locked)
    ends = pairwise(sorted(driver.locked.items()))
    assert all(first + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE <= second for (first, size), (second, _) in ends)
    del memory
    assert not driver.locked
    for copy, value in zip(copies, values, strict=True):  # a checkpoint may still be written
        assert torch.equal(copy, value)
        assert copy.stride() == value.stride()


@pytest.mark.parametrize("in_backward", [False, True])
def test_memory_that_cannot_be_locked_ends_the_run_and_is_not_taken_for_a_full_gpu(driver, in_backward):
    driver.limit = 10_000
    trained = model("float32")
    optimizer = made("float32", trained, True, in_backward)
    assert optimizer.host_moments
    optimizer.host_moments.memory = PinnedMemory(torch.device("cuda"))

    def step() -> None:
        if in_backward:
            updating = InBackward(optimizer)
            updating.begin(1e-2, YES, 0)
        trained(torch.randn(8, 32)).square().mean().backward()
        optimizer.step(1e-2, YES)

    with pytest.raises(HardwareError, match=r"optimizer\.offload: .* GiB .* Set it to false"):
        catch_out_of_memory(step)


def test_a_host_without_memory_ends_the_run(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(HardwareError, match="Cannot allocate memory"):
        catch_out_of_memory(lambda: PinnedMemory(torch.device("cpu")).copy(torch.ones(3)))
