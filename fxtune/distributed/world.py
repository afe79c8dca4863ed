"""The device that this process trains on, and the facts of the machine."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

import torch

from fxtune.errors import ConfigError, HardwareError
from fxtune.system.facts import MachineFacts, installed_packages
from fxtune.system.host import cores, memory
from fxtune.system.units import GIB

CONTEXT = GIB
"""Bytes of GPU memory that the driver and the context of a process take, at most."""
_LIMITED: set[torch.device] = set()
"""GPUs whose memory a run of this process has limited: the next run of a sweep may have another limit, or none."""


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class World:
    """The device of this process."""

    device: torch.device

    @staticmethod
    def create(device: Device = Device.auto, memory_gib: float | None = None) -> World:
        """Select the device, and limit torch to `memory_gib` GiB of its memory (None: no limit).

        Raises HardwareError if the device is missing, ConfigError if the limit is not possible or a launcher such as
        torchrun started several processes.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size > 1:
            raise ConfigError(
                f"WORLD_SIZE={size}: fxtune {metadata.version('fxtune')} trains on one device. "
                "Start it with `python -m fxtune`, not torchrun; CUDA_VISIBLE_DEVICES picks the GPU."
            )
        if device is Device.cuda and not torch.cuda.is_available():
            raise HardwareError(
                "run.device=cuda, but torch sees no GPU here "
                f"(torch {torch.__version__}, built for CUDA {torch.version.cuda}). "
                "Use run.device=auto, or install a CUDA build of torch and a driver that serves it."
            )
        cuda = torch.cuda.is_available() and device is not Device.cpu
        world = World(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
        if memory_gib is not None:
            _limit(world.device, memory_gib)
        elif world.device in _LIMITED:
            torch.cuda.set_per_process_memory_fraction(1.0, world.device)
            _LIMITED.discard(world.device)
        return world

    def facts(self, deterministic: bool = False) -> MachineFacts:
        """The device, the memory and the installed packages.

        `deterministic`: count all memory as free except the driver's. The memory that other processes use differs from
        run to run, and `auto` settings depend on free memory.
        """
        name, capability, total = f"{cores()} cores, {platform.machine()}", None, memory()[0]
        free = total
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device)
            name, capability = card.name, (card.major, card.minor)
            total = int(card.total_memory * torch.cuda.get_per_process_memory_fraction(self.device))
            free = total - CONTEXT if deterministic else min(torch.cuda.mem_get_info(self.device)[0], total)
        return MachineFacts(
            device=self.device.type,
            device_name=name,
            capability=capability,
            memory=total,
            free_memory=free,
            host_memory=memory()[0],
            cores=cores(),
            platform=platform.system(),
            packages=installed_packages(),
        )


def _limit(device: torch.device, gib: float) -> None:
    """Limit torch's allocator to `gib` GiB of the GPU. The CUDA context (about 0.5 GiB) is not included."""
    if device.type != "cuda":
        raise ConfigError(f"run.memory_gib={gib} limits a GPU's memory, and this run is on a CPU. Remove it.")
    total = torch.cuda.get_device_properties(device).total_memory
    if gib * GIB > total:
        raise ConfigError(
            f"run.memory_gib={gib}, but {torch.cuda.get_device_name(device)} has {total / GIB:.1f} GiB. Lower or "
            "remove it."
        )
    torch.cuda.set_per_process_memory_fraction(gib * GIB / total, device)
    _LIMITED.add(device)
