"""Describes this machine without torch: GPUs, memory, disks, and the servers that training uses.

`fxtune doctor` prints the findings. No function here raises: a fact that cannot be found out has no line. Findings say
whether a secret is set, and never show the secret.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Optional

from fxtune.system.machine.host import cores, memory
from fxtune.system.terminal.redact import redact
from fxtune.system.terminal.units import GIB
from fxtune.tracking import client

TIMEOUT = 3.0
"""Seconds that a server has to answer."""
LOW_DISK = 5 * GIB
LOW_FILES = 1024


class State(str, Enum):
    works = "works"
    info = "info"
    """A fact that is neither good nor bad."""
    warning = "warning"
    missing = "missing"
    broken = "broken"


@dataclass(frozen=True)
class Finding:
    what: str
    seen: str
    state: State = State.info
    remedy: str = ""
    """A command that helps, or what to do."""


def gpus() -> list[Finding]:
    """The GPUs, and the processes that use them, as the driver reports. Empty without a driver."""
    found = []
    for row in _nvidia_smi("--query-gpu=index,name,memory.total,memory.free,driver_version,compute_cap", 6):
        index, name, total, free, driver, capability = row
        memory = f"{_gib(free)} of {_gib(total)} GiB free"
        seen = f"{name}, compute capability {capability}, {memory}; driver {driver}"
        found.append(Finding(f"GPU {index}", seen, State.works))
    rows = _nvidia_smi("--query-compute-apps=pid,process_name,used_memory", 3)
    if others := [f"{pid} {name} ({_gib(used)} GiB)" for pid, name, used in rows]:
        remedy = "wait until they free their memory, or pick another GPU with CUDA_VISIBLE_DEVICES"
        found.append(Finding("other processes", f"on the GPU: {', '.join(others)}", State.warning, remedy))
    return found


def host() -> Iterator[Finding]:
    total, available = memory()
    free = f"{available / GIB:.0f} of {total / GIB:.0f} GiB memory available"
    yield Finding("CPU", f"{cores()} cores for this process, {free}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{soft:,} at most (ulimit -n)"
    remedy = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    yield Finding("open files", seen, State.warning, remedy) if soft < LOW_FILES else Finding("open files", seen)


def disks(runs: Optional[str] = None, tokens: Optional[str] = None) -> Iterator[Finding]:
    """Free space for runs, tokenized data and models. `runs`, `tokens`: folders in place of the defaults."""
    places = {
        "runs": Path(runs or "runs"),
        "token cache": Path(tokens or _folder("XDG_CACHE_HOME", "~/.cache") / "fxtune"),
        "hub cache": _folder("HF_HUB_CACHE", _hub_home() / "hub"),
    }
    for what, folder in places.items():
        existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        seen = f"{folder}: {free / GIB:,.0f} GiB free"
        fault, change = ("not writable", "make it writable") if existing.is_dir() else ("no folder", "remove it")
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            yield Finding(what, f"{folder}: {existing} is {fault}", State.broken, f"use another folder, or {change}")
            continue
        remedy = "free some space: a checkpoint is written before the previous one is removed"
        yield Finding(what, seen, State.warning, remedy) if free < LOW_DISK else Finding(what, seen)


def hub() -> Finding:
    """Whether the Hugging Face hub answers, and whether there is a token."""
    what = "Hugging Face hub"
    stored = _folder("HF_TOKEN_PATH", _hub_home() / "token")
    variable = next((name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)), None)
    there = variable or (stored if stored.is_file() else None)
    token = f"a token in {there}" if there else "no token (gated models need `hf auth login`)"
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding(what, f"offline (HF_HUB_OFFLINE): models and data come from the cache or a folder; {token}")
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return _server(what, address, token, "check the network and HTTPS_PROXY, or give folders as model.path")


def wandb() -> Finding:
    """Whether Weights & Biases answers, and whether there is a key."""
    key = "logged in" if client.api_key_at_hand() else "no API key (`wandb login`): runs are kept offline"
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("offline", "disabled", "dryrun"):
        return Finding("W&B", f"{mode} (WANDB_MODE); {key}")
    return _server("W&B", client.wandb_server(), key, "runs continue offline; upload them later with `wandb sync`")


def _folder(variable: str, default: Path | str) -> Path:
    return Path(os.path.expanduser(os.environ.get(variable) or default))


def _hub_home() -> Path:
    return _folder("HF_HOME", _folder("XDG_CACHE_HOME", "~/.cache") / "huggingface")


def _server(what: str, address: str, login: str, remedy: str) -> Finding:
    shown = redact(address)
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=TIMEOUT):
            pass
    except urllib.error.HTTPError:
        pass  # an error page is an answer, too
    except (OSError, ValueError) as error:
        reason = redact(str(getattr(error, "reason", error)))
        return Finding(what, f"{shown} cannot be reached ({reason}); {login}", State.warning, remedy)
    return Finding(what, f"{shown} answers; {login}", State.works)


def _nvidia_smi(query: str, columns: int) -> list[list[str]]:
    """The cells that nvidia-smi prints; empty if it does not answer in time. NVML could hang this process."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns]


def _gib(mib: str) -> str:
    return f"{float(mib) / 1024:.1f}" if mib.replace(".", "").isdigit() else "?"
