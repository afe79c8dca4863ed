"""The processes on a card, from a stand-in for NVML."""

import os
import sys
from types import SimpleNamespace

import pytest

from fxtune.system.machine.gpu_processes import gpu_processes


@pytest.fixture
def nvml(monkeypatch):
    """Process 7 uses 30 GiB of the card `1a`, this process some more."""
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


def test_processes_of_others_are_listed(nvml):
    assert gpu_processes("1a") == gpu_processes("GPU-1a") == ["process 7 (30.0 GiB)"]


def test_driver_that_refuses_lists_none(nvml, monkeypatch):
    def refuse(*_):
        raise OSError

    monkeypatch.setattr(nvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert gpu_processes("1a") == []
    monkeypatch.setattr(nvml, "nvmlInit", refuse)
    assert gpu_processes("1a") == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_processes("1a") == []
