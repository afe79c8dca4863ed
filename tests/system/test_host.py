"""The memory that a process may use, within the limits of its control group and address space."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxtune.system import host

ROOT = Path(__file__).resolve().parents[2]


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
        code = f"open('{inner}/cgroup.procs', 'w').write('0'); from fxtune.system import host; print(*host.memory())"
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
        "from fxtune.system import host; print(*host.memory())"
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
