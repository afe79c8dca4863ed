"""Machines that a run can be planned for without having one: the cards that people rent and buy.

Memory is the figure that torch reports (`torch.cuda.get_device_properties().total_memory`), less than the name on the
card says. The driver and the process's context take CONTEXT_MIB of this memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxtune.errors import ConfigError, did_you_mean
from fxtune.system.facts import MachineFacts, installed_packages
from fxtune.system.host import cores, memory
from fxtune.system.units import GIB
from fxtune.techniques.estimate.cpu_speed import cpu_speed

CONTEXT_MIB = 600
"""MiB of a card's memory that the driver and a process's context take."""


@dataclass(frozen=True)
class Model:
    """A card as it is sold."""

    device_name: str
    """As `torch.cuda.get_device_name()` prints it."""
    gib: float
    """Its memory, as torch reports it."""
    capability: tuple[int, int]
    """The compute capability as (major, minor)."""


MODELS = {
    "B200": Model("NVIDIA B200", 178.4, (10, 0)),
    "H200": Model("NVIDIA H200", 139.8, (9, 0)),
    "GH200": Model("NVIDIA GH200 480GB", 94.5, (9, 0)),
    "H20": Model("NVIDIA H20", 95.1, (9, 0)),
    "H100-NVL": Model("NVIDIA H100 NVL", 93.1, (9, 0)),
    "H100": Model("NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
    "H100-PCIe": Model("NVIDIA H100 PCIe", 79.1, (9, 0)),
    "A100-80GB": Model("NVIDIA A100-SXM4-80GB", 79.2, (8, 0)),
    "A100-40GB": Model("NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
    "A6000": Model("NVIDIA RTX A6000", 47.4, (8, 6)),
    "6000-Ada": Model("NVIDIA RTX 6000 Ada Generation", 47.4, (8, 9)),
    "L40S": Model("NVIDIA L40S", 44.4, (8, 9)),
    "RTX-5090": Model("NVIDIA GeForce RTX 5090", 31.4, (12, 0)),
    "RTX-4090": Model("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
    "RTX-3090": Model("NVIDIA GeForce RTX 3090", 23.6, (8, 6)),
    "A10G": Model("NVIDIA A10G", 22.0, (8, 6)),
    "L4": Model("NVIDIA L4", 22.0, (8, 9)),
}
"""By the name that a user gives, the largest first."""
PACKAGES = {
    "flash-attn-4": "4.0.0b36",
    "quack-kernels": "0.6.5",
    "liger-kernel": "0.8.5",
    "bitsandbytes": "0.50.0",
    "torchao": "0.18.0",
}
"""What `pip install 'fxtune[flash,quant]'` brings on a machine with a GPU, at least in these versions."""


def machine(name: str, host_gib: float, free_gib: float | None = None) -> MachineFacts:
    """The facts of a machine with cards of this name and fxtune's packages for GPUs; `cpu`: the facts of this
    machine without its cards; its cores are timed.

    `host_gib`: a rank's share of the host's memory; `free_gib`: the part of the card that the run may use (None: all
    but the context). Raises ConfigError for a name that is not in MODELS.
    """
    if name.lower() == "cpu":
        whole, free = memory()
        return MachineFacts(
            device="cpu",
            device_name=f"{cores()} cores of this machine",
            memory=whole,
            free_memory=min(free, int(free_gib * GIB)) if free_gib else free,
            host_memory=int(host_gib * GIB),
            cores=cores(),
            cpu_speed=cpu_speed(cores()),
            packages=installed_packages(),
        )
    card = {key.lower(): model for key, model in MODELS.items()}.get(name.lower())
    if card is None:
        names = [*MODELS, "cpu"]
        raise ConfigError(f"--gpu {name}: no such card{did_you_mean(name, names)} Known are {', '.join(names)}.")
    total = int(card.gib * GIB)
    free = total - CONTEXT_MIB * 2**20
    return MachineFacts(
        device="cuda",
        device_name=card.device_name,
        capability=card.capability,
        memory=total,
        free_memory=min(free, int(free_gib * GIB)) if free_gib else free,
        host_memory=int(host_gib * GIB),
        cores=8,
        packages=PACKAGES | installed_packages(),
    )
