"""What is known of the machine, the installed packages and the model, as plain frozen data.

A technique's `check` reads nothing else, so it is tested for hardware that is not here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from typing import Any

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


class Library(str, Enum):
    """Whose 8-bit and 4-bit code runs."""

    auto = "auto"
    bitsandbytes = "bitsandbytes"
    torchao = "torchao"


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
    """The C compiler that Triton would use to launch what it compiled, or None."""
    return shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
