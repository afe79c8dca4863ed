"""Starts NVIDIA's driver in a thread while Python imports torch, which would start it only afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading

LIBRARY = "libcuda.so.1"


def start_driver() -> threading.Thread:
    """Call the driver's cuInit() in a thread, which does not hold Python's lock meanwhile. It takes no memory of a
    card. Without a driver nothing happens, and an error of the driver comes again when torch calls cuInit()."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before its first call

    def start() -> None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(LIBRARY).cuInit(0)

    thread = threading.Thread(target=start, name="fxtune-driver", daemon=True)
    thread.start()
    return thread
