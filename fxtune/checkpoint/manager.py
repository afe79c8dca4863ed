"""The checkpoints of a run: complete or absent, written in the background, as safetensors and JSON, never pickle.

A checkpoint holds the trained weights, the optimizer's moments and the `TrainState` (folder.py has its files). A batch
is a function of (data plan, seed, step), and the step seeds dropout. So only the integer `step` has to be saved, no
random states and no positions in the data.

The training loop stops only while the tensors are copied (host_copy.py). A thread hashes, writes, syncs and removes
old checkpoints; at most one save is in flight. The loop's thread reports each failure once, training goes on,
and the next save tries again. Only a run whose last save failed ends with an error (`wait`).

A checkpoint is usable if it has exactly the files of its manifest, each as it was written, and if it has this run's
recipe and fits the model. The newest usable one is loaded, and each newer one is reported with the reason. When the
run then saves, a newer one is removed if its bytes are known to be lost. Otherwise it is set aside: another version of
fxtune, or the same one once the disk works again, may be able to read it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.folder import MANIFEST, MOMENTS, STATE, WEIGHTS, damage_of, step_of
from fxtune.checkpoint.host_copy import HostCopy
from fxtune.checkpoint.run_folder import HOW_TO_START_ANEW
from fxtune.errors import StorageError
from fxtune.system.atomic_files import read_json
from fxtune.system.oom import out_of_memory_reason

SPARE = 2**20
"""Bytes that a save leaves free on the disk, for metrics and other small files."""


@dataclass
class CheckpointConfig:
    every: int = field(default=100, metadata={"min": 0})
    """Save every so many steps; 0: only at the end. A killed run loses at most that many steps."""
    keep: int = field(default=2, metadata={"min": 1})
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Also save at each evaluation that is the best so far, and keep that checkpoint until a better one is saved."""


