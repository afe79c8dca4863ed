"""Energy of a card and of the host's CPUs, from stand-ins for NVIDIA's driver and for Linux's powercap folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxtune.system.machine import energy
from fxtune.system.machine.energy import EnergyMeter, Processors, integrate


def zone(folder: Path, number: str, name: str, microjoules: int, wraps: int = 1_000_000_000) -> Path:
    made = folder / f"intel-rapl:{number}"
    made.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", microjoules), ("max_energy_range_uj", wraps)):
        (made / file).write_text(f"{value}\n")
    return made / "energy_uj"


@pytest.fixture
def rapl(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(energy, "RAPL", tmp_path / "powercap")
    return tmp_path / "powercap"


@pytest.fixture
def driver(monkeypatch) -> dict:
    """The values of a card by the function of NVML that reads them. A missing one is not supported."""
    values: dict[str, object] = {}

    def reads(name):
        def read(handle):
            if name not in values:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return values[name]

        return read

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    for name in ("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"):
        monkeypatch.setattr(pynvml, name, reads(name))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid)
    return values


def test_processors_add_packages_and_memory_and_follow_a_counter_that_wraps(rapl):
    first = zone(rapl, "0", "package-0", 999_000_000)
    zone(rapl, "0:0", "core", 5)
    memory = zone(rapl, "0:1", "dram", 0)
    zone(rapl, "1", "psys", 7)
    found = Processors(rapl)
    assert found.joules() == 0.0
    first.write_text("4000000\n")  # 1 J to the end of the counter, and 4 J from its beginning
    memory.write_text("2500000\n")
    assert found.joules() == 7.5
    first.unlink()
    memory.write_text("3500000\n")
    assert found.joules() == 8.5, "a counter that goes away loses nothing"


def test_processors_that_only_root_may_read_have_no_figure(rapl):
    zone(rapl, "0", "package-0", 1).unlink()
    assert Processors(rapl).joules() is None
    assert Processors(rapl / "missing").joules() is None


def test_card_with_a_counter(driver, rapl):
    driver["nvmlDeviceGetTotalEnergyConsumption"] = 5_000_000
    driver["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=50, memory=1)
    cpu = zone(rapl, "0", "package-0", 0)
    now = [10.0]
    meter = EnergyMeter(torch.device("cuda", 0), clock=lambda: now[0])
    meter.start()
    assert meter._thread is not None
    driver["nvmlDeviceGetTotalEnergyConsumption"] = 5_012_500
    driver["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=50, memory=1)
    cpu.write_text("3000000")
    now[0] = 12.0
    found = meter.read()
    source = meter.source
    meter.close()
    assert (found.seconds, found.gpu_joules, found.gpu_utilization, found.cpu_joules) == (2.0, 12.5, 0.5, 3.0)
    assert source == "the GPU's energy counter"


def test_card_without_a_counter_integrates_its_power(driver, rapl):
    driver["nvmlDeviceGetPowerUsage"] = 400_000
    now = [0.0]
    meter = EnergyMeter(torch.device("cuda", 0), clock=lambda: now[0])
    now[0] = 2.0
    meter.read()
    driver["nvmlDeviceGetPowerUsage"] = 200_000
    now[0] = 3.0
    assert meter.read().gpu_joules == 800 + 300
    assert meter.source == "the GPU's power, each 1 s"
    meter.close()


def test_without_a_card_and_counters_nothing_is_measured_and_no_thread_runs(rapl):
    meter = EnergyMeter(torch.device("cpu"))
    meter.start()
    found = meter.read()
    assert (found.gpu_joules, found.gpu_utilization, found.cpu_joules) == (None, None, None)
    assert meter._thread is None
    meter.close()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "this GPU reports neither energy nor power"),
        ({"nvmlDeviceGetTotalEnergyConsumption": 7}, "the GPU's energy counter did not change"),
    ],
)
def test_without_a_measurement_there_is_a_reason_and_no_zero(driver, rapl, values, reason):
    driver.update(values)
    meter = EnergyMeter(torch.device("cuda", 0))
    assert (meter.read().gpu_joules, meter.source) == (None, f"not measured: {reason}")
    meter.close()


def test_a_machine_without_a_gpu_or_the_package_says_so(rapl, monkeypatch):
    assert EnergyMeter(torch.device("cpu")).source == "not measured: NVML is for NVIDIA GPUs, and the device is cpu"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    source = EnergyMeter(torch.device("cuda", 0)).source
    assert source == "not measured: the package nvidia-ml-py is not installed"


def test_a_driver_that_is_missing_is_the_reason(driver, monkeypatch):
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert "NVML Shared Library Not Found" in EnergyMeter(torch.device("cuda", 0)).source


def test_one_process_a_host_counts_its_cpus(rapl):
    zone(rapl, "0", "package-0", 0)
    meter = EnergyMeter(torch.device("cpu"), hosts=False)
    assert meter.read().cpu_joules is None
    meter.close()


@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=20), st.floats(1, 1000), st.data())
def test_integrated_energy_adds_up(gaps, watts, data):
    times = [sum(gaps[:at]) for at in range(len(gaps) + 1)]
    assert integrate([(at, watts) for at in times]) == pytest.approx(watts * times[-1])
    cut = data.draw(st.integers(1, len(gaps)))
    samples = [(at, watts * (1 + at % 1)) for at in times]
    parts = [integrate(part) or 0.0 for part in (samples[: cut + 1], samples[cut:])]
    assert integrate(samples) == pytest.approx(sum(parts))
    assert integrate(samples[:1]) is None
