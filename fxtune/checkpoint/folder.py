"""Writes a checkpoint as a folder, and verifies the folder before it is read.

    step-00000120/  weights.safetensors  optimizer.safetensors  state.json  manifest.json

Ranks that hold different parts of the tensors write two files each (parts.py). A checkpoint is written under a name
that begins with a dot, synced and then renamed. The next save removes unfinished checkpoints. A checkpoint that was
set aside (`aside-step-00000120`) is never removed by fxtune. No file that is read here contains code, and no name in a
file is used as a path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxtune.checkpoint.parts import Chunks, StoredTensor, StoredTensors, chunks_of, torch_record
from fxtune.distributed.chunks import Chunk
from fxtune.system.files import atomic_files

MANIFEST, STATE, WEIGHTS, MOMENTS = "manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors"
FORMAT, PARTS_FORMAT = 2, 3
"""Versions of the manifest: without parts, and with parts. Raise one if an older fxtune cannot read new files."""
_REPLACED = ".replaced-"
_NAME = re.compile(r"step-(\d{8,})")
_OF_RANK = re.compile(r"rank-(\d+)/(.*)", re.DOTALL)
Moment = TypeVar("Moment", torch.Tensor, StoredTensor)
_WEIGHT_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer", "z", "trained")
"""Moments that have the shape of their weight."""


def paths(folder: Path) -> list[Path]:
    """All paths in `folder` with a checkpoint's name, lowest step first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def was_best(path: Path) -> bool:
    """Whether the checkpoint at `path` was the best of its run when it was saved."""
    return bool(atomic_files.json_or_empty(path / STATE).get("best_step") == step_of(path))


@dataclass(frozen=True)
class Part:
    """The files of a checkpoint that a rank writes, and the places of their tensors in the whole tensors."""

    number: int = 1
    count: int = 1
    chunks: Mapping[str, Chunk] = field(default_factory=dict)
    """The place of this part in each whole tensor, by the tensor's name. Not read if there is only one part."""

    def file_name(self, kind: str) -> str:
        """The file's name: weights-1-of-2.safetensors for WEIGHTS, or `kind` itself if there is one part."""
        return kind if self.count == 1 else kind.replace(".", f"-{self.number}-of-{self.count}.")


def stage(folder: Path, step: int) -> Path:
    """Make the staging folder for the checkpoint of `step`. Raises OSError."""
    staging = folder / f".staging-step-{step:08d}"
    staging.mkdir()
    return staging


def write(
    staging: Path, part: Part, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, Any]]:
    """Write the two files of a part and return their entries in the manifest. Raises OSError."""
    entries = {}
    for kind, tensors in ((WEIGHTS, weights), (MOMENTS, moments)):
        name = part.file_name(kind)
        if part.count == 1:
            entries[name] = asdict(atomic_files.write_tensors(staging / name, tensors))
            continue
        chunks = {tensor: part.chunks[tensor] for tensor in sorted(tensors)}
        digest = atomic_files.write_tensors(staging / name, tensors, torch_record(chunks))
        entries[name] = {**asdict(digest), "tensors": chunks_of(chunks)}
    return entries


def complete(staging: Path, recipe: str, state: str, entries: Iterable[Mapping[str, Mapping[str, Any]]]) -> Path:
    """Make a checkpoint of the parts in `staging`, replacing an existing one, and return its path. Raises OSError.

    `recipe`: config_digest() of the run's config. `state`: JSON. `entries`: what write() returned on each rank; empty
    for a rank that wrote nothing.
    """
    final = staging.with_name(staging.name.removeprefix(".staging-"))
    parts = [entry for entry in entries if entry]
    files = {name: entry for part in parts for name, entry in part.items()}
    files[STATE] = asdict(atomic_files.write_text(staging / STATE, state))
    manifest = {"format": FORMAT if len(parts) == 1 else PARTS_FORMAT, "recipe": recipe, "files": files}
    atomic_files.write_text(staging / MANIFEST, json.dumps(manifest, indent=1 if len(parts) == 1 else None))
    atomic_files.sync(staging)
    atomic_files.replace_folder(staging, final, staging.with_name(f"{_REPLACED}{final.name}"))
    return final


