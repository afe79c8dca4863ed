"""FlashAttention-2 as a package. A build from source takes an hour; torch has the kernel built in (sdpa.py).
transformers calls the package."""

from __future__ import annotations

import importlib

import torch

from fxtune.system.machine.packages import PACKAGES
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.smoke_tests import require_attention


def smoke_test(device: torch.device) -> str:
    return require_attention(device, importlib.import_module("flash_attn").flash_attn_func)


FLASH2 = Backend(
    "flash2",
    "flash_attention_2",
    "FlashAttention-2",
    r"flash_attn::_flash_attn_(varlen_)?forward|void flash::flash_fwd",
    package=PACKAGES["flash-attn"],
    softcap=True,
    dropout=True,
    recordable=True,
)
