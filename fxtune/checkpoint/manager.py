"""The checkpoints of a run: complete or absent, written in the background, as safetensors and JSON, never pickle.

A checkpoint is the trained weights, the optimizer's moments and the `TrainState`. A batch depends only on data plan,
seed and step, and the step seeds dropout. So no random states and no positions in the data are saved.

The training loop stops only while the tensors are copied (host_copy.py). A thread writes them (save.py) and removes
old checkpoints (retention.py); at most one save is in flight. A failed save is reported once, and the next save tries
again. Only a run whose last save failed ends with an error (`wait`).

The newest usable checkpoint is loaded, and each newer checkpoint is reported with the reason why it is not usable. At
the next save a newer checkpoint is removed if its bytes are known to be lost. Otherwise it is set aside, because
another version of fxtune, or the same version once the disk works again, may be able to read it.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.folder import MANIFEST, MOMENTS, STATE, WEIGHTS, Part, damage_of, step_of
from fxtune.checkpoint.host_copy import HostCopy
from fxtune.checkpoint.retention import Retention, require_room
from fxtune.checkpoint.run_folder import HOW_TO_START_ANEW
from fxtune.checkpoint.save import Save, appears, not_shared
from fxtune.checkpoint.train_state import TrainState, without_clock
from fxtune.distributed.background import BackgroundGroup
from fxtune.distributed.chunks import Coordinates, chunk_of, coordinates, is_divided, local
from fxtune.errors import StorageError
from fxtune.system.files.atomic_files import read_json
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.system.terminal.units import format_bytes


@dataclass
class CheckpointConfig:
    every: int = field(default=100, metadata={"min": 0})
    """Steps between two saves; 0: save only at the end. A killed run loses at most this many steps."""
    keep: int = field(default=2, metadata={"min": 1})
    """How many of the newest checkpoints stay. Fewer stay if the disk has no room for the next one."""
    keep_best: bool = True
    """Also save at each evaluation that is the best so far, and keep that checkpoint until a better one is saved."""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    state: TrainState
    weights: dict[str, torch.Tensor]
    """The weights, on the CPU. A sharded weight is only this rank's part."""
    moments: dict[str, torch.Tensor]
    """The moments, on the CPU. A moment that is sharded like its weight is only this rank's part."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, in `folder`. As a context manager it waits for the save in flight when the body
    ends.

    `recipe`: run_folder.config_digest() of the run; checkpoints with another digest are not loaded. `note` gets
    one-line messages for the user, always in the thread that calls this object. `ranks`: the ranks of the run, None
    for this process alone. All ranks call each method together.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        recipe: str = "",
        note: Callable[[str], None] = print,
        ranks: BackgroundGroup | None = None,
    ) -> None:
        self.folder, self.config, self.recipe, self.note = folder, config, recipe, note
        self.ranks = ranks or BackgroundGroup()
        self.failure: StorageError | None = None
        """The error of the latest finished save; None if that save is on the disk."""
        self._host_copy = HostCopy()
        self._save: Save | None = None
        """The save in flight."""
        self._timings: dict[str, float] = {}
        self._saved_state: dict[str, Any] = {}
        """The latest state on the disk, without the clock, which always differs. save() skips an equal state, because
        a signal may arrive right after a save."""
        self._step: int | None = None
        """The step that was loaded or saved last. This run did not write checkpoints of later steps in the folder."""
        self._noted_memory = False
        self._holders: dict[Coordinates, int] = {(): 0}
        """The first rank that holds each part of the sharded tensors. Rank 0 holds all other tensors."""
        self._writers = [0]
        """The ranks that write files."""

    @property
    def sharded(self) -> bool:
        return len(self._writers) > 1

    def prepare(self, weights: Mapping[str, torch.Tensor], all_write: bool = False) -> None:
        """Decide which rank writes which part of `weights` and of their moments. Raises StorageError on all ranks if
        several ranks write and a rank does not see the folder of rank 0.

        `all_write`: moments differ from rank to rank. Each rank names its moments by folder.name_of_rank().
        """
        mine = sorted({coordinates(weight) for weight in weights.values()})
        for rank, held in enumerate(self.ranks.gather(mine, "comparing the parts of sharded weights")):
            for part in held:
                self._holders.setdefault(part, rank)
        self._writers = list(range(self.ranks.size)) if all_write else sorted(set(self._holders.values()))
        if self.sharded:
            self._require_shared_folder()

    def _require_shared_folder(self) -> None:
        probe, doing = self.folder.parent / ".shared", "looking for the run folder of rank 0"

        def write() -> str:
            token = uuid.uuid4().hex
            if self.ranks.main:
                probe.write_text(token)
            return token

        try:
            token = self.ranks.together(write, doing)[0]
        except OSError as error:
            raise StorageError(
                f"{probe.parent} cannot be written to: {error}. Set run.dir to another folder."
            ) from error
        seen = self.ranks.gather((appears(probe, token), self.ranks.name), doing)
        if self.ranks.main:
            probe.unlink(missing_ok=True)
        if blind := [rank for found, rank in seen if not found]:
            raise StorageError(not_shared(probe.parent, blind[0]))

    def save(
        self,
        state: TrainState,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        since: float | None = None,
        alone: bool = False,
    ) -> None:
        """Wait for the previous save, copy a checkpoint, and write the copy in the background.

        After this call, tensors on the CPU may change at once. Before changing tensors on a GPU, call
        wait_for_copy(). `since`: the time.perf_counter() at which the loop stopped for this save. `alone`: only
        rank 0, which holds everything, calls this. Disk errors are not raised here; see `failure` and wait().
        """
        since = time.perf_counter() if since is None else since
        text = json.dumps(asdict(state), indent=1)  # written in this thread, because the loop changes the state
        self._end_save()
        unchanged = without_clock(text) == self._saved_state
        if unchanged and self.ranks.size == 1:
            return
        self.failure, self._saved_state = None, {}
        tensors = {(WEIGHTS, name): tensor for name, tensor in weights.items()}
        tensors |= {(MOMENTS, name): tensor for name, tensor in moments.items()}
        part, tensors = self._own_part(tensors)
        copies = self._host_copy.take(tensors, self.ranks.on_this_host if self.sharded else 1)
        save = self._save = Save(
            self.folder,
            self.recipe,
            self._retention(state.best_step, state.branch_step),
            BackgroundGroup() if alone else self.ranks,
            state.step,
            text,
            part,
            tensors if copies is None else copies,
            self._host_copy.wait_on_host,
            self._step,
        )
        save.unchanged, save.waits = unchanged, copies is None
        if copies is not None:
            try:
                save.start()
            except RuntimeError:  # the system allows no more threads
                save.run()
            save.stall = time.perf_counter() - since
            return
        self._note_memory("This host's", save.size)
        save.run()
        save.stall = time.perf_counter() - since
        self._end_save()

    def _retention(self, best_step: int | None, branch_step: int | None) -> Retention:
        return Retention(self.config.keep, best_step if self.config.keep_best else None, branch_step)

    def _own_part(
        self, tensors: Mapping[tuple[str, str], torch.Tensor]
    ) -> tuple[Part, dict[tuple[str, str], torch.Tensor]]:
        """The parts that this rank writes, as (their places in the whole tensors, their tensors)."""
        own = {
            (kind, name): tensor
            for (kind, name), tensor in tensors.items()
            if self._writer(name, tensor) == self.ranks.rank
        }
        writers = self._writers
        if len(writers) == 1 or self.ranks.rank not in writers:
            return Part(), {key: local(tensor) for key, tensor in own.items()}
        chunks = {(kind, name): chunk_of(tensor) for (kind, name), tensor in own.items()}
        part = Part(
            writers.index(self.ranks.rank) + 1, len(writers), {name: chunk for (_, name), chunk in chunks.items()}
        )
        return part, {key: local(tensor) for key, tensor in own.items() if not chunks[key].empty}

    def _writer(self, name: str, tensor: torch.Tensor) -> int:
        """The rank that writes this part of the tensor `name`."""
        owner = stored.rank_of(name)
        return self._holders[coordinates(tensor)] if owner is None or not self.sharded else owner

    def _note_memory(self, whose: str, size: int) -> None:
        if not self._noted_memory:
            self._noted_memory = True
            self.note(
                f"{whose} memory has no room for a copy of a checkpoint's tensors ({format_bytes(size)}), so training "
                "stands still while one is written."
            )

    def check_room(self, size: int, exported: int, saves: int, evaluates: bool) -> None:
        """Raise StorageError if the disk cannot take an export of `exported` bytes and the checkpoints of a run.

        A checkpoint has `size` bytes. A run that saves several checkpoints needs room for two, because a new
        checkpoint is complete before an older one is removed. `saves`: how many checkpoints the run writes.
        `evaluates`: whether the run can have a best checkpoint. Warns if fewer checkpoints fit than should stay.
        """

        def check() -> str:
            if not self.ranks.main:
                return ""
            step, keep, best = self._step, self.config.keep, evaluates and self.config.keep_best
            own = 0 if step is None else sum(step_of(path) <= step for path in stored.paths(self.folder))
            return require_room(self.folder, own, size, exported, saves, keep, best)

        if warning := self.ranks.together(check, "looking at the disk", StorageError)[0]:
            self.note(warning)

    def wait_for_copy(self) -> None:
        """Call this before weights or moments change. Later work on a GPU then waits for the copy; the host does
        not."""
        self._host_copy.wait_on_device()

    def save_timings(self) -> dict[str, float]:
        """Timings of the saves that ended since the last call. A failed save is reported here.

        `checkpoint/stall_seconds`: how long the loop stopped for these saves. `checkpoint/seconds`: how long the last
        of them took to be on the disk.
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
        """Wait for the save in flight. Returns the error of the latest save, or None."""
        self._end_save()
        return self.failure

    def __exit__(self, *_: object) -> None:
        self._end_save()

    def _end_save(self, report: bool = True) -> None:
        """Wait for the save in flight and take its result. `report`: note a failure."""
        save = self._save
        if save is None:
            return
        if save.ident is not None:
            with self.ranks.waiting("waiting for the checkpoint to be written"):
                save.join()
        self._save, self._step = None, save.own_step
        for text in save.notes:
            self.note(text)
        if save.waiting is not None:
            self._note_memory(f"{save.waiting}: the host's", save.total)
        if save.error is None:
            self._saved_state = without_clock(save.text)
            if save.written:
                stalled = self._timings.get("checkpoint/stall_seconds", 0.0) + save.stall
                self._timings = {"checkpoint/stall_seconds": stalled, "checkpoint/seconds": save.seconds}
            return
        if not (isinstance(save.error, OSError) or out_of_memory_reason(save.error)):
            raise save.error  # a bug in fxtune, or the device or another rank died
        reason = f"The checkpoint of step {save.step} could not be written to {self.folder}: {save.error}."
        if report:
            self.note(f"{reason} Earlier checkpoints are intact, and training goes on; the next due save tries again.")
        self.failure = StorageError(
            f"{reason} Earlier checkpoints are intact. Free space there, or set run.dir to another disk."
        )
        self.failure.__cause__ = save.error

    def load_newest(self, model: Mapping[str, torch.Tensor] | None = None) -> Checkpoint | None:
        """The newest usable checkpoint; None if there is no checkpoint. `model`: the weights that the checkpoint must
        fit, sharded as in this run. None: any weights fit, and all tensors are read whole.

        Raises StorageError if no existing checkpoint is usable, or if the ranks see different checkpoints.
        """
        self._end_save()
        self._saved_state = {}  # the saved checkpoint may have been damaged since, so save an equal state again
        with contextlib.suppress(OSError):  # here too, because a run killed in its last save may never save again
            if self.ranks.main:
                stored.remove_leftovers(self.folder)
        passed_over = []
        for path in self._common_paths():
            try:
                found = read(path, model, self.recipe, ranks=self.ranks)
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

    def _common_paths(self) -> list[Path]:
        """The paths of all checkpoints, newest first. Raises StorageError unless all ranks see the same paths."""
        doing = "comparing checkpoints"
        self.ranks.gather(None, doing)  # wait until rank 0 has removed leftovers
        own = [step_of(path) for path in reversed(stored.paths(self.folder))]
        seen = self.ranks.gather(own, doing)
        if any(steps != seen[0] for steps in seen):
            newest = [next(iter(steps), 0) for steps in seen]
            raise StorageError(
                f"The ranks found different newest checkpoints in {self.folder}: of steps {newest}, in the order of "
                "the ranks. Every host must see the same folder: put run.dir on a shared disk."
            )
        return [self.folder / f"step-{step:08d}" for step in own]

    def read(self, step: int, model: Mapping[str, torch.Tensor], with_moments: bool = False) -> Checkpoint:
        """The checkpoint of `step`. Raises ValueError, on all ranks, if it is not usable."""
        self._end_save(report=False)  # wait() raises a failed save
        return read(self.folder / f"step-{step:08d}", model, self.recipe, with_moments, self.ranks)

    def make_room(self, size: int, best_step: int | None, branch_step: int | None = None) -> None:
        """Remove the oldest checkpoints if `size` bytes would not fit on their disk. The newest checkpoint and the
        checkpoints of `best_step` and `branch_step` stay."""
        self._end_save(report=False)
        with contextlib.suppress(OSError):  # the caller's write reports a full disk
            paths = stored.paths(self.folder)
            self._retention(best_step, branch_step).make_room(self.folder, paths, size)


