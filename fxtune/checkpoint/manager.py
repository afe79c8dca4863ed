"""The checkpoints of a run: complete or absent, written in the background, as safetensors and JSON, never pickle.

A checkpoint holds the trained weights, the optimizer's moments and the `TrainState`. A batch is a function of (data
plan, seed, step), and the step seeds dropout, so no random states and no positions in the data are saved.

The training loop stops only while the tensors are copied (host_copy.py). A thread writes them and removes old
checkpoints; at most one save is in flight. A failed save is reported once and the next one tries again. Only a run
whose last save failed ends with an error (`wait`).

With several ranks, each part is written by the first rank that holds it, all parts at the same time, in two phases:
rank 0 makes the folder and room for all parts, each rank writes its own and sends its digests, and only then rank 0
writes the manifest and renames the folder. The threads of the ranks agree on every phase over a process group of their
own (distributed/background.py). So a save succeeds or fails on all ranks, and a rank that dies in between leaves no
checkpoint.

The newest usable checkpoint is loaded, and each newer one is reported with the reason. When the run then saves, a
newer one is removed if its bytes are known to be lost. Otherwise it is set aside: another version of fxtune, or the
same one once the disk works again, may be able to read it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar

import torch

from fxtune.checkpoint import folder as stored
from fxtune.checkpoint.folder import MANIFEST, MOMENTS, STATE, WEIGHTS, Part, damage_of, step_of
from fxtune.checkpoint.host_copy import HostCopy
from fxtune.checkpoint.run_folder import HOW_TO_START_ANEW
from fxtune.distributed.background import BackgroundGroup
from fxtune.distributed.chunks import Coordinates, chunk_of, coordinates, is_divided, local
from fxtune.errors import StorageError
from fxtune.system.atomic_files import read_json
from fxtune.system.oom import out_of_memory_reason

Result = TypeVar("Result")

SPARE = 2**20
"""Bytes that a save leaves free on the disk, for metrics and other small files."""
SHOWN_WITHIN = 15.0
"""Seconds within which a rank must see what rank 0 has made on a network disk."""


@dataclass
class CheckpointConfig:
    every: int = field(default=100, metadata={"min": 0})
    """Save every so many steps; 0: only at the end. A killed run loses at most that many steps."""
    keep: int = field(default=2, metadata={"min": 1})
    """How many of the newest checkpoints stay; fewer where the disk has no room for the next one."""
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
    """The step of the best evaluation: the lowest loss, or what train.stop.metric says."""
    best_match: Optional[float] = None
    """The share of exact answers at best_step, if train.stop.metric judges by it."""
    branch_step: Optional[int] = None
    """The checkpoint from which a decay of the learning rate begins or has begun. It is kept: with it the run can be
    extended."""
    schedule: dict[str, int] = field(default_factory=dict)
    """The lengths of optim/schedule.py's Schedule: where the run ends, and what was decided about it."""
    ending: dict[str, Any] = field(default_factory=dict)
    """The state of training/run_end.py: how long no evaluation has been better, and why the run ends early."""
    clock: dict[str, float] = field(default_factory=dict)
    """The state of training/run_clock.py: seconds of the run so far."""
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
    """On the CPU; of a sharded weight, the part of this rank."""
    moments: dict[str, torch.Tensor]
    """On the CPU; of a moment that is sharded like its weight, the part of this rank."""


