"""A GPU as its driver sees it, read through NVML: energy, power, utilisation, and the processes that use it."""

from __future__ import annotations

import os
from typing import Any

import torch


class Card:
    """A CUDA device, read through NVML. `missing`: why nothing can be read; empty if reading works. Raises nothing."""

    def __init__(self, device: torch.device) -> None:
        self.missing = ""
        self.nvml: Any = None
        """The module pynvml."""
        self.handle: Any = None
        if device.type != "cuda":
            self.missing = f"NVML is for NVIDIA GPUs, and the device is {device.type}"
            return
        try:
            import pynvml
        except ImportError:
            self.missing = "the package nvidia-ml-py is not installed"
            return
        # The UUID finds the device, because CUDA numbers the visible devices and NVML numbers all, in another order.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            pynvml.nvmlInit()
            self.nvml = pynvml
            self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid[:4] in ("GPU-", "MIG-") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            self.missing = str(error)

    def joules(self) -> float | None:
        """The energy counter; None if this GPU or driver has none."""
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1e3

    def watts(self) -> float | None:
        milliwatts = self._read("nvmlDeviceGetPowerUsage")
        return None if milliwatts is None else milliwatts / 1e3

    def utilization(self) -> float | None:
        """The share of the last moments in which a kernel ran, 0 to 1."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def processes(self) -> list[str]:
        """`process 7 (3.2 GiB)` for each other process on the card. Empty if a container hides other processes."""
        running = self._read("nvmlDeviceGetComputeRunningProcesses") or []
        others = (process for process in running if process.pid != os.getpid())
        return [f"process {process.pid} ({(process.usedGpuMemory or 0) / 2**30:.1f} GiB)" for process in others]

    def close(self) -> None:
        if self.nvml is not None:
            self.nvml.nvmlShutdown()
            self.nvml = self.handle = None

    def _read(self, function: str) -> Any:
        if self.handle is None:
            return None
        try:
            return getattr(self.nvml, function)(self.handle)
        except self.nvml.NVMLError:
            return None
