"""Fixes the choices that flash-linear-attention (fla-core) makes from the environment, so that two processes compute
the same bits. A variable that the user has set stays.

    FLA_TILELANG    Whether tilelang's kernels compute the gradients of a decay. On Hopper with Triton 3.4 to 3.7.0
                    they must, because Triton's kernels are wrong there (flash-linear-attention#640), and fla-core
                    raises an error if tilelang is missing. Elsewhere Triton's kernels run, even if it is installed.
    FLA_CONFIG_DIR  On Hopper: launch_settings/, measured launch settings for Qwen3.5's shapes. Without them the first
                    run tunes for over a minute, and another process may choose other settings and compute other bits.
                    Other shapes are tuned once; Triton's cache keeps the choice.

fxtune/__init__.py sets two more, because fla-core reads them when transformers imports it: FLA_CACHE_MODE, which turns
the launch settings on, and FLA_FLASH_QLA, which keeps FlashQLA off.
"""

from __future__ import annotations

import functools
import os
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

from fxtune.upstream import fla

SETTINGS = Path(__file__).parent / "launch_settings" / "hopper"
HOPPER = (9, 0)
WRONG_ON_HOPPER = Version("3.4"), Version("3.7.1")
"""The first Triton with wrong gradients of a decay, and the first one without."""


@functools.cache
def prepare() -> None:
    """Set the variables, once in a process, before fla-core chooses a kernel. Initializes CUDA."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
    first, good = WRONG_ON_HOPPER
    wrong = hopper and first <= Version(metadata.version("triton")) < good
    choices = dict(FLA_TILELANG=str(int(wrong)))
    if hopper:
        choices["FLA_CONFIG_DIR"] = str(SETTINGS)
    for name, value in choices.items():
        os.environ.setdefault(name, value)


def describe(*operators: str) -> str:
    """The packages whose kernels run fxtune's `operators`, after prepare()."""
    import triton

    names = [f"fla-core {metadata.version('fla-core')}", f"triton {triton.__version__}"]
    if "linear_attention" in operators and fla.runs_tilelang():
        names.append(f"tilelang {metadata.version('tilelang')}")
    return ", ".join(names)