class Checkpoints:
    """The checkpoints of one run, in `folder`. As a context manager it waits at the end for the save in flight.

    `recipe`: run_folder.config_digest() of the run; checkpoints with another digest are not loaded. `note` gets
    one-line messages for the user, always in the thread that calls this object. `ranks`: those of the run, which call
    each method together; None means this process alone.
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
        self._save: _Save | None = None
        """The save in flight."""
        self._timings: dict[str, float] = {}
        self._saved_state: dict[str, Any] = {}
        """The latest state on the disk, without its clock, which never stands still. save() skips an equal state: a
        signal may come right after a save."""
        self._step: int | None = None
        """The step that was loaded or saved last. Later checkpoints in the folder are not of this run's history."""
        self._noted_memory = False
        self._holders: dict[Coordinates, int] = {(): 0}
        """The first rank that holds each part of sharded tensors; rank 0 holds all others."""
        self._writers = [0]
        """The ranks that write."""

    @property
    def sharded(self) -> bool:
        """Whether several ranks write."""
        return len(self._writers) > 1

    def prepare(self, weights: Mapping[str, torch.Tensor], all_write: bool = False) -> None:
        """Find out which rank writes which part of `weights` and of their moments. Raises StorageError on all ranks if
        several write and one of them does not see the folder of rank 0.

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
        seen = self.ranks.gather((_appears(probe, token), self.ranks.name), doing)
        if self.ranks.main:
            probe.unlink(missing_ok=True)
        if blind := [rank for found, rank in seen if not found]:
            raise StorageError(_not_shared(probe.parent, blind[0]))

    def save(
        self,
        state: TrainState,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor],
        since: float | None = None,
        alone: bool = False,
    ) -> None:
        """Copy a checkpoint and write it in the background. Waits for the previous save first.

        Weights and moments may change afterwards; on a GPU only by work issued after wait_for_copy(). `since`: the
        time.perf_counter() at which the loop stopped for this save. `alone`: only rank 0, which holds everything,
        calls this. Does not raise disk errors: see `failure`, `wait`.
        """
        since = time.perf_counter() if since is None else since
        text = json.dumps(asdict(state), indent=1)  # not in the thread, because the loop changes the state
        self._end_save()
        unchanged = _without_clock(text) == self._saved_state
        if unchanged and self.ranks.size == 1:
            return
        self.failure, self._saved_state = None, {}
        tensors = {(WEIGHTS, name): tensor for name, tensor in weights.items()}
        tensors |= {(MOMENTS, name): tensor for name, tensor in moments.items()}
        part, tensors = self._own_part(tensors)
        copies = self._host_copy.take(tensors, self.ranks.on_this_host if self.sharded else 1)
        save = self._save = _Save(self, state, text, part, tensors if copies is None else copies)
        save.unchanged, save.waits = unchanged, copies is None
        if alone:
            save.ranks = BackgroundGroup()
        if copies is not None:
            save.start_or_run()
            save.stall = time.perf_counter() - since
            return
        self._note_memory("This host's", save.size)
        save.run()
        save.stall = time.perf_counter() - since
        self._end_save()

    def _own_part(
        self, tensors: Mapping[tuple[str, str], torch.Tensor]
    ) -> tuple[Part, dict[tuple[str, str], torch.Tensor]]:
        """(where this rank's parts lie in the whole tensors, the parts that this rank writes)."""
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
        """The rank that writes its part of a tensor."""
        owner = stored.rank_of(name)
        return self._holders[coordinates(tensor)] if owner is None or not self.sharded else owner

    def _note_memory(self, whose: str, size: int) -> None:
        if not self._noted_memory:
            self._noted_memory = True
            self.note(
                f"{whose} memory has no room for a copy of what a checkpoint holds ({_readable(size)}), so training "
                "stands still while one is written."
            )

    def check_room(self, size: int, exported: int, saves: int, evaluates: bool) -> None:
        """Raise StorageError if the disk cannot take an export of `exported` bytes and the checkpoints of a run.

        A checkpoint has `size` bytes. A run that saves several needs room for two, because a new checkpoint is
        complete before an older one is removed. `saves`: checkpoints that the run writes. `evaluates`: whether the run
        keeps the best checkpoint, too.
        Warns if fewer checkpoints fit than are kept.
        """

        def check() -> None:
            if self.ranks.main:
                self._check_room(size, exported, saves, evaluates and self.config.keep_best)

        self.ranks.together(check, "looking at the disk", StorageError)

    def _check_room(self, size: int, exported: int, saves: int, best: bool) -> None:
        try:
            free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.exists())).free
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
        fit, present = (free - exported) // max(size, 1) + min(own, 1), min(own, 1)
        if fit < min(present + saves + best, 2):
            only = "checkpoint.every=0" + " checkpoint.keep_best=false" * best
            raise StorageError(
                f"The disk of {self.folder} has room for one checkpoint, and this run saves several. A new checkpoint "
                f"is complete before an older one is removed: {need}, and {_readable(free)} are free. Free "
                f"{_readable(2 * size + exported - free)} more there, set run.dir to another disk, or save only at "
                f"the end: {only}."
            )
        wanted, least = min(self.config.keep + 1, present + saves) + best, 2 + best
        if fit < wanted:
            kept = f"checkpoint.keep={self.config.keep}{', the best' * best}"
            self.note(
                f"The disk of {self.folder} has room for {fit} checkpoints: {need}. {kept} and the one being written "
                f"would be {wanted}, so where there is no room the oldest go first."
                + " Saves fail while the best is not the newest: both stay until the next is complete."
                * (fit < least)
            )

    def wait_for_copy(self) -> None:
        """Call before weights or moments change: makes later work on a GPU wait, on the device, for the copy."""
        self._host_copy.wait_on_device()

    def save_timings(self) -> dict[str, float]:
        """Timings of the saves that ended since the last call; reports a failed save.

        `checkpoint/stall_seconds`: how long the loop stopped, for all of them. `checkpoint/seconds`: until the last
        one was on the disk.
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
            self._saved_state = _without_clock(save.text)
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
        """The newest usable checkpoint; None if there is no checkpoint. `model`: the weights that it must fit, as they
        are sharded here; None: whatever it holds, whole.

        Raises StorageError if there are checkpoints and none is usable, or if the ranks see different ones.
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
        """The paths of all checkpoints, newest first. Raises StorageError unless all ranks see the same."""
        doing = "comparing checkpoints"
        self.ranks.gather(None, doing)  # rank 0 has removed what it removes
        found = [step_of(path) for path in reversed(stored.paths(self.folder))]
        seen = self.ranks.gather(found, doing)
        if any(steps != seen[0] for steps in seen):
            newest = [next(iter(steps), 0) for steps in seen]
            raise StorageError(
                f"The ranks found different newest checkpoints in {self.folder}: of steps {newest}, in the order of "
                "the ranks. Every host must see the same folder: put run.dir on a shared disk."
            )
        return [self.folder / f"step-{step:08d}" for step in found]

    def read(self, step: int, model: Mapping[str, torch.Tensor], with_moments: bool = False) -> Checkpoint:
        """The checkpoint of `step`. Raises ValueError, on all ranks, if it is not usable."""
        self._end_save(report=False)  # wait() raises it
        return read(self.folder / f"step-{step:08d}", model, self.recipe, with_moments, self.ranks)

    def make_room(self, size: int, best_step: int | None, branch_step: int | None = None) -> None:
        """Remove the oldest checkpoints if `size` bytes would not fit on their disk; never the best, the newest, and
        that of `branch_step`.
        """
        self._end_save(report=False)
        paths = stored.paths(self.folder)
        kept = kept_of(paths, best_step if self.config.keep_best else None, branch_step)
        with contextlib.suppress(OSError):  # whatever needs the room says what is wrong
            make_room(self.folder, paths, kept, size + SPARE)


