"""Copies in host memory; tests/gpu/test_host_copy.py has those of tensors on a GPU."""

import torch

from fxtune.checkpoint.host_copy import HostCopy


def test_copies_of_host_tensors_do_not_change_with_them():
    weight = torch.zeros(4)
    copies = HostCopy().take({"w": weight})
    weight += 1
    assert copies["w"].tolist() == [0.0] * 4


def test_host_with_too_little_memory_copies_nothing(monkeypatch):
    monkeypatch.setattr("fxtune.checkpoint.host_copy.memory", lambda: (100, 63))
    assert HostCopy().take({"w": torch.zeros(8)}) is None  # 32 bytes, and twice that must be free
    monkeypatch.setattr("fxtune.checkpoint.host_copy.memory", lambda: (100, 64))
    assert HostCopy().take({"w": torch.zeros(8)}) is not None
