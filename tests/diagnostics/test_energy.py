"""Energy from NVML: counter, sampled power, or a reason why there is no figure. A stand-in for the driver answers."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxtune.diagnostics import energy
from fxtune.diagnostics.energy import Energy
from fxtune.system.energy import integrate


class Driver:
    """A driver whose counter reads `counts` one after the other, and whose GPU draws `watts`; None: it has no such
    value."""

    def __init__(self, counts: list[int] | None = None, watts: float | None = None, missing: bool = False) -> None:
        self.counts, self.watts, self.missing, self.open = iter(counts or []), watts, missing, 0

    def start(self) -> None:
        if self.missing:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def stop(self) -> None:
        self.open -= 1

    def gpu(self, uuid: str) -> str:
        assert uuid == "GPU-abc"
        return "handle"

    def energy(self, handle: str) -> int:
        if (count := next(self.counts, None)) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return count

    def power(self, handle: str) -> int:
        if self.watts is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return round(self.watts * 1e3)


@pytest.fixture
def measure(monkeypatch):
    """Measures with a given driver, while `work` runs."""

    def run(driver: Driver, work=lambda: None) -> Energy:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
        for name, function in {
            "nvmlInit": driver.start,
            "nvmlShutdown": driver.stop,
            "nvmlDeviceGetHandleByUUID": driver.gpu,
            "nvmlDeviceGetTotalEnergyConsumption": driver.energy,
            "nvmlDeviceGetPowerUsage": driver.power,
        }.items():
            monkeypatch.setattr(pynvml, name, function)
        with Energy(torch.device("cuda", 0)) as found:
            work()
        assert driver.open == 0
        return found

    return run


def test_the_counter_is_read_twice(measure):
    found = measure(Driver(counts=[5_000_000_000_000, 5_000_000_012_500]))
    assert found.joules == 12.5
    assert "counter" in found.how


def test_without_a_counter_the_power_is_sampled(measure, monkeypatch):
    monkeypatch.setattr(energy, "INTERVAL", 0.005)
    before = time.perf_counter()
    found = measure(Driver(watts=400.0), work=lambda: time.sleep(0.05))
    assert found.joules is not None
    assert 0 < found.joules <= 400 * (time.perf_counter() - before)
    assert "power" in found.how


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (Driver(), "reports neither energy nor power"),
        (Driver(counts=[7, 7]), "did not change"),
        (Driver(missing=True), "NVML Shared Library Not Found"),
    ],
)
def test_without_a_measurement_there_is_a_reason_and_no_zero(measure, driver, reason):
    found = measure(driver)
    assert found.joules is None
    assert found.how.startswith("not measured:")
    assert reason in found.how


def test_a_machine_without_a_gpu_or_the_package_says_so(monkeypatch):
    with Energy(torch.device("cpu")) as found:
        pass
    assert (found.joules, found.how) == (None, "not measured: NVML is for NVIDIA GPUs, and the device is cpu")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Energy(torch.device("cuda", 0)) as found:
        pass
    assert (found.joules, found.how) == (None, "not measured: the package nvidia-ml-py is not installed")


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20), st.floats(1, 1000), st.data())
def test_integrated_energy_adds_up(gaps, watts, data):
    times = [sum(gaps[:at]) for at in range(len(gaps) + 1)]
    assert integrate([(at, watts) for at in times]) == pytest.approx(watts * times[-1])
    cut = data.draw(st.integers(1, len(gaps)))
    samples = [(at, watts * (1 + at % 1)) for at in times]
    parts = [integrate(part) or 0.0 for part in (samples[: cut + 1], samples[cut:])]
    assert integrate(samples) == pytest.approx(sum(parts))
    assert integrate(samples[:1]) is None
