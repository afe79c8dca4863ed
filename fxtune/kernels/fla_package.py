"""Fixes the choices that flash-linear-attention (fla-core) makes from the environment, so that two processes compute
the same bits. A variable that the user has set stays.

    FLA_TILELANG    Which kernels compute gradients of a decay. On Hopper they are tilelang's with Triton 3.4 to 3.7.0,
                    whose own are wrong there (flash-linear-attention#640), and else Triton's, even if tilelang is
                    installed. fla-core raises an error where it needs tilelang and does not find it.
    FLA_FLASH_QLA   Off. Only fla-core's public functions call FlashQLA, and fxtune calls none of them.
    FLA_CONFIG_DIR  On Hopper launch_settings/, for the shapes of Qwen3.5. To autotune these kernels takes over a
                    minute, and each process may find other settings, with other bits. fxtune/__init__.py switches
                    these settings on (FLA_CACHE_MODE). Other shapes are tuned once; Triton's cache keeps the choice.
"""

from __future__ import annotations

import functools
import os
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

SETTINGS = Path(__file__).parent / "launch_settings" / "hopper"
HOPPER = (9, 0)
WRONG_ON_HOPPER = Version("3.4"), Version("3.7.1")
"""The first Triton with wrong gradients of a decay, and the first one without."""


@functools.cache
def prepare() -> None:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
    first, good = WRONG_ON_HOPPER
    wrong = hopper and first <= Version(metadata.version("triton")) < good
    choices = dict(FLA_TILELANG=str(int(wrong)), FLA_FLASH_QLA="0")
    if hopper:
        choices["FLA_CONFIG_DIR"] = str(SETTINGS)
    for name, value in choices.items():
        os.environ.setdefault(name, value)


def describe() -> str:
    """The packages whose kernels run, after prepare()."""
    names = ["fla-core", "triton", *["tilelang"] * (os.environ.get("FLA_TILELANG") == "1")]
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)
