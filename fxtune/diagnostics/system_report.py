"""What can be found out about this machine without torch: GPUs, memory, disks, and the servers that training talks to.

`fxtune doctor` prints it. Nothing here fails: what cannot be asked has no line. No secret is given out, only whether there is
one.
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

from fxtune.system.host import cores, memory
from fxtune.system.redact import redact
from fxtune.tracking import wandb_client

GIB = 2**30
ANSWER = 3.0
"""Seconds that a server has to answer."""
LITTLE_DISK = 5 * GIB
FEW_FILES = 1024


class State(str, Enum):
    works = "works"
    told = "told"
    """Nothing to judge."""
    warning = "warning"
    missing = "missing"
    broken = "broken"


@dataclass(frozen=True)
class Finding:
    what: str
    seen: str
    state: State = State.told
    remedy: str = ""
    """The command, or what to do."""


def gpus() -> list[Finding]:
    """What the driver says, without torch. Empty where there is no driver."""
    asked = "index,name,memory.total,memory.free,driver_version,compute_cap"
    rows = _smi(f"--query-gpu={asked}")
    found = []
    for index, name, total, free, driver, capability in (row for row in rows if len(row) == 6):
        found.append(
            Finding(
                f"GPU {index}",
                f"{name}, compute capability {capability}, {_mib(free)} of {_mib(total)} GiB free; driver {driver}",
                State.works,
            )
        )
    others = [
        f"{pid} {name} ({_mib(used)} GiB)"
        for pid, name, used in (
            row for row in _smi("--query-compute-apps=pid,process_name,used_memory") if len(row) == 3
        )
    ]
    if others:
        found.append(
            Finding(
                "other processes",
                f"on the GPU: {', '.join(others)}",
                State.warning,
                "their memory is not yours; wait for them, or pick another GPU with CUDA_VISIBLE_DEVICES",
            )
        )
    return found


def host() -> Iterator[Finding]:
    """Cores, memory, open files."""
    total, available = memory()
    yield Finding(
        "CPU", f"{cores()} cores for this process, {available / GIB:.0f} of {total / GIB:.0f} GiB memory available"
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < FEW_FILES
    yield Finding(
        "open files",
        f"{soft:,} at most (ulimit -n)",
        State.warning if few else State.told,
        f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}" if few else "",
    )


def disks(runs: Optional[str] = None, tokens: Optional[str] = None) -> Iterator[Finding]:
    """Free space where runs, tokenised data and models are kept. `runs`, `tokens`: folders in place of the usual ones."""
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    home = Path(os.path.expanduser(os.environ.get("HF_HOME") or cache / "huggingface"))
    places = {
        "runs": Path(runs or "runs"),
        "token cache": Path(tokens or cache / "fxtune"),
        "hub cache": Path(os.environ.get("HF_HUB_CACHE") or home / "hub"),
    }
    for what, folder in places.items():
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        if not os.access(there, os.W_OK):
            yield Finding(
                what, f"{folder}: {there} cannot be written", State.broken, f"use another folder, or mend {there}"
            )
        else:
            little = free < LITTLE_DISK
            yield Finding(
                what,
                f"{folder}: {free / GIB:,.0f} GiB free",
                State.warning if little else State.told,
                "free some space: a checkpoint is written beside the one before it" if little else "",
            )


def hub() -> Finding:
    """Whether the Hugging Face hub answers, and whether there is a token."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    stored = Path(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or home / "token"))
    token = next(
        (f"a token in {name}" for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name)),
        f"a token in {stored}" if stored.is_file() else "no token (gated models need `hf auth login`)",
    )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Finding(
            "Hugging Face hub", f"offline (HF_HUB_OFFLINE): models and data come from the cache or a folder; {token}"
        )
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return _server(
        "Hugging Face hub", address, token, "check the network and HTTPS_PROXY, or give folders as model.path"
    )


def wandb() -> Finding:
    """Whether Weights & Biases answers, and whether there is a key."""
    key = "logged in" if wandb_client.api_key_at_hand() else "no API key (`wandb login`): runs are kept offline"
    mode = os.environ.get("WANDB_MODE", "").lower()
    if mode in ("offline", "disabled", "dryrun"):
        return Finding("W&B", f"{mode} (WANDB_MODE); {key}")
    return _server("W&B", wandb_client.server(), key, "runs go on offline; upload them later with `wandb sync`")


def _server(what: str, address: str, aside: str, remedy: str) -> Finding:
    shown = redact(address)
    try:
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=ANSWER):
            pass
    except urllib.error.HTTPError:
        pass  # it answers, that is enough
    except (OSError, ValueError) as error:
        reason = redact(str(getattr(error, "reason", error)))
        return Finding(what, f"{shown} cannot be reached ({reason}); {aside}", State.warning, remedy)
    return Finding(what, f"{shown} answers; {aside}", State.works)


def _smi(*arguments: str) -> list[list[str]]:
    """What nvidia-smi prints, as cells. Empty where it is not there or does not answer."""
    if not shutil.which("nvidia-smi"):
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=2 * ANSWER,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _mib(text: str) -> str:
    return f"{float(text) / 1024:.1f}" if text.replace(".", "").isdigit() else "?"
