"""The memory, CPU cores and cache folder that this process may use, within its container's limits. This module does
not import torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from fxtune.errors import StorageError

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Options of glibc's mallopt(), from malloc.h."""


def memory() -> tuple[int, int]:
    """Total and available bytes of memory, within the limits of the container, the batch job and `ulimit -v`."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()}
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemTotal"])
    for limit, used in _limits():
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return total, available


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (bytes allowed, bytes used without page cache) of this process's address space and control groups, for
    each that is limited."""
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        yield allowed, pages * os.sysconf("SC_PAGE_SIZE")
    for two, folder in _group_folders("memory"):
        limit_file, used_file = (
            ("memory.max", "memory.current") if two else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        cache = "inactive_file" if two else "total_inactive_file"
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())  # "max" means no limit
            used, spare = int((folder / used_file).read_text()), 0
            with contextlib.suppress(OSError, ValueError):
                rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                spare = next((int(row[1]) for row in rows if row[0] == cache), 0)
            yield limit, used - spare


def _group_folders(controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield (whether the group is of version 2, its folder) for each control group that contains this process. Version
    2 has one tree of groups, version 1 has a tree for each controller. Groups above the group of a Slurm or systemd
    job may have limits, too."""
    groups = [(two, Path("/")) for two in (True, False)]
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                groups += [(not controllers, above) for above in (Path(path), *Path(path).parents)]
    for two, group in dict.fromkeys(groups):
        yield two, (CGROUPS if two else CGROUPS / controller) / group.relative_to("/")


def cores() -> int:
    """CPU cores that this process may use, by its affinity and the quotas of its control groups."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for two, folder in _group_folders("cpu"):
        files = [folder / name for name in (["cpu.max"] if two else ["cpu.cfs_quota_us", "cpu.cfs_period_us"])]
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int(word) for file in files for word in file.read_text().split())
            if quota > 0:  # version 1 writes -1, version 2 `max`, if there is no quota
                allowed = min(allowed, math.ceil(quota / period))
    return allowed


def reuse_freed_memory() -> None:
    """Let this process keep the memory that it frees (glibc). By default glibc returns a freed block of more than 32
    MiB to the system, and the system clears its pages before the next use. The clearing takes half of the time to
    decode photographs of 12 megapixels."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def process_age(process: int | str = "self") -> float:
    """Seconds since a process was started; 0 if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        began = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf(
            "SC_CLK_TCK"
        )
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began, 0.0)
    return 0.0


def cache_home() -> Path:
    """The folder for files that fxtune can recreate. Raises StorageError for a user without a home folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if home.startswith("~"):
        raise StorageError("This user has no home folder to keep a cache in. Set HOME or XDG_CACHE_HOME.")
    return Path(home) / "fxtune"