def read(
    path: Path,
    model: Mapping[str, torch.Tensor] | None,
    recipe: str | None = None,
    with_moments: bool = True,
    ranks: BackgroundGroup | None = None,
) -> Checkpoint:
    """Verify and read the checkpoint at `path`. Raises ValueError with the reason if it is not usable.

    `model`: the weights that the checkpoint must fit. `recipe`: the digest that it must have; None: any digest. Each
    rank hashes some of the files, and all ranks raise a reason that one rank found.
    """
    group = ranks or BackgroundGroup()

    def verify() -> None:
        if damage := damage_of(path, (group.rank, group.size)):
            raise ValueError(damage.reason)

    def load() -> Checkpoint:
        return _load(path, model or {}, model is None, recipe, with_moments)

    group.together(verify, f"verifying {path.name}", ValueError)
    found: list[Checkpoint] = []
    group.together(lambda: found.append(load()), f"reading {path.name}", ValueError)
    return found[0]


def _load(
    path: Path, model: Mapping[str, torch.Tensor], any_model: bool, recipe: str | None, with_moments: bool
) -> Checkpoint:
    """Read a checkpoint whose files are intact. `any_model`: whether it may have any weights."""
    if recipe is not None and read_json(path / MANIFEST)["recipe"] != recipe:
        raise ValueError("it is of a run of another recipe")
    state = TrainState.of(read_json(path / STATE))
    if state.step != step_of(path):
        raise ValueError(f"it is of step {state.step}, under another's name")
    with stored.open_tensors(path, WEIGHTS) as weights, stored.open_tensors(path, MOMENTS) as moments:
        if not any_model and (reason := next(stored.refusals(weights, moments, model), None)):
            raise ValueError(reason)
        sharded = {name: weight for name, weight in model.items() if is_divided(weight)}
        parts = {name: weights.read(name, chunk_of(sharded[name]) if name in sharded else None) for name in weights}
        found: dict[str, torch.Tensor] = {}
        for full, moment in moments.items() if with_moments else ():
            weight = sharded.get(full.rpartition("/")[0])
            part = chunk_of(weight) if weight is not None and moment.shape == weight.shape else None
            found[full] = moments.read(full, part)
    return Checkpoint(path, state, parts, found)
