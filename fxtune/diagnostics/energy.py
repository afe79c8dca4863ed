"""What the GPU drew while something ran, as NVIDIA's management library (NVML) tells it.

NVML comes with the driver as libnvidia-ml.so.1, so it is called as it is and no package is needed. Two ways, the first that the
card has:

- its own counter (`nvmlDeviceGetTotalEnergyConsumption`, millijoules since the driver was loaded, Volta and newer): two
  readings, nothing runs in between;
- the power it draws (`nvmlDeviceGetPowerUsage`, milliwatts), looked at ten times a second by a thread and integrated by
  trapezoids.

Both are of the whole board: memory and fans are in it, and other processes on the same GPU too; CPU and power supply are not.
Where neither can be had there is no figure, and a reason.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
EVERY = 0.1
"""Seconds between two looks at the power. The driver itself averages over 25 to 100 ms."""


class Energy:
    """Joules of `device` between entering and leaving: `with Energy(device) as taken: ...; taken.joules`.

    `library`: NVML, loaded; None: the driver's. Raises nothing.
    """

    def __init__(
        self, device: torch.device, library: Any = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.joules: float | None = None
        """None: not measured, `how` says why."""
        self.how = ""
        """What the figure is from."""
        self._clock = clock
        self._nvml: _Nvml | None = None
        self._begin: int | None = None
        self._sampler: _Sampler | None = None
        try:
            self._nvml = _Nvml(device, library)
        except _Absent as why:
            self.how = f"not measured: {why}"

    def __enter__(self) -> Energy:
        if self._nvml is None:
            return self
        self._begin = self._nvml.millijoules()
        if self._begin is not None:
            self.how = "the GPU's energy counter"
        elif self._nvml.milliwatts() is not None:
            self.how = f"the power that the GPU drew, looked at every {EVERY:g} s"
            self._sampler = _Sampler(self._nvml.milliwatts, self._clock)
        else:
            self.how = "not measured: this GPU tells neither energy nor power"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._nvml is None:
            return
        if self._begin is not None:
            end = self._nvml.millijoules()
            if end is None or end <= self._begin:
                self.how = "not measured: the GPU's energy counter stood still"
            else:
                self.joules = (end - self._begin) / 1e3
        elif self._sampler is not None:
            self.joules = integrated(self._sampler.finish())
            if self.joules is None:
                self.how = "not measured: the GPU stopped telling its power"
        self._nvml.close()


def integrated(samples: Sequence[tuple[float, float]]) -> float | None:
    """Joules of (seconds, watts), by trapezoids; None for fewer than two samples, or for no power at all."""
    joules = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(samples))
    return joules or None


class _Absent(Exception):
    """No NVML for this device; the text says why."""


class _Nvml:
    """The handful of NVML's functions that are needed, for one GPU."""

    def __init__(self, device: torch.device, library: Any = None) -> None:
        if device.type != "cuda":
            raise _Absent(f"NVML knows NVIDIA's GPUs, and the device is {device.type}")
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise _Absent(f"{LIBRARY} cannot be loaded ({error})") from error
        self._handle = ctypes.c_void_p()
        # By its UUID: CUDA counts the visible devices, NVML all of them, and in another order.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        self._require("nvmlInit_v2")
        self._require("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(self._handle))

    def millijoules(self) -> int | None:
        """Since the driver was loaded; None where the card does not count."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())

    def milliwatts(self) -> int | None:
        """Drawn now; None where the card does not tell."""
        return self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint())

    def close(self) -> None:
        self._library.nvmlShutdown()

    def _read(self, function: str, value: Any) -> int | None:
        call = getattr(self._library, function, None)  # None: a driver from before the function
        return None if call is None or call(self._handle, ctypes.byref(value)) else int(value.value)

    def _require(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._library, function)(*arguments):
            raise _Absent(f"{function} answers with error {status}")


class _Sampler:
    """Looks at the power from a thread of its own, from now until `finish`."""

    def __init__(self, milliwatts: Callable[[], int | None], clock: Callable[[], float]) -> None:
        self._milliwatts, self._clock = milliwatts, clock
        self._samples: list[tuple[float, float]] = []
        self._look()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self._look()

    def _look(self) -> None:
        drawn = self._milliwatts()
        if drawn is not None:
            self._samples.append((self._clock(), drawn / 1e3))

    def finish(self) -> list[tuple[float, float]]:
        """(seconds, watts), in order."""
        self._over.set()
        self._thread.join()
        self._look()
        return self._samples
