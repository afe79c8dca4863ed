"""One save of a checkpoint, in a thread.

With several ranks, the first rank that holds a part writes this part. All ranks write at the same time. Rank 0 makes
the folder and room for all parts. Each rank writes its parts and sends the digests. Only then does rank 0 write the
manifest and rename the folder. The threads of the ranks agree on every phase over a separate process group
(distributed/background.py). So a save succeeds or fails on all ranks, and a rank that dies in between leaves no
checkpoint."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.folder import MOMENTS, WEIGHTS, Part, damage_of, step_of
from fxtune.checkpoint.retention import Retention
from fxtune.distributed.background import BackgroundGroup
from fxtune.system.process.oom import out_of_memory_reason

Result = TypeVar("Result")
SHOWN_WITHIN = 15.0
"""Seconds within which a rank must see a file of rank 0 on a network disk."""


class Save(threading.Thread):
    """One save. The thread is a daemon, so the process can exit at once. An unfinished folder's name has a dot
    first."""

    def __init__(
        self,
        folder: Path,
        recipe: str,
        retention: Retention,
        ranks: BackgroundGroup,
        step: int,
        text: str,
        part: Part,
        tensors: Mapping[tuple[str, str], torch.Tensor],
        copied: Callable[[], None],
        own_step: int | None,
    ) -> None:
        """`text`: the TrainState as JSON. `part` and `tensors`: the part that this rank writes. `copied`: waits until
        `tensors` are on the host. `own_step`: the step that the run loaded or saved last."""
        super().__init__(name="checkpoint", daemon=True)
        self.folder, self.recipe, self.retention, self.ranks = folder, recipe, retention, ranks
        self.step, self.text, self.part, self.tensors = step, text, part, tensors
        self.copied, self.own_step = copied, own_step
        self.size = self.total = sum(tensor.nbytes for tensor in tensors.values())
        """Bytes of this rank's tensors, and of all ranks' tensors."""
        self.unchanged = False
        """Whether this state was already on the disk."""
        self.waits = False
        """Whether training waits for this save."""
        self.written = False
        """Whether the checkpoint is now on the disk."""
        self.waiting: str | None = None
        """The name of another rank whose training waits for this save."""
        self.error: BaseException | None = None
        self.notes: list[str] = []
        self.stall = self.seconds = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001  handled in the loop's thread
            self.error = error
        self.tensors = {}
        self.seconds = time.perf_counter() - began

    def _write(self) -> None:
        staging: Path | None = None
        try:
            mine = (self.size, self.unchanged, self.waits, self.ranks.name)
            saves = self.ranks.gather(mine, "beginning a checkpoint")
            if saves[0][1]:
                return
            self.total = sum(size for size, *_ in saves)
            self.waiting = next((name for _, _, waits, name in saves[1:] if waits), None)
            staging = self._together(self._begin, "making room for a checkpoint")[0]
            assert staging is not None
            entries = self._together(partial(self._write_part, staging), "writing the parts of a checkpoint")
            self._together(partial(self._complete, staging, entries), "completing a checkpoint")
        except BaseException as error:
            if self.ranks.main and staging is not None:
                shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, OSError):  # an OSError is raised on all ranks
                self.ranks.gather(None, "removing an unfinished checkpoint")
            raise
        self.written = True
        if self.ranks.main:
            self._remove_old()

    def _together(self, work: Callable[[], Result], doing: str) -> list[Result]:
        """Call work() on all ranks and return all results. If one rank lacks disk or memory, all raise OSError."""

        def named() -> Result:
            try:
                return work()
            except (OSError, RuntimeError, MemoryError) as error:
                if self.ranks.size == 1 or not (isinstance(error, OSError) or out_of_memory_reason(error)):
                    raise
                raise OSError(f"{self.ranks.name}: {error or type(error).__name__}") from error

        return self.ranks.together(named, doing)

    def _begin(self) -> Path | None:
        """Rank 0 makes room and creates the staging folder. Returns the folder on rank 0, None elsewhere."""
        if not self.ranks.main:
            self.own_step = self.step
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        stored.remove_leftovers(self.folder)
        older = [path for path in stored.paths(self.folder) if step_of(path) < self.step]
        self.retention.make_room(self.folder, older, self.total + len(self.text))
        self._set_newer_aside()
        return stored.stage(self.folder, self.step)

    def _write_part(self, staging: Path) -> dict[str, dict[str, Any]]:
        self.copied()
        if not self.tensors and not self.ranks.main and self.part.count == 1:
            return {}
        if not self.ranks.main and not appears(staging):
            raise OSError(not_shared(self.folder, self.ranks.name))
        weights, moments = (
            {name: tensor for (file, name), tensor in self.tensors.items() if file == kind}
            for kind in (WEIGHTS, MOMENTS)
        )
        return stored.write(staging, self.part, weights, moments)

    def _complete(self, staging: Path, entries: Sequence[dict[str, dict[str, Any]]]) -> None:
        if self.ranks.main:
            stored.complete(staging, self.recipe, self.text, entries)

    def _remove_old(self) -> None:
        paths = stored.paths(self.folder)
        own = [path for path in paths if step_of(path) <= self.step]
        lost = paths[len(own) :]  # later checkpoints: _set_newer_aside() has renamed all that are not lost
        try:
            for path in [*self.retention.removable(own), *lost]:
                stored.remove(path)
        except OSError as error:  # the new checkpoint is complete, so the save succeeded
            self.notes.append(f"An old checkpoint in {self.folder} cannot be removed: {error}. Remove it by hand.")

    def _set_newer_aside(self) -> None:
        """Set aside checkpoints of this step or later, unless they are lost or the run resumed from them."""
        for path in stored.paths(self.folder):
            own = step_of(path) < self.step or (step_of(path) == self.step and self.own_step in (None, self.step))
            if own or ((damage := damage_of(path)) and damage.lost):
                continue
            self.notes.append(
                f"Checkpoint {path.name}, which this run does not go on from, is not known to be broken. It is "
                f"kept as {stored.set_aside(path)}: remove that if you do not need it. To go on from it, give "
                f"it its name back when this run has ended, in place of all checkpoints from step {self.step} on."
            )
        self.own_step = self.step


def appears(path: Path, text: str | None = None) -> bool:
    """Whether `path` exists and has this `text`. A network disk may show it seconds after another host made it."""
    until = time.monotonic() + SHOWN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            if path.exists() and (text is None or path.read_text() == text):
                return True
            next(path.parent.iterdir(), None)  # makes NFS look again
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def not_shared(folder: Path, rank: str) -> str:
    return (
        f"{rank} does not see {folder} as rank 0 does, and each rank writes its part of a checkpoint there. Put "
        "run.dir on a disk that all hosts share."
    )
