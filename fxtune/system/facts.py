"""The device, the memory and the installed packages of this machine, as plain frozen data.

`World.facts()` collects them. techniques/facts.py adds the facts of a run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, field
from importlib import metadata

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
"""Apex with its CUDA extensions. PyPI's `apex` is another project, so a version of `apex` alone says nothing."""


@dataclass(frozen=True)
class MachineFacts:
    """The device and the packages of one machine. Memory is in bytes."""

    device: str = "cpu"
    """The type of the torch device: `cpu` or `cuda`."""
    device_name: str = "cpu"
    capability: tuple[int, int] | None = None
    """The compute capability as (major, minor); None without a GPU."""
    memory: int = 0
    """Memory of the device, the GPU's or the host's."""
    free_memory: int = 0
    """The part of `memory` that no process uses."""
    host_memory: int = 0
    cores: int = 1
    platform: str = "Linux"
    packages: dict[str, str] = field(default_factory=dict)
    """The installed version of each package in PACKAGES. A missing package has no key."""

    def apex_problem(self) -> str | None:
        """Why NVIDIA's Apex cannot run here and how to install it; None if it can run."""
        if self.device != "cuda":
            return f"NVIDIA's Apex runs on a GPU, and the device is {self.device}"
        if APEX in self.packages:
            return None
        found = (
            "the installed package `apex` has no CUDA extensions (amp_C): it is PyPI's, which is another project, or "
            "was built without them"
            if "apex" in self.packages
            else "NVIDIA's Apex is not installed"
        )
        return f"{found}. Build it from github.com/NVIDIA/apex with its cpp_ext and cuda_ext"


def installed_packages() -> dict[str, str]:
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
    """The C compiler that Triton uses to build the launchers of its kernels, or None."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