class _Save(threading.Thread):
    """One save. It is a daemon thread, so a process can exit at once: the unfinished folder has a name with a dot."""

    def __init__(
        self,
        owner: Checkpoints,
        state: TrainState,
        text: str,
        part: Part,
        tensors: Mapping[tuple[str, str], torch.Tensor],
    ) -> None:
        """`part`, `tensors`: what this rank writes."""
        super().__init__(name="checkpoint", daemon=True)
        self.folder, self.config, self.recipe, self.ranks = owner.folder, owner.config, owner.recipe, owner.ranks
        self.copied = owner._host_copy.wait_on_host
        self.step, self.own_step = state.step, owner._step
        best_step = state.best_step if self.config.keep_best else None
        self.kept = partial(kept_of, best_step=best_step, branch_step=state.branch_step)
        self.text, self.part, self.tensors = text, part, tensors
        self.size = self.total = sum(tensor.nbytes for tensor in tensors.values())
        """Bytes of the tensors of this rank, and of all."""
        self.unchanged = False
        """This state was already on the disk."""
        self.waits = False
        """Training waits for this save."""
        self.written = False
        """It is now on the disk."""
        self.waiting: str | None = None
        """A rank whose training waits for it."""
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
            if isinstance(error, OSError):  # all ranks have it
                self.ranks.gather(None, "removing an unfinished checkpoint")
            raise
        self.written = True
        if self.ranks.main:
            self._remove_old()

    def _together(self, work: Callable[[], Result], doing: str) -> list[Result]:
        """What work() returns on each rank. Raises OSError on all if the disk or the memory of one refuses."""

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
        make_room(self.folder, older, self.kept(older), self.total + len(self.text) + SPARE)
        self._set_newer_aside()
        return stored.stage(self.folder, self.step)

    def _write_part(self, staging: Path) -> dict[str, dict[str, Any]]:
        self.copied()
        if not self.tensors and not self.ranks.main and self.part.count == 1:
            return {}
        if not self.ranks.main and not _appears(staging):
            raise OSError(_not_shared(self.folder, self.ranks.name))
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
        lost = paths[len(own) :]  # of later steps: all others were set aside
        try:
            for path in [*removable(own, self.config.keep, self.kept(own)), *lost]:
                stored.remove(path)
        except OSError as error:  # the new checkpoint is complete, so the save succeeded
            self.notes.append(f"An old checkpoint in {self.folder} cannot be removed: {error}. Remove it by hand.")

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