@dataclass
class TrainState:
    """Everything that a resumed run needs besides weights and moments."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Real tokens seen, without padding."""
    supervised_tokens: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    """The state of training/step_monitor.py: counts of skipped steps, and the loss window of spike detection."""
    evaluation_due: bool = False
    """Whether a signal interrupted the evaluation due at this step."""
    best_loss: Optional[float] = None
    """Lowest evaluation loss so far."""
    best_step: Optional[int] = None
    figures: dict[str, Any] = field(default_factory=dict)
    """The last value of each metric."""
    wandb_id: Optional[str] = None
    data_fingerprint: str = ""
    """Fingerprint of the data plan. A resumed run must have the same."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The parts of the optimizer's state that are not tensors."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows per batch of `training`, `evaluation` and `questions`, if running out of memory reduced them
    (system/oom.py)."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """float16's loss scale and its count of good steps; empty for other dtypes."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: TrainState
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, in `folder`. As a context manager it waits at the end for the save in flight.

    `recipe`: run_folder.config_digest() of the run; checkpoints with another digest are not loaded. `note` gets
    one-line messages for the user, always in the thread that calls this object.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, recipe: str = "", note: Callable[[str], None] = print
    ) -> None:
        self.folder, self.config, self.recipe, self.note = folder, config, recipe, note
        self.failure: StorageError | None = None
        """The error of the latest finished save; None if that save is on the disk."""
        self._host_copy = HostCopy()
        self._save: _Save | None = None
        """The save in flight."""
        self._timings: dict[str, float] = {}
        self._saved_state = ""
        """The latest state on the disk as JSON. save() skips an equal state: a signal may come right after a save."""
        self._step: int | None = None
        """The step that was loaded or saved last. Later checkpoints in the folder are not of this run's history."""
        self._noted_memory = False

    def save(
        self,
        state: TrainState,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        since: float | None = None,
    ) -> None:
        """Copy a checkpoint and write it in the background. Waits for the previous save first.

        Weights and moments may change afterwards; on a GPU only by work issued after wait_for_copy(). `since`: the
        time.perf_counter() at which the loop stopped for this save. Does not raise disk errors: see `failure` and
        `wait`.
        """
        since = time.perf_counter() if since is None else since
        text = json.dumps(asdict(state), indent=1)  # not in the thread, because the loop changes the state
        self._end_save()
        if text == self._saved_state:
            return
        self.failure, self._saved_state = None, ""
        tensors = {(WEIGHTS, name): tensor for name, tensor in weights.items()}
        tensors |= {(MOMENTS, name): tensor for name, tensor in moments.items()}
        copies = self._host_copy.take(tensors)
        save = self._save = _Save(self, state, text, tensors if copies is None else copies)
        if copies is not None:
            save.start_or_run()
            save.stall = time.perf_counter() - since
            return
        if not self._noted_memory:
            self._noted_memory = True
            self.note(
                "This host's memory has no room for a copy of what a checkpoint holds "
                f"({_readable(sum(tensor.nbytes for tensor in tensors.values()))}), so training stands still while "
                "one is written."
            )
        save.run()
        save.stall = time.perf_counter() - since
        self._end_save()

    def check_room(self, size: int, exported: int) -> None:
        """Raise StorageError if the disk cannot take a checkpoint of `size` bytes and an export of `exported` bytes.

        Warns if fewer checkpoints fit than are kept.
        """
        try:
            existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            free = shutil.disk_usage(existing).free
        except OSError as error:
            raise StorageError(
                f"The disk of {self.folder} cannot be looked at: {error}. Set run.dir to another disk."
            ) from error
        own = sum(step_of(path) <= self._step for path in stored.paths(self.folder)) if self._step is not None else 0
        free += max(own - 1, 0) * size - SPARE  # all but the newest may be removed
        need = f"a checkpoint takes {_readable(size)} and what is exported at the end {_readable(exported)}"
        if free < size + exported:
            raise StorageError(
                f"The disk of {self.folder} has no room for this run: {need}, and {_readable(max(free, 0))} are "
                "free. Free space there, or set run.dir to another disk."
            )
        fit, wanted = (free - exported) // max(size, 1) + min(own, 1), self.config.keep + 1 + self.config.keep_best
        if fit < wanted:
            self.note(
                f"The disk of {self.folder} has room for {fit} checkpoints: {need}. "
                f"checkpoint.keep={self.config.keep} "
                f"and the one being written would be {wanted}, so where there is no room old ones go first."
            )

    def wait_for_copy(self) -> None:
        """Call before weights or moments change: makes later work on a GPU wait, on the device, for the copy."""
        self._host_copy.wait_on_device()

    def save_timings(self) -> dict[str, float]:
        """Timings of a save that ended since the last call; reports a failed save.

        `checkpoint/stall_seconds`: how long the loop stopped. `checkpoint/seconds`: until the save was on the disk.
        """
        if self._save and not self._save.is_alive():
            self._end_save()
        timings, self._timings = self._timings, {}
        return timings

    def wait(self) -> None:
        """Wait until the latest save is on the disk. Raises StorageError if it could not be written."""
        self._end_save(report=False)
        if self.failure is not None:
            raise self.failure

    def settle(self) -> StorageError | None:
        """Wait for the save in flight. Returns the error of the latest one."""
        self._end_save()
        return self.failure

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_save()

    def _end_save(self, report: bool = True) -> None:
        """Wait for the save in flight and take its result. `report`: note a failure."""
        save = self._save
        if save is None:
            return
        if save.ident is not None:
            save.join()
        self._save, self._step = None, save.own_step
        for text in save.notes:
            self.note(text)
        if save.error is None:
            self._saved_state = save.text
            self._timings = {"checkpoint/stall_seconds": save.stall, "checkpoint/seconds": save.seconds}
            return
        if not (isinstance(save.error, (OSError, SafetensorError)) or out_of_memory_reason(save.error)):
            raise save.error  # a bug in fxtune, or the device died
        reason = f"The checkpoint of step {save.step} could not be written to {self.folder}: {save.error}."
        if report:
            self.note(
                f"{reason} Earlier ones are intact, and training goes on; the next one that is due is tried again."
            )
        self.failure = StorageError(
            f"{reason} Earlier checkpoints are intact. Free space there, or set run.dir to another disk."
        )
        self.failure.__cause__ = save.error

    def load_newest(self, model: Mapping[str, torch.Tensor] | None = None) -> Checkpoint | None:
        """The newest usable checkpoint, or None if the folder has no checkpoints. `model`: the weights that it must
        fit.

        Raises StorageError if there are checkpoints and none is usable.
        """
        self._end_save()
        self._saved_state = ""  # the saved checkpoint may have been damaged since, so save an equal state again
        with contextlib.suppress(OSError):  # here too, because a run killed in its last save may never save again
            stored.remove_leftovers(self.folder)
        passed_over = []
        for path in reversed(stored.paths(self.folder)):
            try:
                found = self._read(path, model)
            except ValueError as reason:
                passed_over.append(f"{path.name}: {reason}")
                continue
            for text in passed_over:
                self.note(f"Checkpoint {text}. It is passed over for the newest complete one, {path.name}.")
            self._step = found.state.step
            return found
        if passed_over:
            raise StorageError(
                f"No complete checkpoint in {self.folder}:\n"
                + "\n".join(f"  {text}" for text in passed_over)
                + f"\nStart the run anew with {HOW_TO_START_ANEW}, or bring an intact copy of a checkpoint back."
            )
        return None

    def _read(self, path: Path, model: Mapping[str, torch.Tensor] | None) -> Checkpoint:
        """Verify and read the checkpoint at `path`. Raises ValueError with the reason if it is not usable."""
        if damage := damage_of(path):
            raise ValueError(damage.reason)
        if read_json(path / MANIFEST)["recipe"] != self.recipe:
            raise ValueError("it is of a run of another recipe")
        state = _parse_state(read_json(path / STATE))
        if state.step != step_of(path):
            raise ValueError(f"it is of step {state.step}, under another's name")
        if model is not None and (reason := next(stored.misfits(path, model), None)):
            raise ValueError(reason)
        try:
            return Checkpoint(path, state, load_file(path / WEIGHTS), load_file(path / MOMENTS))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"its tensors cannot be read: {error}") from error


