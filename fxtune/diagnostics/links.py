"""The links between the GPUs of this machine: what connects each pair (NVML), and the speed of an all-reduce over all.

`fxtune doctor` runs this file as a program, because NVML and NCCL may hang: `python -m fxtune.diagnostics.links RANKS
DEVICE` starts RANKS processes. They all-reduce numbers for a few seconds (on a CPU through gloo), and the program
prints the result as JSON.

Bandwidth is the traffic over one rank's link, the "bus bandwidth" of NVIDIA's nccl-tests: if an all-reduce of B bytes
over n ranks takes t seconds, it is 2 (n - 1) / n B / t bytes a second. By this measure NVLink between two H200 (18
links each) reaches 340 GB/s, and PCIe 4 about 20 GB/s.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from fxtune.diagnostics.system_report import Finding, State
from fxtune.system.process.process_group import run_process

TIMEOUT = 120.0
SECONDS = 1.0
"""Seconds of the measurement of the all-reduce."""
BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
LEAST = {"NVLink": 60e9, "PCIe": 4e9}
"""A link with fewer bytes a second is too slow. The limits are half of the slowest NVLink pair (two A6000) and two
thirds of PCIe 3 x8."""
ANCESTORS = {
    0: "two GPUs of one board",
    10: "through one PCIe switch",
    20: "through several PCIe switches",
    30: "through the host bridge of one CPU",
    40: "through one CPU",
    50: "through two CPUs",
}
"""The meaning of NVML's numbers for the nearest common ancestor of two GPUs."""
SLOW_ANCESTOR = 50
READ, WRITE, NVLINK = range(3)
"""NVML_P2P_CAPS_INDEX_*: one GPU may read or write another's memory, or has NVLink to it. pynvml's own READ is a tuple
by mistake."""
NO_PEERS = {
    1: ("the chipset does not allow it", "nothing: numbers travel through the host's memory"),
    2: (
        "these GPUs do not have it",
        "nothing: numbers travel through the host's memory, which is fast enough for adapters",
    ),
    3: (
        "the two are at different CPUs that do not pass it on",
        "choose GPUs of one CPU with CUDA_VISIBLE_DEVICES (`nvidia-smi topo -m` shows them)",
    ),
    4: ("an option of the driver switches it off", "remove the option (NVreg_RegistryDwords in /etc/modprobe.d)"),
    5: ("NVML says: not supported", "see `nvidia-smi topo -p2p r`"),
}
"""Why two GPUs cannot read each other's memory, by NVML's status, and what to change."""
SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_ALGO", "NCCL_PROTO")
"""Environment variables that may keep NCCL from using a fast link."""


@dataclass(frozen=True)
class Pair:
    """Two GPUs, and what connects them."""

    first: int
    second: int
    nvlinks: int
    """Number of active NVLinks of the first GPU, if NVLink connects the two GPUs; otherwise 0."""
    ancestor: int
    """NVML's number for the nearest common ancestor, a key of ANCESTORS."""
    peer: int
    """NVML's status for access to each other's memory, a key of NO_PEERS; 0: the access works."""


@dataclass
class Links:
    """The measured links. `device`: cuda or cpu."""

    device: str
    ranks: int
    library: str = ""
    """NCCL's version, or gloo."""
    pairs: list[Pair] = field(default_factory=list)
    size: int = 0
    """Bytes of an all-reduce."""
    seconds: float = 0.0
    """Median time of an all-reduce of `size` bytes."""
    latency: float = 0.0
    """Median time of an all-reduce of 8 bytes."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second over the link of one rank."""
        return 2 * (self.ranks - 1) / self.ranks * self.size / self.seconds


def check(ranks: int, device: str) -> list[Finding]:
    """Measure the links between `ranks` GPUs (or processes on a CPU), for doctor's page. Takes about 15 seconds."""
    command = [sys.executable, "-m", "fxtune.diagnostics.links", str(ranks), device]
    code, output, seconds = run_process(command, TIMEOUT)
    lines = [line for line in output.splitlines() if line.strip()]
    if code == 0 and lines:
        found = json.loads(lines[-1])
        return findings(Links(**{**found, "pairs": [Pair(**pair) for pair in found["pairs"]]}))
    said = (
        "it hung" if code is None else next((line for line in reversed(lines) if "Error" in line), "it said nothing")
    )
    remedy = (
        "NCCL_DEBUG=INFO fxtune doctor shows where; in a container: docker run --ipc=host; until then run.gpus=1"
        if device == "cuda"
        else "check that the address of this host's name (`hostname -i`) belongs to this host"
    )
    return [Finding("all-reduce", f"{ranks} ranks, no answer after {seconds:.0f} s: {said}", State.broken, remedy)]


