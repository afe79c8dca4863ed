"""The device, the memory and the installed packages of this machine, as plain frozen data.

`World.facts()` collects them. facts/run.py adds the facts of a run.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from dataclasses import dataclass, field

from fxtune.system.machine import packages

PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    *(package.name for package in packages.PACKAGES.values() if not package.with_torch),
    *("wandb", "tensorboard", "mlflow-skinny", "trackio"),
    "lion-pytorch",
    "schedulefree",
)


BROKEN: dict[str, str] = {}
"""The reason for each installed package that a check in this process found not to work (techniques/package_checks.py).
These packages count as missing."""
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
    """Memory of the device: the GPU's memory, or the host's memory if the device is the CPU."""
    free_memory: int = 0
    """The part of `memory` that no process uses, on the fullest device of the run."""
    host_memory: int = 0
    """This rank's share of the host's memory: the ranks of a host share it equally."""
    cores: int = 1
    cpu_speed: float = 1.0
    """Speed of a core, as a multiple of the core in estimate/cards.py. It is 1 unless a forecast has measured it."""
    platform: str = "Linux"
    packages: dict[str, str] = field(default_factory=dict)
    """The installed version of each package in PACKAGES. A missing or broken package has no key."""
    broken: dict[str, str] = field(default_factory=dict)
    """The reason for each installed package that does not work here. Only packages that the run may use are tried."""

    def lacks(self, package: str) -> str:
        """Why a package without a key in `packages` cannot be used, as the end of a sentence about it."""
        if package in self.broken:
            return f"is installed and does not work here ({self.broken[package]})"
        return "is not installed"

    def apex_refusal(self) -> str | None:
        """Why NVIDIA's Apex cannot run here and how to install it; None if it can run."""
        if self.device != "cuda":
            return f"NVIDIA's Apex runs on a GPU, and the device is {self.device}"
        if APEX in self.packages:
            return None
        if APEX in self.broken:
            return f"NVIDIA's Apex {self.lacks(APEX)}. Repair it (`fxtune doctor` says how)"
        found = (
            "the installed package `apex` has no CUDA extensions (amp_C): it is PyPI's, which is another project, or "
            "was built without them"
            if "apex" in self.packages
            else "NVIDIA's Apex is not installed"
        )
        return f"{found}. Build it from github.com/NVIDIA/apex with its cpp_ext and cuda_ext"


def installed_packages() -> dict[str, str]:
    """The versions of PACKAGES that are installed and not broken."""
    return {name: version for name, version in _versions().items() if name not in BROKEN}


@functools.cache
def _versions() -> dict[str, str]:
    found = {name: version for name in PACKAGES if (version := packages.installed_version(name))}
    if importlib.util.find_spec("apex") and importlib.util.find_spec("amp_C"):
        found[APEX] = found.get("apex", "unknown version")
    return found


def c_compiler() -> str | None:
    """The C compiler that Triton uses to build the launchers of its kernels, or None."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
