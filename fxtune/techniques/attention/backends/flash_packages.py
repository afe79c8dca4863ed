"""FlashAttention-2, and FlashAttention-3 for Hopper, as packages that transformers calls. A build of FlashAttention-2
from source takes an hour, and torch has its kernel built in (sdpa.py). FlashAttention-3 is built from source."""

from __future__ import annotations

import importlib

import torch

from fxtune.system.machine.packages import PACKAGES
from fxtune.techniques.attention.backends.backend import Backend
from fxtune.techniques.smoke_tests import require_attention


def test_flash2(device: torch.device) -> str:
    return require_attention(device, importlib.import_module("flash_attn").flash_attn_func)


def test_flash3(device: torch.device) -> str:
    return require_attention(device, importlib.import_module("flash_attn_interface").flash_attn_func)


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
