"""Checkpoints: whole or absent, safetensors and JSON, never pickle.

A checkpoint is a folder `step-00000120` with the trained weights, the optimizer's moments, the `TrainState` and a manifest of
sha256 sums. It is written under another name, synced to the disk and renamed, so that a kill leaves the one before it. A
batch is a function of (data plan, seed, step), and dropout is seeded by the step: no random state and no position in the
data has to be saved beyond the integer `step`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from fxtune.errors import StorageError

MANIFEST = "manifest.json"


@dataclass
class CheckpointConfig:
    every: int = 100
    """Save each time this many steps are done; 0: only at the end. What a killed run can lose."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Also save at each evaluation that is the best so far, and keep that one however old it is."""


@dataclass
class TrainState:
    """All that a resumed run needs beside weights and moments."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Real tokens seen (padding not counted)."""
    supervised_tokens: int = 0
    skipped_steps: int = 0
    """Steps whose loss or gradient was not finite."""
    best_loss: Optional[float] = None
    """Lowest evaluation loss so far."""
    best_step: Optional[int] = None
    figures: dict[str, Any] = field(default_factory=dict)
    """The last value of each metric."""
    wandb_id: Optional[str] = None
    data_fingerprint: str = ""
    """Of the data plan; a resumed run must have the same."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """What of the optimizer's state is not a tensor."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """float16's loss scale and how many good steps it has had; empty where none is in play."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: TrainState
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = folder, config

    def save(self, state: TrainState, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> Path:
        """Write one checkpoint and drop those that the keeping rules let go. Raises StorageError; older ones then stay."""
        final = self.folder / f"step-{state.step:08d}"
        staging = self.folder / f".staging-{final.name}"
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            save_file(_storable(weights), staging / "weights.safetensors")
            save_file(_storable(moments), staging / "optimizer.safetensors")
            (staging / "state.json").write_text(json.dumps(asdict(state), indent=1))
            manifest = {file.name: _sha256(file) for file in sorted(staging.iterdir())}
            (staging / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for file in staging.iterdir():
                sync(file)
            sync(staging)
            if final.exists():  # the same step again: the run went on from an older checkpoint
                shutil.rmtree(final)
            os.replace(staging, final)
            sync(self.folder)
            self._prune(state)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise StorageError(f"The checkpoint of step {state.step} could not be written to {self.folder}: {error}. "
                               "Earlier checkpoints are intact. Free space there, or set run.dir to another disk.") from error
        return final

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None. Raises StorageError where there are some and none is whole."""
        damage = []
        for path in sorted(self.folder.glob("step-*"), reverse=True):
            reason = damaged(path)
            if reason is None:
                state = TrainState(**json.loads((path / "state.json").read_text()))
                return Checkpoint(path, state, load_file(path / "weights.safetensors"), load_file(path / "optimizer.safetensors"))
            damage.append(f"  {path.name}: {reason}")
        if damage:
            raise StorageError(f"No whole checkpoint in {self.folder}:\n" + "\n".join(damage)
                               + "\nStart the run anew with run.resume=never, or bring an intact copy of a checkpoint back.")
        return None

    def _prune(self, state: TrainState) -> None:
        paths = sorted(self.folder.glob("step-*"))
        # Those beyond this step are damaged, else the run would have gone on from there.
        kept = [path.name for path in paths if path.name <= f"step-{state.step:08d}"][-self.config.keep:]
        if self.config.keep_best and state.best_step is not None:
            kept.append(f"step-{state.best_step:08d}")
        for path in paths:
            if path.name not in kept:
                shutil.rmtree(path)


def damaged(path: Path) -> str | None:
    """Why the checkpoint at `path` is not whole, or None: every file of the manifest is there with its sha256."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, digest in manifest.items():
            if _sha256(path / name) != digest:
                return f"{name} is not the file that was saved"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storable(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
