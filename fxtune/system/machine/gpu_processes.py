"""The processes that use a GPU, as the driver lists them (NVML)."""

from __future__ import annotations

import os


def gpu_processes(uuid: str) -> list[str]:
    """`process 7 (3.2 GiB)` for each other process on the GPU with `uuid`. The list is empty without NVML, or if a
    container hides other processes."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid[:4] in ("GPU-", "MIG-") else f"GPU-{uuid}")
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return [
        f"process {process.pid} ({(process.usedGpuMemory or 0) / 2**30:.1f} GiB)"
        for process in running
        if process.pid != os.getpid()
    ]