class _Save(threading.Thread):
    """One save. It is a daemon thread, so a process can exit at once: the unfinished folder has a name with a dot."""

    def __init__(
        self, owner: Checkpoints, state: TrainState, text: str, tensors: Mapping[tuple[str, str], torch.Tensor]
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.folder, self.config, self.recipe = owner.folder, owner.config, owner.recipe
        self.copied = owner._host_copy.wait_on_host
        self.step, self.best_step, self.own_step = state.step, state.best_step, owner._step
        self.text, self.tensors = text, tensors
        self.error: BaseException | None = None
        self.notes: list[str] = []
        self.stall = self.seconds = 0.0

    def start_or_run(self) -> None:
        """Save in the background, or in this thread if the system allows no more threads."""
        try:
            self.start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self.copied()
            self._write()
        except BaseException as error:  # noqa: BLE001  handled in the loop's thread
            self.error = error
        self.tensors = {}
        self.seconds = time.perf_counter() - began

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stored.remove_leftovers(self.folder)
        self._make_room()
        self._set_newer_aside()
        weights, moments = (
            {name: tensor for (file, name), tensor in self.tensors.items() if file == kind}
            for kind in (WEIGHTS, MOMENTS)
        )
        stored.write(self.folder, self.step, self.recipe, self.text, weights, moments)
        try:
            for path in self._removable(saved=True):
                stored.remove(path)
        except OSError as error:  # the new checkpoint is complete, so the save succeeded
            self.notes.append(f"An old checkpoint in {self.folder} cannot be removed: {error}. Remove it by hand.")

    def _make_room(self) -> None:
        """Free disk space by removing old checkpoints early, each only if a newer one is undamaged.

        Raises OSError if that frees too little.
        """
        need = sum(tensor.nbytes for tensor in self.tensors.values()) + len(self.text) + SPARE
        for path in self._removable(saved=False):
            if self._free() >= need:
                return
            self._remove_if_newer(path)
        # The best checkpoint, which this save replaces, is removed last, and only if that frees enough.
        for path in self._removable(saved=True):
            if self._free() < need <= self._free() + sum(file.lstat().st_size for file in path.glob("*")):
                self._remove_if_newer(path)
        if self._free() < need:
            raise OSError(f"it takes {_readable(need)}, and {_readable(self._free())} are free there")

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _remove_if_newer(self, path: Path) -> None:
        """Remove the checkpoint at `path` if an undamaged one lies between it and this save."""
        newer = (other for other in stored.paths(self.folder) if step_of(path) < step_of(other) < self.step)
        if any(damage_of(other) is None for other in newer):
            stored.remove(path)

    def _set_newer_aside(self) -> None:
        """Set aside checkpoints of this step or later that the run did not resume from. Skips lost ones."""
        for path in stored.paths(self.folder):
            own = step_of(path) < self.step or (step_of(path) == self.step and self.own_step in (None, self.step))
            if own or ((damage := damage_of(path)) and damage.lost):
                continue
            self.notes.append(
                f"Checkpoint {path.name}, which this run does not go on from, is not known to be broken. It is "
                f"kept as {stored.set_aside(path)}: remove that if you do not need it. To go on from it, give "
                f"it its name back when this run has ended, in place of all from step {self.step} on."
            )
        self.own_step = self.step

    def _removable(self, saved: bool) -> Iterator[Path]:
        """Yield the checkpoints that `keep` and `keep_best` do not protect, oldest first.

        `saved`: whether the checkpoint of this step is already written.
        """
        paths = stored.paths(self.folder)
        older = [path for path in paths if step_of(path) < self.step]
        kept = {*(older[1 - self.config.keep :] if self.config.keep > 1 else []), self._best(older, saved)}
        for path in paths:  # checkpoints of later steps are lost, or about to be set aside
            if path not in kept and (step_of(path) < self.step or (saved and step_of(path) > self.step)):
                yield path

    def _best(self, older: list[Path], saved: bool) -> Path | None:
        """The best of the `older` checkpoints, or None if this save is better.

        The save of `best_step` may have failed, so the newest one that was the best when it was saved also counts.
        """
        if not self.config.keep_best or self.best_step is None or (saved and self.best_step == self.step):
            return None
        return next(
            (path for path in reversed(older) if step_of(path) == self.best_step or stored.was_best(path)), None
        )


def _readable(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _parse_state(values: dict[str, Any]) -> TrainState:
    """The TrainState with these values. Raises ValueError if one is unknown or of a wrong type."""
    defaults = {entry.name: getattr(TrainState(), entry.name) for entry in fields(TrainState)}
    if unknown := sorted(values.keys() - defaults.keys()):
        raise ValueError(f"{STATE} has `{unknown[0]}`, which this version of fxtune does not know")
    for name, value in values.items():
        kind = type(defaults[name])
        if defaults[name] is not None and type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{STATE}: `{name}` is not of its type")
    for name in ("best_loss", "best_step"):
        if not isinstance(values.get(name), (int, float, type(None))):
            raise ValueError(f"{STATE}: `{name}` is no number")
    if any(type(rows) is not int or rows < 1 for rows in values.get("rows", {}).values()):
        raise ValueError(f"{STATE}: `rows` are no numbers of rows")
    return TrainState(**values)
