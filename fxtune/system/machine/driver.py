"""Starts NVIDIA's driver in a thread while Python imports torch, which would start it only afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

LIBRARY = "libcuda.so.1"


def start_driver() -> threading.Thread:
    """Call cuInit(), which needs neither Python's lock nor memory of a card. If it fails, torch's call says why."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its first call
    thread = threading.Thread(target=_start, name="fxtune-driver", daemon=True)
    thread.start()
    return thread


def _start() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(LIBRARY).cuInit(0)
