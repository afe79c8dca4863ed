"""Hides the accounts of this machine from a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def hide_accounts(monkeypatch: Any, folder: Path) -> None:
    """Hide the trackers' keys, servers and settings, and move the home folder to `folder`/home."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_")) or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