def read(
    path: Path,
    model: Mapping[str, torch.Tensor] | None,
    recipe: str | None = None,
    with_moments: bool = True,
    ranks: BackgroundGroup | None = None,
) -> Checkpoint:
    """Verify and read the checkpoint at `path`. Raises ValueError with the reason if it is not usable.

    `model`: the weights that it must fit. `recipe`: the digest that it must have; None: any. `ranks`: those that read
    it together; each hashes some of the files, and all raise the reason that one found.
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
    """read() of a checkpoint whose files are intact."""
    if recipe is not None and read_json(path / MANIFEST)["recipe"] != recipe:
        raise ValueError("it is of a run of another recipe")
    state = _parse_state(read_json(path / STATE))
    if state.step != step_of(path):
        raise ValueError(f"it is of step {state.step}, under another's name")
    with stored.open_tensors(path, WEIGHTS) as weights, stored.open_tensors(path, MOMENTS) as moments:
        if not any_model and (reason := next(stored.misfits(weights, moments, model), None)):
            raise ValueError(reason)
        sharded = {name: weight for name, weight in model.items() if is_divided(weight)}
        parts = {name: weights.read(name, chunk_of(sharded[name]) if name in sharded else None) for name in weights}
        found: dict[str, torch.Tensor] = {}
        for full, moment in moments.items() if with_moments else ():
            weight = sharded.get(full.rpartition("/")[0])
            part = chunk_of(weight) if weight is not None and moment.shape == weight.shape else None
            found[full] = moments.read(full, part)
    return Checkpoint(path, state, parts, found)


def best_of(paths: Sequence[Path], best_step: int | None) -> Path | None:
    """The best checkpoint of `paths`, lowest step first; None without `best_step`, the step of the best evaluation.

    The save of that step may have failed, so the newest one that was the best when it was saved also counts.
    """
    if best_step is None:
        return None
    return next((path for path in reversed(paths) if step_of(path) == best_step or stored.was_best(path)), None)


def kept_of(paths: Sequence[Path], best_step: int | None, branch_step: int | None) -> set[Path]:
    """The `paths` that stay however old they are: best_of(), and the one of `branch_step`."""
    best = best_of(paths, best_step)
    return {path for path in paths if path == best or step_of(path) == branch_step}


def removable(paths: Sequence[Path], keep: int, kept: Collection[Path]) -> list[Path]:
    """The `paths` that are neither among the last `keep` nor in `kept`, in the same order."""
    return [path for path in paths[:-keep] if path not in kept]


def make_room(folder: Path, paths: list[Path], kept: Collection[Path], need: int) -> None:
    """Remove as many of the checkpoints `paths`, lowest step first, as `need` free bytes take; but neither those in
    `kept` nor the newest complete one. Raises OSError, and removes none, if that frees too little.
    """
    missing = need - shutil.disk_usage(folder).free
    if missing <= 0:
        return
    while paths and damage_of(paths[-1]) is not None:
        paths = paths[:-1]
    chosen: list[Path] = []
    for path in removable(paths, 1, kept):
        if missing > 0:
            chosen.append(path)
            missing -= sum(file.lstat().st_size for file in path.glob("*"))
    for path in chosen if missing <= 0 else ():
        stored.remove(path)
    if (free := shutil.disk_usage(folder).free) < need:
        raise OSError(f"it takes {_readable(need)}, and {_readable(free)} are free there")


def _appears(path: Path, text: str | None = None) -> bool:
    """Whether `path` is there, with this text. A network disk may show it some seconds after another host made it."""
    until = time.monotonic() + SHOWN_WITHIN
    while True:
        with contextlib.suppress(OSError):
            if path.exists() and (text is None or path.read_text() == text):
                return True
            next(path.parent.iterdir(), None)  # makes NFS look again
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def _not_shared(folder: Path, rank: str) -> str:
    return (
        f"{rank} does not see {folder} as rank 0 does, and each rank writes its part of a checkpoint there. Put "
        "run.dir on a disk that all hosts share."
    )


def _without_clock(state: str) -> dict[str, Any]:
    """A TrainState in JSON as plain data, without the seconds of the run."""
    return {name: value for name, value in json.loads(state).items() if name != "clock"}


def _readable(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _parse_state(values: dict[str, Any]) -> TrainState:
    """The TrainState with these values. Raises ValueError if one is unknown or of a wrong type."""
    defaults = asdict(TrainState())
    for name, value in values.items():
        if name not in defaults:
            raise ValueError(f"{STATE} has `{name}`, which this version of fxtune does not know")
        kind = type(defaults[name])
        if defaults[name] is not None and type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{STATE}: `{name}` is not of its type")
    for name in ("best_loss", "best_step", "best_match", "branch_step"):
        if not isinstance(values.get(name), (int, float, type(None))):
            raise ValueError(f"{STATE}: `{name}` is no number")
    for name, kinds in (("schedule", (int,)), ("clock", (int, float)), ("ending", (int, float, str))):
        if any(type(value) not in kinds for value in values.get(name, {}).values()):
            raise ValueError(f"{STATE}: `{name}` is not as fxtune writes it")
    if any(type(rows) is not int or rows < 1 for rows in values.get("rows", {}).values()):
        raise ValueError(f"{STATE}: `rows` are no numbers of rows")
    return TrainState(**values)
