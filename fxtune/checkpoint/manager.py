"""Checkpoints: whole or absent, written in the background, safetensors and JSON, never pickle.

A checkpoint holds the trained weights, the optimizer's moments and the `TrainState` (stored.py: its files). A batch is a function
of (data plan, seed, step), and dropout is seeded by the step: no random state and no position in the data has to be saved beyond
the integer `step`.

The loop stands still while the tensors are copied (snapshot.py). Hashing, writing, syncing and pruning are a thread's, and one
save is in flight at most. What goes wrong in it is told by the loop's thread, once for each failure, and training goes on: the
next save that is due tries again. Only a run whose last save failed ends with an error (`wait`).

Reading: a folder counts if each file of its manifest, and no other, is there as it was written, if it is of this run's recipe and
fits the model. Of those the newest is taken, and each newer one that does not count is told with the reason. When the run then
saves without it, it is removed if its bytes are known to be lost, and otherwise set aside: another version of fxtune, or the same
one on a disk that is well again, may read it.
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
from fxtune.checkpoint.folder import MANIFEST, MOMENTS, STATE, WEIGHTS, damaged, step_of
from fxtune.checkpoint.host_copy import HostCopy
from fxtune.checkpoint.run_folder import HOW_TO_START_ANEW
from fxtune.errors import StorageError
from fxtune.system.atomic_files import read_json
from fxtune.system.oom import out_of_memory_reason

SPARE = 2**20
"""Bytes that a save leaves free, for metrics and the like."""


@dataclass
class CheckpointConfig:
    every: int = field(default=100, metadata={"min": 0})
    """Save each time this many steps are done; 0: only at the end. What a killed run can lose."""
    keep: int = field(default=2, metadata={"min": 1})
    """How many of the newest checkpoints stay."""
    keep_best: bool = True
    """Also save at each evaluation that is the best so far, and keep that one however old it is, until a better one is saved."""


@dataclass
class TrainState:
    """All that a resumed run needs beside weights and moments."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Real tokens seen (padding not counted)."""
    supervised_tokens: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    """How many steps were skipped, and what the next step's loss is judged by (numbers.py)."""
    evaluation_due: bool = False
    """The evaluation that is due at this step has not been done: a signal broke it off."""
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
    rows: dict[str, int] = field(default_factory=dict)
    """Rows at once of `training`, `evaluation` and `questions`, where memory made them fewer than the recipe says."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """float16's loss scale and how many good steps it has had; empty where none is in play."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: TrainState
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]


