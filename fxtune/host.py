"""What of the host this process may use: memory and CPU cores, as its container has them. Without torch."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


def memory() -> tuple[int, int]:
    """Bytes of memory in all and available to this process; a container's limit counts."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemTotal"])
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())  # "max": no limit, and no number
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, limit - used)
    return total, available


def cores() -> int:
    """CPU cores that this process may use (a container's affinity counts, the host's size does not)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_age() -> float:
    """Seconds since this process was started, imports included; 0 where nobody can say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    return 0.0
