"""Trackers without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fxtune.tracking.tracker import Tracker, TrackingConfig, WandbConfig, WandbMode


def start(
    folder: Path,
    mode: WandbMode = WandbMode.disabled,
    notes: list[str] | None = None,
    config: dict[str, Any] | None = None,
    init_timeout: float = 300.0,
    tensorboard: bool = False,
    **more: Any,
) -> Tracker:
    """A tracker that writes to `folder` and appends its notes to `notes`. `more`: further arguments of Tracker."""
    wandb = WandbConfig(mode=mode, project="unit", group="g", tags=["a", "b"], init_timeout=init_timeout)
    notes = [] if notes is None else notes
    tracking = TrackingConfig(wandb=wandb, tensorboard=tensorboard)
    return Tracker(tracking, folder, "my run", config or {}, note=notes.append, **more)
