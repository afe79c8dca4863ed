"""Compiled kernels of the Hugging Face hub: `hub:ORG/KERNEL@COMMIT`."""

from __future__ import annotations

import importlib

import torch

from fxtune.errors import ConfigError
from fxtune.system.machine.packages import PACKAGES
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.upstream.transformers import load_hub_attention

HUB = "hub:"


def smoke_test(device: torch.device) -> str:
    assert callable(importlib.import_module("kernels").get_kernel)
    return "imports; a recipe fetches a kernel from the hub by techniques.attention.backend=hub:ORG/KERNEL@COMMIT"


class _Hub(Backend):
    def prepare(self) -> None:
        try:  # Attention.check() requires trust_remote_code
            load_hub_attention(self.implementation)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"techniques.attention.backend={self.name} cannot be loaded: {error} Check its name, the network and "
                "HF_HUB_OFFLINE, or set it to auto."
            ) from error


def hub(backend: str) -> Backend:
    """The backend that a recipe names by `hub:NAME`."""
    name = backend.removeprefix(HUB)
    return _Hub(
        backend,
        name,
        f"the hub's {name}",
        r"(?i)flash|attn|attention|fmha",
        package=PACKAGES["kernels"],
        softcap=True,
        deterministic=False,
    )
