"""How far a run has come: what is put into its checkpoints as it goes, and taken from the newest one where it goes on.

A checkpoint is the weights that are trained, the optimizer's moments, and a `TrainState` with what else the next step depends on.
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
from fxtune.optim.optimizer import Optimizer, moment_bytes
from fxtune.techniques.precision import LossScale
from fxtune.training.step_monitor import StepMonitor


class Progress:
    """Of the run in `folder`. `plain`: its whole config as plain data. `note` gets one-line messages for the user.

    `state` is the run's own: the loop keeps it up to date. What of it belongs to the optimizer, the loss scale and the numbers
    is asked of them when it is saved. A context: leaving it waits for the save in flight.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: CheckpointConfig,
        plain: dict[str, Any],
        model: nn.Module,
        optimizer: Optimizer,
        loss_scale: LossScale,
        numbers: StepMonitor,
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.note = folder, note
        self.model, self.optimizer, self.loss_scale, self.numbers = model, optimizer, loss_scale, numbers
        self.checkpoints = Checkpoints(folder.path / CHECKPOINTS, config, config_digest(plain), note)
        self.state = TrainState()
        self.saved = 0
        """The last step that was given to be saved."""
        self._rows: dict[str, int] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.checkpoints.__exit__(*error)

    def load(self, fingerprint: str) -> TrainState:
        """The newest checkpoint's state, with its weights and moments in place; a new state where there is none.

        `fingerprint`: of the data plan. Raises ConfigError where the checkpoint is of other data, StorageError where there are
        checkpoints and none of them is whole.
        """
        saved = self.checkpoints.load_newest(self.weights()) if self.folder.resumed else None
        if saved is None:
            if self.folder.resumed:
                self.note(f"{self.folder.path} was broken off before its first checkpoint, so it starts again.")
            self.state = TrainState(data_fingerprint=fingerprint)
            return self.state
        if saved.state.data_fingerprint != fingerprint:
            raise ConfigError(
                f"The data changed since {self.folder.path} was started (its rows, the tokenizer or the chat "
                "template), so its run cannot go on where it stopped. Bring them back as they were, or start "
                f"anew with {HOW_TO_START_ANEW}."
            )
        with torch.no_grad():
            for name, parameter in self.weights().items():
                parameter.copy_(saved.weights[name])
        try:
            self.optimizer.load(saved.moments, saved.state.optimizer)
            self.loss_scale.load(saved.state.loss_scale)
            self.numbers.load(saved.state.step, saved.state.numbers)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise StorageError(
                f"{saved.path}: its state is not as fxtune writes it ({type(error).__name__}: {error}). Remove "
                "this checkpoint, and the run goes on from the one before."
            ) from error
        self.note(
            f"Going on with {self.folder.path} after step {saved.state.step} ({HOW_TO_START_ANEW}, starts anew)."
        )
        self.state, self.saved, self._rows = saved.state, saved.state.step, dict(saved.state.rows)
        return self.state

    def save(self) -> None:
        """Copy what a checkpoint holds; it is written while the next steps are taken."""
        since = time.perf_counter()
        state = self.state
        moments, state.optimizer = self.optimizer.state()
        state.loss_scale, state.numbers = self.loss_scale.state(), self.numbers.state()
        self.checkpoints.save(state, self.weights(), moments, since)
        self.saved, self._rows = state.step, dict(state.rows)

    def secure(self) -> None:
        """Return when all that the run has come to is on the disk; a save that failed is tried once more. Raises StorageError."""
        failed = self.checkpoints.settle()
        if self.state.step and (failed or self.state.step > self.saved or self.state.rows != self._rows):
            self.save()
        self.checkpoints.wait()

    def check_room(self, steps: int, optimizer: str, whole: bool) -> None:
        """Refuse a run of `steps` steps whose disk cannot take one checkpoint and what is exported: the `whole` model, or what is
        trained alone. `optimizer`: its name in the recipe. Raises StorageError.
        """
        if self.state.step < steps:
            trained = list(self.weights().values())
            exported = list(self.model.parameters()) if whole else trained
            self.checkpoints.check_room(
                sum(weight.nbytes for weight in trained) + moment_bytes(optimizer, self.optimizer.parts),
                sum(weight.nbytes for weight in exported),
            )

    def weights(self) -> dict[str, torch.Tensor]:
        """Those that are trained."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
