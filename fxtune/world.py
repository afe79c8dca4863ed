"""This process's place in the world: its device and rank, and the facts of the machine, the packages and the model.

`Facts` is plain frozen data, so that every technique's `check` can be tested for hardware that is not here.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from typing import Any

import torch

from fxtune.errors import ConfigError, HardwareError
from fxtune.host import cores, memory

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "liger-kernel",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "quack-kernels",
    "kernels",
    "bitsandbytes",
    "torchao",
    "apex",
    "wandb",
    "tensorboard",
    "lion-pytorch",
)
APEX = "nvidia-apex"
"""Apex with its CUDA extensions. PyPI's `apex` is another project, so the name says nothing."""

CONTEXT = 2**30
"""Bytes of a card that a driver and the context of a process take, at most."""
_LIMITED: set[torch.device] = set()
"""Cards whose memory a run of this process has limited; the next run of a sweep may not want that."""


class Library(str, Enum):
    """Whose 8-bit and 4-bit code runs."""

    auto = "auto"
    bitsandbytes = "bitsandbytes"
    torchao = "torchao"


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class Facts:
    """What can be relied on here. Memory in bytes; `capability` as (major, minor), None without a GPU."""

    device: str = "cpu"
    device_name: str = "cpu"
    capability: tuple[int, int] | None = None
    memory: int = 0
    cores: int = 1
    platform: str = "Linux"
    packages: dict[str, str] = field(default_factory=dict)
    """Installed version of each package in PACKAGES; a package that is missing has no key."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model's Hugging Face config as a plain dict (`PretrainedConfig.to_dict()`)."""
    dtype: str = "float32"
    """The dtype that the model's weights will have: float32, bfloat16 or float16."""
    packing: bool = False
    sequence_length: int = 0
    rows: tuple[int, ...] = ()
    """The lengths in tokens that a batch's rows can have (one with packing, the buckets without)."""
    micro_batch_size: int = 1
    free_memory: int = 0
    """Bytes of `memory` that nobody uses yet."""
    host_memory: int = 0
    optimizer: str = "adamw"
    stochastic_rounding: bool = False
    """Whether the optimizer rounds weights by chance, and so keeps its moments in float32."""
    deterministic: bool = False
    """Whether the same run twice must give the same bits."""
    techniques: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The options of each technique that is enabled, by its name. `Pipeline` fills it in."""

    @property
    def text(self) -> dict[str, Any]:
        """The config of the language model inside `model`."""
        return self.model.get("text_config") or self.model

    def without_apex(self) -> str | None:
        """Why NVIDIA's Apex cannot run here and what to change, up to what to use in its place; None: it can."""
        if self.device != "cuda":
            return f"NVIDIA's Apex runs on a GPU, and the device is {self.device}"
        if APEX in self.packages:
            return None
        found = (
            "the package `apex` that is installed has no CUDA extensions (amp_C): it is PyPI's, which is another project, "
            "or was built without them"
            if "apex" in self.packages
            else "NVIDIA's Apex is not installed"
        )
        return f"{found}. Build it from github.com/NVIDIA/apex with its cpp_ext and cuda_ext"

    @property
    def compute_dtype(self) -> str:
        """The dtype that matmuls and attention run in: autocast's, or the weights'."""
        autocast = self.techniques.get("precision", {}).get("autocast", "none")
        return self.dtype if autocast == "none" else str(getattr(autocast, "value", autocast))


@dataclass(frozen=True)
class World:
    """Where this process runs. fxtune trains on one device; `rank` and `size` are here so that a launcher is refused clearly."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @staticmethod
    def create(device: Device = Device.auto, memory_gib: float | None = None) -> World:
        """Pick the device, and let torch have at most `memory_gib` GiB of its memory (None: all of it).

        Raises HardwareError where the device asked for is not there, ConfigError where the limit cannot be kept.
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

    def facts(self, **known: Any) -> Facts:
        """What is true of this machine, with `known` (model, dtype, packing, ...) added."""
        here: dict[str, Any] = dict(
            device=self.device.type,
            device_name=f"{cores()} cores, {platform.machine()}",
            cores=cores(),
            platform=platform.system(),
            packages=_packages(),
        )
        if self.device.type == "cuda":
            card = torch.cuda.get_device_properties(self.device)
            total = int(card.total_memory * torch.cuda.get_per_process_memory_fraction(self.device))
            # What is free differs from run to run, and `auto` decides by it.
            free = (
                total - CONTEXT if known.get("deterministic") else min(torch.cuda.mem_get_info(self.device)[0], total)
            )
            here.update(
                device_name=card.name,
                capability=(card.major, card.minor),
                memory=total,
                free_memory=free,
                host_memory=memory()[0],
            )
        else:
            here.update(memory=memory()[0], free_memory=memory()[0], host_memory=memory()[0])
        return Facts(**{**here, **known})


def _limit(device: torch.device, gib: float) -> None:
    """Let torch's allocator have at most `gib` GiB of the card. The CUDA context (about 0.5 GiB) comes on top."""
    if device.type != "cuda":
        raise ConfigError(f"run.memory_gib={gib} limits a GPU's memory, and this run is on a CPU. Remove it.")
    whole = torch.cuda.get_device_properties(device).total_memory
    if gib * 2**30 > whole:
        raise ConfigError(
            f"run.memory_gib={gib}, but {torch.cuda.get_device_name(device)} has {whole / 2**30:.1f} GiB. Lower or "
            "remove it."
        )
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / whole, device)
    _LIMITED.add(device)


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("apex") and importlib.util.find_spec("amp_C"):
        found[APEX] = found.get("apex", "unknown version")
    return found


def c_compiler() -> str | None:
    """The C compiler that Triton would use to launch what it compiled, or None."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
