"""The links between GPUs: which they are, how fast, and the warnings about them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fxtune.diagnostics import links
from fxtune.diagnostics.links import Links, Pair, findings, pairs
from fxtune.diagnostics.system_report import State


class NVMLError(Exception):
    pass


def nvml(nvlinks: int = 0, status: int = 0, ancestor: int = 10):
    """A pynvml of two GPUs with `nvlinks` links each, 12 of them possible."""

    def state(handle: str, link: int) -> int:
        if link >= 12:
            raise NVMLError
        return int(link < nvlinks)

    def peers(one: str, other: str, capability: int) -> int:
        return status if capability != 2 or nvlinks else 5

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_P2P_STATUS_NOT_SUPPORTED=5,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetP2PStatus=peers,
        nvmlDeviceGetTopologyCommonAncestor=lambda one, other: ancestor,
    )


def test_constants_are_those_of_nvml():
    pynvml = pytest.importorskip("pynvml")
    assert list(links.ANCESTORS) == [
        getattr(pynvml, f"NVML_TOPOLOGY_{name}")
        for name in ("INTERNAL", "SINGLE", "MULTIPLE", "HOSTBRIDGE", "NODE", "SYSTEM")
    ]
    assert list(links.NO_PEERS) == [
        getattr(pynvml, f"NVML_P2P_STATUS_{name}")
        for name in (
            "CHIPSET_NOT_SUPPORTED",
            "GPU_NOT_SUPPORTED",
            "IOH_TOPOLOGY_NOT_SUPPORTED",
            "DISABLED_BY_REGKEY",
            "NOT_SUPPORTED",
        )
    ]
    assert (links.READ, links.WRITE, links.NVLINK) == (0, 1, 2)
    assert all(hasattr(pynvml, name) for name in vars(nvml()))


@pytest.mark.parametrize(
    ("machine", "pair"),
    [
        (nvml(nvlinks=12, ancestor=50), Pair(0, 1, 12, 50, 0)),
        (nvml(ancestor=10), Pair(0, 1, 0, 10, 0)),
        (nvml(status=2), Pair(0, 1, 0, 10, 2)),
    ],
    ids=("NVLink", "PCIe", "no peers"),
)
def test_what_connects_two_gpus(machine, pair):
    assert list(pairs(machine, ["GPU-a", "GPU-b"])) == [pair]
    assert len(list(pairs(machine, ["GPU-a", "GPU-b", "GPU-c"]))) == 3


def measured(pair: Pair, bandwidth: float) -> Links:
    return Links("cuda", 2, "NCCL 2.27", [pair], size=2**28, seconds=2**28 / bandwidth, latency=2e-5)


def test_good_links_give_no_warning():
    found = findings(measured(Pair(0, 1, 18, 40, 0), 340e9))
    assert [finding.state for finding in found] == [State.works, State.works, State.info]
    assert "NVLink, 18 links" in found[0].seen
    assert "340 GB/s" in found[1].seen


@pytest.mark.parametrize(
    ("pair", "bandwidth", "remedy"),
    [
        (Pair(0, 1, 18, 40, 0), 20e9, "NVLink gives 60 GB/s and more"),
        (Pair(0, 1, 0, 10, 0), 1e9, "switch PCIe ACS off"),
        (Pair(0, 1, 0, 50, 0), 12e9, "choose GPUs of one CPU"),
        (Pair(0, 1, 0, 50, 3), 12e9, "choose GPUs of one CPU"),
        (Pair(0, 1, 0, 10, 4), 12e9, "remove the option"),
        (Pair(0, 1, 0, 10, 77), 12e9, "nvidia-smi topo"),
    ],
)
def test_bad_links_come_with_what_to_change(pair, bandwidth, remedy):
    warned = [finding for finding in findings(measured(pair, bandwidth)) if finding.state is State.warning]
    assert len(warned) == 1
    assert remedy in warned[0].remedy


def test_switches_of_nccl_are_named(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    last = findings(measured(Pair(0, 1, 18, 40, 0), 340e9))[-1]
    assert (last.state, last.seen) == (State.warning, "NCCL_P2P_DISABLE=1")


def test_bandwidth_is_that_of_one_rank():
    assert Links("cuda", 4, size=100, seconds=1.0).bandwidth == 150.0


def test_failed_check_is_one_line(monkeypatch):
    error = "Traceback ...\ntorch.distributed.DistBackendError: NCCL error in: init.cpp\n"
    monkeypatch.setattr(links, "run_process", lambda *_: (1, error, 3.0))
    (found,) = links.check(2, "cuda")
    assert found.state is State.broken
    assert "DistBackendError: NCCL error" in found.seen
    assert "NCCL_DEBUG=INFO" in found.remedy
    monkeypatch.setattr(links, "run_process", lambda *_: (None, "", 120.0))
    assert "it hung" in links.check(2, "cpu")[0].seen


@pytest.mark.slow
def test_two_processes_on_a_cpu_are_measured():
    all_reduce, through = links.check(2, "cpu")
    assert all_reduce.state is State.works, all_reduce
    assert "2 ranks, 4 MiB in" in all_reduce.seen
    assert through.seen == "gloo"