def remove_leftovers(folder: Path) -> None:
    """Remove the folders of killed saves, and restore a checkpoint whose replacement is incomplete. Raises OSError."""
    for leftover in folder.glob(".*-step-*"):
        if leftover.name.startswith(_REPLACED):
            final = folder / leftover.name.removeprefix(_REPLACED)
            damage = None if final.exists() else damage_of(leftover)
            if not final.exists() and not (damage and damage.lost):
                leftover.rename(final)
                continue
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed checkpoint never has a checkpoint's name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".removed-{path.name}"))
    shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint. It stays on the disk but is no longer the run's. Returns the new path. Raises OSError."""
    aside, number = path.with_name(f"aside-{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"aside-{path.name}-{number}")
    return path.rename(aside)


def damage_of(path: Path, share: tuple[int, int] = (0, 1)) -> atomic_files.Damage | None:
    """How the files of the checkpoint at `path` differ from its manifest; None for an intact checkpoint.

    `share`: (n, m) reads each m-th file, beginning at file n. Other ranks read the other files.
    """
    if path.is_symlink():
        return atomic_files.Damage("it is a link")
    try:
        manifest = atomic_files.read_json(path / MANIFEST)
    except ValueError as error:
        return atomic_files.Damage(str(error), lost=isinstance(error.__cause__, (FileNotFoundError, ValueError)))
    try:
        if manifest.get("format") not in (FORMAT, PARTS_FORMAT):
            return atomic_files.Damage(f"{MANIFEST} is not of this version of fxtune")
        files = {
            name: atomic_files.FileDigest(file["sha256"], file["bytes"]) for name, file in manifest["files"].items()
        }
        tensor_files = {name for kind in (WEIGHTS, MOMENTS) for name in _tensor_files(manifest, kind)}
        if set(files) != tensor_files | {STATE} or not isinstance(manifest["recipe"], str):
            return atomic_files.Damage(f"{MANIFEST} does not describe a checkpoint")
        # File systems and desktops leave names with a leading dot (.nfs0001, .DS_Store).
        strange = {file.name for file in path.iterdir() if not file.name.startswith(".")} - {*files, MANIFEST}
    except (KeyError, TypeError, AttributeError):
        return atomic_files.Damage(f"{MANIFEST} does not describe a checkpoint")
    except OSError as error:
        return atomic_files.Damage(f"it cannot be read: {error.strerror or error}")
    if strange:
        return atomic_files.Damage(f"{min(strange)} was not saved with it")
    mine = list(files.items())[share[0] :: share[1]]
    return next(filter(None, (atomic_files.find_damage(path / name, file) for name, file in mine)), None)


def open_tensors(path: Path, kind: str) -> StoredTensors:
    """The tensors of a checkpoint that damage_of() found intact. `kind`: WEIGHTS or MOMENTS. Raises ValueError."""
    files = _tensor_files(atomic_files.read_json(path / MANIFEST), kind)
    return StoredTensors({path / name: chunks for name, chunks in files.items()})


def _tensor_files(manifest: Mapping[str, Any], kind: str) -> dict[str, Chunks | None]:
    """The chunks in each file of a checkpoint's WEIGHTS or MOMENTS, by file name; None for a file of whole tensors.
    The file names are fxtune's own, and not read from the manifest.

    Raises KeyError, TypeError or AttributeError if the manifest does not describe a checkpoint.
    """
    if manifest["format"] == FORMAT:
        return {kind: None}
    count = len(manifest["files"]) // 2
    found: dict[str, Chunks | None] = {}
    for name in [Part(number + 1, count).file_name(kind) for number in range(count)]:
        chunks = found[name] = manifest["files"][name]["tensors"]
        for chunk in chunks.values():
            numbers = [*chunk["shape"], *chunk["offset"]]
            if len(chunk["shape"]) != len(chunk["offset"]) or any(type(number) is not int for number in numbers):
                raise TypeError(f"{name}: a part has a chunk without a shape and a place")
    return found


def name_of_rank(rank: int, name: str) -> str:
    """The name in MOMENTS of a tensor that belongs to rank `rank` alone."""
    return f"rank-{rank}/{name}"


def rank_of(name: str) -> int | None:
    """The rank that stores this tensor; None if all ranks share the tensor."""
    found = _OF_RANK.fullmatch(name)
    return int(found[1]) if found else None


def of_all_ranks(moments: Mapping[str, Moment]) -> dict[str, Moment]:
    """The `moments` that all ranks share."""
    return {name: tensor for name, tensor in moments.items() if not _OF_RANK.fullmatch(name)}


def by_rank(moments: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """The tensors in `moments` that belong to single ranks, by rank and name."""
    ranks: dict[int, dict[str, torch.Tensor]] = {}
    for full, tensor in moments.items():
        if found := _OF_RANK.fullmatch(full):
            ranks.setdefault(int(found[1]), {})[found[2]] = tensor
    return dict(sorted(ranks.items()))


def refusals(
    weights: Mapping[str, StoredTensor], moments: Mapping[str, StoredTensor], model: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield each reason why the tensors of a checkpoint do not fit the trained weights `model`."""
    for name in sorted(weights.keys() ^ model.keys()):
        yield f"{name} is only in {WEIGHTS if name in weights else 'the model'}"
    for name in sorted(weights.keys() & model.keys()):
        stored, weight = weights[name], model[name]
        kind = atomic_files.DTYPES.get(weight.dtype, str(weight.dtype))
        if stored.shape != weight.shape:
            yield f"{name} is {list(stored.shape)} in {WEIGHTS}, and {list(weight.shape)} in the model"
        elif stored.dtype != kind:
            yield f"{name} is {stored.dtype} in {WEIGHTS}, and {kind} in the model"
    for full, moment in sorted(of_all_ranks(moments).items()):
        name, _, key = full.rpartition("/")
        if name not in model:
            yield f"{MOMENTS} has moments of {name}, which is not trained here"
        elif key in _WEIGHT_SHAPED and moment.shape != model[name].shape:
            yield f"{MOMENTS}: {full} does not have the shape of its weight"
