"""The state of a run: saved to checkpoints as the run goes on, and loaded from the newest one when it resumes.

A checkpoint holds the trained weights, the optimizer's moments, and a `TrainState` with everything else that the next
step needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxtune.checkpoint.manager import CheckpointConfig, Checkpoints, TrainState
from fxtune.checkpoint.run_folder import CHECKPOINTS, HOW_TO_START_ANEW, RunFolder, config_digest
from fxtune.errors import ConfigError, StorageError
from fxtune.optim.optimizer import moment_bytes
from fxtune.training.step import TrainStep
from fxtune.training.step_monitor import StepMonitor


class RunState:
    """The state of the run in `folder`. `recipe`: its whole config as plain data. `note` prints one-line messages for
    the user.

    The loop keeps `state` up to date. save() adds the state of the optimizer, the loss scale and the monitor. As a
    context manager it waits at the end for the save in progress.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: CheckpointConfig,
        recipe: dict[str, Any],
        model: nn.Module,
        train_step: TrainStep,
        monitor: StepMonitor,
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.note, self.model, self.monitor = folder, note, model, monitor
        self.optimizer, self.loss_scale = train_step.optimizer, train_step.loss_scale
        self.checkpoints = Checkpoints(folder.path / CHECKPOINTS, config, config_digest(recipe), note)
        self.state = TrainState()
        self.saved = 0
        """The last step for which a save was started."""
        self._saved_rows: dict[str, int] = {}

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpoints.__exit__(*error)

    def load(self, fingerprint: str) -> TrainState:
        """Load weights, moments and state of the newest checkpoint. Without a checkpoint, make a new state.

        `fingerprint`: of the data plan. Raises ConfigError if the checkpoint belongs to other data, StorageError if
        there are checkpoints and none of them is complete.
        """
        saved = self.checkpoints.load_newest(self.weights()) if self.folder.resumed else None
        if saved is None:
            if self.folder.resumed:
                self.note(f"{self.folder.path} was interrupted before its first checkpoint, so it starts again.")
            self.state = TrainState(data_fingerprint=fingerprint)
            return self.state
        if saved.state.data_fingerprint != fingerprint:
            raise ConfigError(
                f"The data changed since {self.folder.path} was started (its rows, the tokenizer or the chat "
                f"template), so its run cannot be resumed. Restore the data as it was, or start anew with "
                f"{HOW_TO_START_ANEW}."
            )
        with torch.no_grad():
            for name, parameter in self.weights().items():
                parameter.copy_(saved.weights[name])
        try:
            self.optimizer.load(saved.moments, saved.state.optimizer)
            self.loss_scale.load(saved.state.loss_scale)
            self.monitor.load(saved.state.step, saved.state.numbers)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise StorageError(
                f"{saved.path}: its state is not as fxtune writes it ({type(error).__name__}: {error}). Remove this "
                "checkpoint, and the run resumes from the one before."
            ) from error
        self.note(f"Resuming {self.folder.path} after step {saved.state.step} ({HOW_TO_START_ANEW}, starts anew).")
        self.state, self.saved, self._saved_rows = saved.state, saved.state.step, dict(saved.state.rows)
        return self.state

    def save(self) -> None:
        """Copy the state; the copy is written to the disk while the next steps run."""
        since = time.perf_counter()
        state = self.state
        moments, state.optimizer = self.optimizer.state()
        state.loss_scale, state.numbers = self.loss_scale.state(), self.monitor.state()
        self.checkpoints.save(state, self.weights(), moments, since)
        self.saved, self._saved_rows = state.step, dict(state.rows)

    def ensure_saved(self) -> None:
        """Save the current state unless it is saved, and wait for the disk. Retries once. Raises StorageError."""
        failed = self.checkpoints.settle()
        if self.state.step and (failed or self.state.step > self.saved or self.state.rows != self._saved_rows):
            self.save()
        self.checkpoints.wait()

    def check_room(self, steps: int, optimizer: str, export_all: bool) -> None:
        """Refuse a run of `steps` steps if the disk has no room for one checkpoint and the export: the whole model
        with `export_all`, otherwise the trained weights. `optimizer`: its name in the recipe. Raises StorageError.
        """
        if self.state.step < steps:
            trained = list(self.weights().values())
            exported = list(self.model.parameters()) if export_all else trained
            self.checkpoints.check_room(
                sum(weight.nbytes for weight in trained) + moment_bytes(optimizer, self.optimizer.parts),
                sum(weight.nbytes for weight in exported),
            )

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights by name."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
