"""FlashAttention-3 for Hopper, a package built from source. transformers calls the package."""

from __future__ import annotations

import importlib

import torch

from fxtune.system.machine.packages import PACKAGES
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.smoke_tests import require_attention


def smoke_test(device: torch.device) -> str:
    return require_attention(device, importlib.import_module("flash_attn_interface").flash_attn_func)


FLASH3 = Backend(
    "flash3",
    "flash_attention_3",
    "FlashAttention-3",
    r"flash_attn_3::\w*fwd|FlashAttnFwdSm90",
    package=PACKAGES["flash-attn-3"],
    capability=((9, 0), (10, 0)),
    softcap=True,
    recordable=True,
)