class Checkpoints:
    """The checkpoints of one run, in `folder`. A context: leaving it waits for the save in flight.

    `recipe`: a digest of what the run learns by (see runfolder.identity); checkpoints of another are not taken. `note` gets
    one-line messages for the user, always in the thread that calls this object.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, recipe: str = "", note: Callable[[str], None] = print
    ) -> None:
        self.folder, self.config, self.recipe, self.note = folder, config, recipe, note
        self.failure: StorageError | None = None
        """Of the latest save that has ended; None: it is on the disk."""
        self._snapshot = HostCopy()
        self._saving: _Saving | None = None
        self._figures: dict[str, float] = {}
        self._whole = ""
        """The latest state that is on the disk: it need not be saved twice (the last step's, and then a signal's)."""
        self._own: int | None = None
        """The step that was loaded or saved last: what lies at later ones is none of what this run has come by. None: neither."""
        self._told = False

    def save(
        self,
        state: TrainState,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        since: float | None = None,
    ) -> None:
        """Copy all of it and have it written; returns when it is copied. Waits for the save before this one first.

        Weights and moments may change afterwards, on a GPU only by what is issued after `wait_for_copy`. `since` (time.perf_counter()):
        when the loop began to stand still for this. Raises nothing that a disk does: see `failure` and `wait`.
        """
        since = time.perf_counter() if since is None else since
        text = json.dumps(asdict(state), indent=1)  # now: the loop's state moves on
        self._collect(wait=True)
        if text == self._whole:
            return
        self.failure, self._whole = None, ""
        tensors = {
            **{f"{WEIGHTS}/{name}": tensor for name, tensor in weights.items()},
            **{f"{MOMENTS}/{name}": tensor for name, tensor in moments.items()},
        }
        taken = self._snapshot.take(tensors)
        saving = self._saving = _Saving(self, state, text, tensors if taken is None else taken)
        if taken is not None:
            saving.begin()
        else:
            if not self._told:
                self._told = True
                size = _shown(sum(tensor.nbytes for tensor in tensors.values()))
                self.note(
                    f"This host's memory has no room for a copy of what a checkpoint holds ({size}), so training "
                    "stands still while one is written."
                )
            saving.run()
        saving.stall = time.perf_counter() - since
        if taken is None:
            self._collect(wait=True)

    def check_room(self, size: int, exported: int) -> None:
        """Raise StorageError if the disk cannot take one checkpoint of `size` bytes beside what is `exported` at the end. Told is
        where it takes one, and not as many as are to be kept.
        """
        try:
            place = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            free = shutil.disk_usage(place).free
        except OSError as error:
            raise StorageError(
                f"The disk of {self.folder} cannot be looked at: {error}. Set run.dir to another disk."
            ) from error
        there = sum(step_of(path) <= self._own for path in stored.paths(self.folder)) if self._own is not None else 0
        free += max(there - 1, 0) * size - SPARE  # all but the newest may go
        what = f"a checkpoint takes {_shown(size)} and what is exported at the end {_shown(exported)}"
        if free < size + exported:
            raise StorageError(
                f"The disk of {self.folder} has no room for this run: {what}, and {_shown(max(free, 0))} are "
                "free. Free space there, or set run.dir to another disk."
            )
        fit, wanted = (free - exported) // max(size, 1) + min(there, 1), self.config.keep + 1 + self.config.keep_best
        if fit < wanted:
            self.note(
                f"The disk of {self.folder} has room for {fit} checkpoints: {what}. checkpoint.keep={self.config.keep} "
                f"and the one being written would be {wanted}, so where there is no room old ones go first."
            )

    def wait_for_copy(self) -> None:
        """To be called before weights or moments change: on a GPU that waits, on the device, until they are copied."""
        self._snapshot.wait_on_device()

    def save_timings(self) -> dict[str, float]:
        """Of the save that ended since this was last asked, if one did, seconds: `checkpoint/stall_seconds`, in which the loop
        stood still; `checkpoint/seconds`, until it was on the disk. Tells of one that failed."""
        self._collect(wait=False)
        figures, self._figures = self._figures, {}
        return figures

    def wait(self) -> None:
        """Wait until the latest save is on the disk. Raises StorageError if it could not be written."""
        self._collect(wait=True, last=True)
        if self.failure is not None:
            raise self.failure

    def settle(self) -> StorageError | None:
        """Wait for the save in flight. Returns what went wrong with the latest one."""
        self._collect(wait=True)
        return self.failure

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._collect(wait=True)

    def _collect(self, wait: bool, last: bool = False) -> None:
        """`last`: whoever calls tells of a failure."""
        saving = self._saving
        if saving is None or (saving.is_alive() and not wait):
            return
        if saving.ident is not None:
            saving.join()
        self._saving, self._own = None, saving.own
        for text in saving.notes:
            self.note(text)
        if saving.error is None:
            self._whole = saving.text
            self._figures = {"checkpoint/stall_seconds": saving.stall, "checkpoint/seconds": saving.seconds}
        elif isinstance(saving.error, (OSError, SafetensorError)) or out_of_memory_reason(saving.error):
            reason = f"The checkpoint of step {saving.step} could not be written to {self.folder}: {saving.error}."
            if not last:
                self.note(
                    f"{reason} Earlier ones are intact, and training goes on; the next one that is due is tried again."
                )
            self.failure = StorageError(
                f"{reason} Earlier checkpoints are intact. Free space there, or set run.dir to another disk."
            )
            self.failure.__cause__ = saving.error
        else:
            raise saving.error  # a bug of ours, or the device died

    def load_newest(self, model: Mapping[str, torch.Tensor] | None = None) -> Checkpoint | None:
        """The newest checkpoint that counts, or None where there is none at all; `model`: the weights that it must fit.

        Raises StorageError where there are some and none counts.
        """
        self._collect(wait=True)
        self._whole = ""  # whoever asks thinks that it may have been harmed since
        with contextlib.suppress(
            OSError
        ):  # a run that was killed in its last save makes none that would do it, and tell
            stored.sweep(self.folder)
        passed_over = []
        for path in reversed(stored.paths(self.folder)):
            try:
                found = self._read(path, model)
            except ValueError as reason:
                passed_over.append(f"{path.name}: {reason}")
                continue
            for text in passed_over:
                self.note(f"Checkpoint {text}. It is passed over for the newest whole one, {path.name}.")
            self._own = found.state.step
            return found
        if passed_over:
            raise StorageError(
                f"No whole checkpoint in {self.folder}:\n"
                + "\n".join(f"  {text}" for text in passed_over)
                + f"\nStart the run anew with {HOW_TO_START_ANEW}, or bring an intact copy of a checkpoint back."
            )
        return None

    def _read(self, path: Path, model: Mapping[str, torch.Tensor] | None) -> Checkpoint:
        """Raises ValueError that says why it does not count."""
        if reason := damaged(path):
            raise ValueError(reason)
        if read_json(path / MANIFEST)["recipe"] != self.recipe:
            raise ValueError("it is of a run of another recipe")
        state = _state(read_json(path / STATE))
        if state.step != step_of(path):
            raise ValueError(f"it is of step {state.step}, under another's name")
        if model is not None and (reason := next(stored.misfits(path, model), None)):
            raise ValueError(reason)
        try:
            return Checkpoint(path, state, load_file(path / WEIGHTS), load_file(path / MOMENTS))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"its tensors cannot be read: {error}") from error


class _Saving(threading.Thread):
    """One save. A daemon: somebody who leaves at once leaves it behind, and what it had not finished begins with a dot."""

    def __init__(self, owner: Checkpoints, state: TrainState, text: str, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.folder, self.config, self.recipe, self.snapshot = (
            owner.folder,
            owner.config,
            owner.recipe,
            owner._snapshot,
        )
        self.step, self.best_step, self.own = state.step, state.best_step, owner._own
        self.text, self.tensors = text, tensors
        self.error: BaseException | None = None
        self.notes: list[str] = []
        self.stall = self.seconds = 0.0

    def begin(self) -> None:
        """Write beside the loop; where this user may have no more threads, at once."""
        try:
            self.start()
        except RuntimeError:
            self.run()

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self.snapshot.arrived()
            self._write()
        except BaseException as error:  # noqa: BLE001  carried to the loop's thread, which knows what to do with each
            self.error = error
        self.tensors = {}
        self.seconds = time.perf_counter() - began

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        stored.sweep(self.folder)
        self._make_room()
        self._set_aside()
        weights, moments = (
            {
                name.removeprefix(f"{kind}/"): tensor
                for name, tensor in self.tensors.items()
                if name.startswith(f"{kind}/")
            }
            for kind in (WEIGHTS, MOMENTS)
        )
        stored.write(self.folder, self.step, self.recipe, self.text, weights, moments)
        try:
            for path in self._let_go(saved=True):
                stored.remove(path)
        except OSError as error:  # this one is whole, and that is what counts
            self.notes.append(f"An old checkpoint in {self.folder} cannot be removed: {error}. Remove it by hand.")

    def _make_room(self) -> None:
        """See that the disk has room. Where it has not, what this save lets go anyway goes first, if a newer one is whole."""
        needed = sum(tensor.nbytes for tensor in self.tensors.values()) + len(self.text) + SPARE
        for path in self._let_go(saved=False):
            if self._free() >= needed:
                return
            self._give_up(path)
        for path in self._let_go(saved=True):  # the best but for this one: last, and only if it is enough
            if self._free() < needed <= self._free() + sum(file.lstat().st_size for file in path.glob("*")):
                self._give_up(path)
        if self._free() < needed:
            raise OSError(f"it takes {_shown(needed)}, and {_shown(self._free())} are free there")

    def _free(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _give_up(self, path: Path) -> None:
        if any(
            damaged(newer) is None for newer in stored.paths(self.folder) if step_of(path) < step_of(newer) < self.step
        ):
            stored.remove(path)

    def _set_aside(self) -> None:
        """Set aside what the run did not go on from, at this step or later, but for what is lost: that is let go, or replaced."""
        for path in stored.paths(self.folder):
            ours = step_of(path) < self.step or (step_of(path) == self.step and self.own in (None, self.step))
            if not ours and not stored.lost(path):
                self.notes.append(
                    f"Checkpoint {path.name}, which this run does not go on from, is not known to be broken. It is "
                    f"kept as {stored.set_aside(path)}: remove that if you do not need it. To go on from it, give "
                    f"it its name back when this run has ended, in place of all from step {self.step} on."
                )
        self.own = self.step

    def _let_go(self, saved: bool) -> Iterator[Path]:
        """What the keeping rules remove before or after this step is `saved`, oldest first."""
        paths = stored.paths(self.folder)
        older = [path for path in paths if step_of(path) < self.step]
        kept = {*(older[1 - self.config.keep :] if self.config.keep > 1 else []), self._best(older, saved)}
        for path in paths:  # those beyond this step are lost, or about to be set aside
            if path not in kept and (step_of(path) < self.step or (saved and step_of(path) > self.step)):
                yield path

    def _best(self, older: list[Path], saved: bool) -> Path | None:
        """The best of the `older` ones: not always `best_step`, whose save may have failed. None where a better one is saved."""
        if not self.config.keep_best or self.best_step is None or (saved and self.best_step == self.step):
            return None
        return next(
            (path for path in reversed(older) if step_of(path) == self.best_step or stored.was_best(path)), None
        )


def _shown(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _state(values: dict[str, Any]) -> TrainState:
    """Raises ValueError for what is no TrainState."""
    plain = TrainState()
    unknown = sorted(set(values) - {entry.name for entry in fields(TrainState)})
    if unknown:
        raise ValueError(f"{STATE} has `{unknown[0]}`, which this version of fxtune does not know")
    for name, value in values.items():
        default = getattr(plain, name)
        if (
            default is not None
            and type(value) is not type(default)
            and not (type(default) is float and type(value) is int)
        ):
            raise ValueError(f"{STATE}: `{name}` is not of its type")
    for name in ("best_loss", "best_step"):
        if not isinstance(values.get(name), (int, float, type(None))):
            raise ValueError(f"{STATE}: `{name}` is no number")
    if any(type(rows) is not int or rows < 1 for rows in values.get("rows", {}).values()):
        raise ValueError(f"{STATE}: `rows` are no numbers of rows")
    return TrainState(**values)
