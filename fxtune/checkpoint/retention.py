"""Which checkpoints of a run stay on the disk, and whether the disk has room for them.

The newest checkpoints stay, and also the best checkpoint and the checkpoint before a decay of the learning rate. A new
checkpoint is complete before an older one is removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.folder import damage_of, step_of
from fxtune.errors import StorageError
from fxtune.system.terminal.units import format_bytes

SPARE = 2**20
"""Bytes that a save leaves free on the disk, for metrics and other small files."""


@dataclass(frozen=True)
class Retention:
    """The last `newest` checkpoints stay, and also the checkpoints of `best_step`, the step of the best evaluation,
    and of `branch_step`. A step of None keeps no checkpoint."""

    newest: int
    best_step: int | None = None
    branch_step: int | None = None

    def kept(self, paths: Sequence[Path]) -> set[Path]:
        """The checkpoints that stay even if they are old. `paths`: all checkpoints, lowest step first."""
        best = None
        if self.best_step is not None:
            # The save of best_step may have failed, so the newest checkpoint that was the best when saved also counts.
            latest = reversed(paths)
            best = next((path for path in latest if step_of(path) == self.best_step or stored.was_best(path)), None)
        return {path for path in paths if path == best or step_of(path) == self.branch_step}

    def removable(self, paths: Sequence[Path]) -> list[Path]:
        """The checkpoints that do not stay. `paths`: all checkpoints, lowest step first."""
        kept = self.kept(paths)
        return [path for path in paths[: -self.newest] if path not in kept]

    def make_room(self, folder: Path, paths: Sequence[Path], need: int) -> None:
        """Remove old checkpoints until `need` bytes fit on the disk. `paths`: all checkpoints, lowest step first. The
        newest complete checkpoint and the checkpoints of kept() stay. If the others are too small, it removes none and
        raises OSError."""
        need += SPARE
        missing = need - shutil.disk_usage(folder).free
        if missing <= 0:
            return
        kept, complete = self.kept(paths), list(paths)
        while complete and damage_of(complete[-1]) is not None:
            complete.pop()
        chosen: list[Path] = []
        for path in complete[:-1]:
            if missing > 0 and path not in kept:
                chosen.append(path)
                missing -= sum(file.lstat().st_size for file in path.glob("*"))
        for path in chosen if missing <= 0 else ():
            stored.remove(path)
        if (free := shutil.disk_usage(folder).free) < need:
            raise OSError(f"it takes {format_bytes(need)}, and {format_bytes(free)} are free there")


def require_room(folder: Path, own: int, size: int, exported: int, saves: int, keep: int, best: bool) -> str:
    """Raise StorageError if the disk cannot take an export of `exported` bytes and the checkpoints of a run.

    `own`: how many checkpoints the run has in `folder`. `size`: bytes of a checkpoint. `saves`: how many checkpoints
    the run will write. `keep`: how many of the newest checkpoints stay. `best`: whether the best one stays, too.
    Returns a warning if the disk has no room for all checkpoints that should stay; otherwise "".
    """
    try:
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    except OSError as error:
        raise StorageError(
            f"The disk of {folder} cannot be looked at: {error}. Set run.dir to another disk."
        ) from error
    free += max(own - 1, 0) * size - SPARE  # all of the run's checkpoints but the newest may be removed
    need = f"a checkpoint takes {format_bytes(size)} and the export at the end {format_bytes(exported)}"
    if free < size + exported:
        raise StorageError(
            f"The disk of {folder} has no room for this run: {need}, and {format_bytes(max(free, 0))} are free. Free "
            "space there, or set run.dir to another disk."
        )
    fit, present = (free - exported) // max(size, 1) + min(own, 1), min(own, 1)
    if fit < min(present + saves + best, 2):
        only = "checkpoint.every=0" + " checkpoint.keep_best=false" * best
        raise StorageError(
            f"The disk of {folder} has room for one checkpoint, and this run saves several. A new checkpoint is "
            f"complete before an older one is removed: {need}, and {format_bytes(free)} are free. Free "
            f"{format_bytes(2 * size + exported - free)} more there, set run.dir to another disk, or save only at the "
            f"end: {only}."
        )
    most, least = min(keep + 1, present + saves) + best, 2 + best
    if fit >= most:
        return ""
    names = f"checkpoint.keep={keep}{', the best' * best}"
    return (
        f"The disk of {folder} has room for {fit} checkpoints: {need}. {names} and the one being written would be "
        f"{most}, so where there is no room the oldest go first."
        + " Saves fail while the best is not the newest: both stay until the next is complete."
        * (fit < least)
    )
