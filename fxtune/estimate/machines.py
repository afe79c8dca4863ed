"""The cards that people rent and buy. A run on these cards can be planned on any machine.

A card's memory here is what torch reports (`torch.cuda.get_device_properties().total_memory`). It is less than the
product's name says. The driver and the process's context take CONTEXT_MIB of this memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxtune.errors import ConfigError, did_you_mean
from fxtune.estimate.cpu_speed import cpu_speed
from fxtune.system.machine.facts import MachineFacts, installed_packages
from fxtune.system.machine.host import cores, memory
from fxtune.system.terminal.units import GIB

CONTEXT_MIB = 600
"""MiB of a card's memory that the driver and a process's context take."""


@dataclass(frozen=True)
class CardModel:
    """A card as it is sold."""

    device_name: str
    """The name that `torch.cuda.get_device_name()` returns."""
    memory_gib: float
    """The memory that torch reports."""
    capability: tuple[int, int]
    """The compute capability as (major, minor)."""


CARD_MODELS = {
    "B200": CardModel("NVIDIA B200", 178.4, (10, 0)),
    "H200": CardModel("NVIDIA H200", 139.8, (9, 0)),
    "GH200": CardModel("NVIDIA GH200 480GB", 94.5, (9, 0)),
    "H20": CardModel("NVIDIA H20", 95.1, (9, 0)),
    "H100-NVL": CardModel("NVIDIA H100 NVL", 93.1, (9, 0)),
    "H100": CardModel("NVIDIA H100 80GB HBM3", 79.1, (9, 0)),
    "H100-PCIe": CardModel("NVIDIA H100 PCIe", 79.1, (9, 0)),
    "A100-80GB": CardModel("NVIDIA A100-SXM4-80GB", 79.2, (8, 0)),
    "A100-40GB": CardModel("NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
    "A6000": CardModel("NVIDIA RTX A6000", 47.4, (8, 6)),
    "6000-Ada": CardModel("NVIDIA RTX 6000 Ada Generation", 47.4, (8, 9)),
    "L40S": CardModel("NVIDIA L40S", 44.4, (8, 9)),
    "RTX-5090": CardModel("NVIDIA GeForce RTX 5090", 31.4, (12, 0)),
    "RTX-4090": CardModel("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
    "RTX-3090": CardModel("NVIDIA GeForce RTX 3090", 23.6, (8, 6)),
    "A10G": CardModel("NVIDIA A10G", 22.0, (8, 6)),
    "L4": CardModel("NVIDIA L4", 22.0, (8, 9)),
}
"""The cards by the name that a user types as --gpu, roughly from the strongest to the weakest. `plan` suggests the
last card that a run fits."""
PACKAGES = {
    "flash-attn-4": "4.0.0b36",
    "quack-kernels": "0.6.5",
    "liger-kernel": "0.8.5",
    "fla-core": "0.6.0",
    "bitsandbytes": "0.50.0",
    "torchao": "0.18.0",
}
"""The oldest versions that `pip install 'fxtune[flash,quant]'` installs on a machine with a GPU."""


def card_name(name: str) -> str:
    """The key of CARD_MODELS for `name`, which may be a key or a device name of torch; `name` itself if there is no
    such card. Case, spaces, hyphens, underscores and the words NVIDIA, GeForce and RTX are ignored."""
    word = _letters(name)
    return next(
        (key for key, card in CARD_MODELS.items() if word in (_letters(key), _letters(card.device_name))), name
    )


def _letters(name: str) -> str:
    return re.sub(r"[\s_-]|nvidia|geforce|rtx", "", name.lower())


def machine(name: str, host_gib: float, free_gib: float | None = None) -> MachineFacts:
    """The facts of a machine that has cards of model `name` and fxtune's packages for GPUs. The name `cpu` means this
    machine without its cards, and measures the speed of its cores.

    `host_gib`: a rank's share of the host's memory. `free_gib`: how much of the card's memory the run may use; None:
    all but CONTEXT_MIB. Raises ConfigError if the card is not in CARD_MODELS.
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
    card = CARD_MODELS.get(card_name(name))
    if card is None:
        names, word = [*CARD_MODELS, "cpu"], _letters(name)
        variants = [key for key in CARD_MODELS if _letters(key).startswith(word)] if word else []
        hint = f"; did you mean {' or '.join(variants)}?" if variants else did_you_mean(name, names)
        raise ConfigError(f"--gpu {name}: no such card{hint} Known are {', '.join(names)}.")
    total = int(card.memory_gib * GIB)
    free = total - CONTEXT_MIB * 2**20
    return MachineFacts(
        device="cuda",
        device_name=card.device_name,
        capability=card.capability,
        memory=total,
        free_memory=min(free, int(free_gib * GIB)) if free_gib else free,
        host_memory=int(host_gib * GIB),
        cores=8,  # a usual share of a host's cores for each card
        packages=PACKAGES | installed_packages(),
    )
