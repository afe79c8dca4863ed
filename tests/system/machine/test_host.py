"""The memory that a process may use, within the limits of its control group and address space."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxtune.system.machine import host

ROOT = Path(__file__).resolve().parents[3]


def test_memory_limit_of_a_control_group_counts(tmp_path):
    """A real group of 1 GiB inside one with less."""
    root = host.CGROUPS / "memory" if (host.CGROUPS / "memory").is_dir() else host.CGROUPS
    outer = root / f"fxtune-test-{os.getpid()}"
    inner = outer / "job"
    limit = "memory.limit_in_bytes" if root.name == "memory" else "memory.max"
    try:
        inner.mkdir(parents=True)
        if root == host.CGROUPS:
            (outer / "cgroup.subtree_control").write_text("+memory")
        (inner / limit).write_text(str(1 << 30))
        (outer / limit).write_text(str(1 << 29))
        code = f"open('{inner}/cgroup.procs', 'w').write('0'); from fxtune.system.machine import host; print(*host.memory())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no control group can be made here: {error}")
    finally:
        for group in (inner, outer):
            if group.exists():
                group.rmdir()
    total, available = map(int, done.stdout.split())
    assert total == 1 << 29
    assert 0 < available < total


def test_limit_of_the_address_space_counts():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY)); "
        "from fxtune.system.machine import host; print(*host.memory())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    total, available = map(int, done.stdout.split())
    assert total == 1 << 30
    assert 0 < available < total


@pytest.mark.parametrize(
    "files",
    [
        {"job/cpu.max": "150000 100000"},
        {"cpu.max": "max 100000", "job/cpu.max": "max 100000", "job/part/cpu.max": "200000 100000"},
        {"cpu/job/cpu.cfs_quota_us": "120000", "cpu/job/cpu.cfs_period_us": "100000"},
    ],
)
def test_cpu_quota_of_a_control_group_counts(tmp_path, monkeypatch, files):
    for name, text in {**files, "self": "0::/job/part\n3:cpu,cpuacct:/job/part\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(host, "CGROUPS", tmp_path)
    monkeypatch.setattr(host, "OWN_GROUPS", tmp_path / "self")
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(8)))
    assert host.cores() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_freed_memory_is_used_again():
    """A large block at the place of one that was freed needs no new pages. Small ones are counted: a huge page of the
    kernel stands for 512 of them, and a few pages of Python's own would weigh as much."""
    code = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
from fxtune.system.machine.host import reuse_freed_memory
if sys.argv[1] == "reuse":
    reuse_freed_memory()
faults = []
for _ in range(4):
    block = b"x" * (64 << 20)
    del block
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[0])
"""
    own, reused = (
        int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, cwd=ROOT).stdout)
        for how in ("own", "reuse")
    )
    assert reused < own / 10
