"""Measures the energy that a GPU uses, with NVIDIA's management library (NVML, in the package nvidia-ml-py).

It uses the first of two sources that the GPU has:

- its energy counter (millijoules since the driver was loaded; Volta and newer): two readings, and nothing runs in
  between;
- its power (milliwatts), sampled ten times a second by a thread and integrated by trapezoids.

Both measure the whole board: memory, fans, and other processes on the same GPU are included, CPU and power supply are
not. If the GPU has neither, there is no figure, and `how` gives the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

INTERVAL = 0.1
"""Seconds between two samples of the power. The driver itself averages over 25 to 100 ms."""


class Energy:
    """Joules of `device` inside the block: `with Energy(device) as energy: ...; energy.joules`. Raises nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.joules: float | None = None
        """None: not measured."""
        self.how = ""
        """The source of the figure, or why there is none."""
        self._nvml: Any = None
        self._handle: Any = None
        self._counter: int | None = None
        self._samples: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Energy:
        if self.device.type != "cuda":
            self.how = f"not measured: NVML is for NVIDIA GPUs, and the device is {self.device.type}"
            return self
        try:
            import pynvml
        except ImportError:
            self.how = "not measured: the package nvidia-ml-py is not installed"
            return self
        self._nvml = pynvml
        # By its UUID, because CUDA counts the visible devices and NVML all of them, in another order.
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid[:4] in ("GPU-", "MIG-") else f"GPU-{uuid}")
        except pynvml.NVMLError as error:
            self.how = f"not measured: {error}"
            return self
        self._counter = self._read(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        if self._counter is not None:
            self.how = "the GPU's energy counter"
        elif self._read(pynvml.nvmlDeviceGetPowerUsage) is not None:
            self.how = f"the GPU's power, sampled every {INTERVAL:g} s"
            self._sampler.start()
        else:
            self.how = "not measured: this GPU reports neither energy nor power"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is None:
            return
        if self._counter is not None:
            end = self._read(self._nvml.nvmlDeviceGetTotalEnergyConsumption) or 0
            self.joules = (end - self._counter) / 1e3 if end > self._counter else None
        elif self._sampler.is_alive():
            self._over.set()
            self._sampler.join()
            self.joules = integrate(self._samples)
        if self.joules is None and not self.how.startswith("not measured"):
            self.how = f"not measured: {self.how} did not change"
        self._nvml.nvmlShutdown()

    def _read(self, function: Callable[[Any], int]) -> int | None:
        """None if this GPU or driver does not have the value."""
        try:
            return function(self._handle)
        except self._nvml.NVMLError:
            return None

    def _sample(self) -> None:
        last, pause = False, 0.0
        while not last:
            last, pause = self._over.wait(pause), INTERVAL
            if (milliwatts := self._read(self._nvml.nvmlDeviceGetPowerUsage)) is not None:
                self._samples.append((time.perf_counter(), milliwatts / 1e3))


def integrate(samples: Sequence[tuple[float, float]]) -> float | None:
    """Joules of (seconds, watts), by trapezoids; None for fewer than two samples, or no power at all."""
    joules = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(samples))
    return joules or None
