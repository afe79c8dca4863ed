"""The processes on a card, from a stand-in for NVML."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from fxtune.system.machine.nvml import Card


@pytest.fixture
def nvml(monkeypatch):
    """Process 7 uses 30 GiB of the card `1a`, this process some more."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1a"))
    running = [SimpleNamespace(pid=7, usedGpuMemory=30 * 2**30), SimpleNamespace(pid=os.getpid(), usedGpuMemory=2**30)]
    module = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-1a": "handle"}[uuid],
        nvmlDeviceGetComputeRunningProcesses=lambda _: running,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def processes() -> list[str]:
    return Card(torch.device("cuda", 0)).processes()


@pytest.mark.parametrize("uuid", ["1a", "GPU-1a"])
def test_processes_of_others_are_listed(nvml, monkeypatch, uuid):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    assert processes() == ["process 7 (30.0 GiB)"]


def test_driver_that_refuses_lists_none(nvml, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert processes() == []
    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    assert processes() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert processes() == []