def findings(links: Links) -> list[Finding]:
    found = [_pair(pair) for pair in links.pairs]
    speed = f"{links.bandwidth / 1e9:.3g} GB/s, {links.latency * 1e6:.0f} us for 8 bytes"
    seen = f"{links.ranks} ranks, {links.size / 2**20:.0f} MiB in {links.seconds * 1e3:.3g} ms: {speed}"
    kind = "NVLink" if links.pairs and all(pair.nvlinks for pair in links.pairs) else "PCIe"
    if links.device == "cuda" and links.bandwidth < LEAST[kind]:
        remedy = f"{kind} gives {LEAST[kind] / 1e9:.0f} GB/s and more. Look for another process on the GPUs"
        remedy += "; unset NCCL_P2P_DISABLE; in a container: docker run --ipc=host"
        remedy += "; switch PCIe ACS off in the BIOS" * (kind == "PCIe")
        found.append(Finding("all-reduce", seen, State.warning, remedy))
    else:
        found.append(Finding("all-reduce", seen, State.works))
    found.append(Finding("through", links.library))
    if links.device == "cuda" and (set_ := [name for name in SWITCHES if os.environ.get(name)]):
        seen = ", ".join(f"{name}={os.environ[name]}" for name in set_)
        found.append(Finding("environment", seen, State.warning, f"unset {' '.join(set_)}, unless you need it"))
    return found


def _pair(pair: Pair) -> Finding:
    what = f"GPU {pair.first} - GPU {pair.second}"
    way = ANCESTORS.get(pair.ancestor, "in a way that NVML does not name")
    if pair.nvlinks:
        return Finding(what, f"NVLink, {pair.nvlinks} links", State.works)
    if pair.peer:
        why, remedy = NO_PEERS.get(pair.peer, NO_PEERS[5])
        seen = f"PCIe, {way}; neither reads the other's memory: {why}"
        return Finding(what, seen, State.warning, remedy)
    if pair.ancestor == SLOW_ANCESTOR:
        remedy = "choose GPUs of one CPU with CUDA_VISIBLE_DEVICES, if there are (`nvidia-smi topo -m`)"
        return Finding(what, f"PCIe, {way}", State.warning, remedy)
    return Finding(what, f"PCIe, {way}", State.works)


def pairs(nvml: Any, handles: list[Any]) -> Iterator[Pair]:
    """Yield what connects each pair of the GPUs with these handles. `nvml`: the module pynvml, initialized."""
    for (first, from_), (second, to) in combinations(enumerate(handles), 2):
        linked = _status(nvml, from_, to, NVLINK) == 0
        reads = _status(nvml, from_, to, READ)
        writes = _status(nvml, from_, to, WRITE)
        ancestor = int(nvml.nvmlDeviceGetTopologyCommonAncestor(from_, to))
        yield Pair(first, second, _active_links(nvml, from_) if linked else 0, ancestor, reads or writes)


def _status(nvml: Any, from_: Any, to: Any, capability: int) -> int:
    try:
        return int(nvml.nvmlDeviceGetP2PStatus(from_, to, capability))
    except nvml.NVMLError:
        return int(nvml.NVML_P2P_STATUS_NOT_SUPPORTED)


def _active_links(nvml: Any, handle: Any) -> int:
    """Number of active NVLinks; at least 1, because the caller knows that there is a link."""
    count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:  # the GPU has fewer links
            break
    return max(count, 1)


def main(ranks: int, device: str) -> None:
    import torch
    from torch import multiprocessing

    links = Links(device, ranks)
    if device == "cuda":
        links.library = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        links.pairs = _pairs_of_torch(ranks)
    else:
        links.library = "gloo"
    with tempfile.TemporaryDirectory(prefix="fxtune-links-") as folder:
        multiprocessing.spawn(_rank, (links, folder), ranks)
        links = Links(**json.loads((Path(folder) / "links.json").read_text()))
    print(json.dumps(asdict(links)))


def _pairs_of_torch(ranks: int) -> list[Pair]:
    """The pairs of torch's first `ranks` GPUs. Empty if NVML cannot be read."""
    import torch

    from fxtune.system.machine.nvml import Card

    cards = [Card(torch.device("cuda", index)) for index in range(ranks)]
    if any(card.missing for card in cards):
        return []
    nvml = cards[0].nvml
    try:
        return list(pairs(nvml, [card.handle for card in cards]))
    except nvml.NVMLError:
        return []


def _rank(rank: int, links: Links, folder: str) -> None:
    """Run one process of the all-reduce. Rank 0 writes `folder`/links.json."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # a run sets the same
    cuda = links.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=links.ranks
    )
    try:
        small = torch.ones(2, device=device)
        large = torch.ones(BYTES[links.device] // 4, device=device)
        links.size = large.numel() * large.element_size()
        links.latency, links.seconds = _median_time(small), _median_time(large)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        (Path(folder) / "links.json").write_text(json.dumps(asdict(links)))


def _median_time(tensor: Any) -> float:
    """The median time of an all-reduce of `tensor`, in seconds. The measurement takes about SECONDS."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        began = time.perf_counter()
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    warm = max(once() for _ in range(3))
    # All ranks must repeat the all-reduce equally often, so they take the smallest number.
    count = torch.tensor(float(min(max(SECONDS / max(warm, 1e-9), 5), 200)), device=tensor.device)
    dist.all_reduce(count, dist.ReduceOp.MIN)
    times = sorted(once() for _ in range(int(count)))
    return times[len(times) // 2]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
