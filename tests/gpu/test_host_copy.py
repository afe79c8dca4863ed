"""Background checkpoints on a GPU: the snapshot is consistent, the copy has its own stream, and buffers are reused."""

from __future__ import annotations

import time

import pytest
import torch

from fxtune.checkpoint.host_copy import HostCopy

SIZE = 2**28
"""Elements of the copied tensor: 1 GiB, about 20 ms."""


def busy() -> None:
    """About 100 ms of work on the compute stream."""
    one = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(60):
        one @ one


def test_later_changes_are_not_in_the_snapshot():
    weight = torch.zeros(SIZE, device="cuda")
    snapshot = HostCopy()
    for value in range(3):
        copies = snapshot.take({"w": weight, "step": torch.tensor(float(value))})
        snapshot.wait_on_device()
        weight += 1  # issued immediately; without synchronization it would overtake the copy
        snapshot.wait_on_host()
        assert copies["w"].is_pinned()
        assert [copies["w"].min().item(), copies["w"].max().item(), copies["step"].item()] == [value] * 3


@pytest.mark.timed
def test_snapshot_waits_neither_for_the_device_nor_for_the_copy():
    weight = torch.zeros(SIZE, device="cuda")
    snapshot = HostCopy()
    snapshot.take({"w": weight})
    snapshot.wait_on_host()  # the buffers exist
    busy()
    torch.cuda.set_sync_debug_mode("error")
    began = time.perf_counter()
    try:
        snapshot.take({"w": weight})
        snapshot.wait_on_device()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert time.perf_counter() - began < 0.02
    assert not torch.cuda.current_stream().query()  # the work is still running
    snapshot.wait_on_host()


@pytest.mark.timed
def test_copy_runs_in_parallel_with_readers_of_the_weights():
    """The next step's forward and backward only read weights, so they do not wait for the copy."""
    weight = torch.zeros(4 * SIZE, device="cuda", dtype=torch.uint8)
    snapshot = HostCopy()
    for _ in range(2):
        snapshot.take({"w": weight})
        snapshot.wait_on_host()

    def spent(copies: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if copies:
            snapshot.take({"w": weight})
        busy()
        if copies:
            snapshot.wait_on_device()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    spent(False)
    alone, beside = min(spent(False) for _ in range(3)), min(spent(True) for _ in range(3))
    assert beside < 1.15 * alone


def test_buffers_are_reused_and_follow_changed_tensors():
    snapshot = HostCopy()
    weights = {f"w{number}": torch.full((1000 + number,), float(number), device="cuda") for number in range(200)}
    first = snapshot.take(weights)
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    again = snapshot.take(weights)
    snapshot.wait_on_host()
    assert {name: tensor.data_ptr() for name, tensor in again.items()} == places
    assert all(torch.equal(again[name], weights[name].cpu()) for name in weights)
    more = {**weights, "moment": torch.arange(10**6, device="cuda", dtype=torch.bfloat16).view(1000, 1000).t()}
    copies = snapshot.take(more)
    snapshot.wait_on_host()
    assert all(torch.equal(copies[name], more[name].cpu()) for name in more)
