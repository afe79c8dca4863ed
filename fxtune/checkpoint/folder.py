"""One checkpoint as a folder: how it is written, and how it is verified before it is read.

    step-00000120/  weights.safetensors  optimizer.safetensors  state.json  manifest.json

It is written under a name that begins with a dot, synced and renamed; the next save removes unfinished ones.
`aside-step-00000120` is no longer a checkpoint of the run; only the user removes it. No file read here contains code,
and no name in a file is used as a path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from fxtune.system.atomic_files import (
    DTYPES,
    Damage,
    FileDigest,
    find_damage,
    read_json,
    replace_folder,
    sync,
    write_tensors,
    write_text,
)

MANIFEST, STATE, WEIGHTS, MOMENTS = "manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors"
FORMAT = 2
"""Version of the manifest. Raise it when an older fxtune cannot read the new files."""
_REPLACED = ".replaced-"
_NAME = re.compile(r"step-(\d{8,})")
_OF_RANK = re.compile(r"rank-(\d+)/(.*)", re.DOTALL)
_WEIGHT_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Moments that have the shape of their weight."""


def paths(folder: Path) -> list[Path]:
    """All paths in `folder` with a checkpoint's name, lowest step first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def was_best(path: Path) -> bool:
    """Whether the checkpoint at `path` was the best of its run when it was saved."""
    try:
        return bool(read_json(path / STATE).get("best_step") == step_of(path))
    except ValueError:
        return False


def write(
    folder: Path,
    step: int,
    recipe: str,
    state: str,
    weights: Mapping[str, torch.Tensor],
    moments: Mapping[str, torch.Tensor],
) -> Path:
    """Write the checkpoint of `step`, replacing an existing one, and return its path. Raises OSError, and leaves no
    files. `recipe`: config_digest() of the run's config. `state`: JSON.
    """
    final = folder / f"step-{step:08d}"
    staging = folder / f".staging-{final.name}"
    try:
        staging.mkdir()
        files = {
            WEIGHTS: write_tensors(staging / WEIGHTS, weights),
            MOMENTS: write_tensors(staging / MOMENTS, moments),
            STATE: write_text(staging / STATE, state),
        }
        manifest = {"format": FORMAT, "recipe": recipe, "files": {name: asdict(file) for name, file in files.items()}}
        write_text(staging / MANIFEST, json.dumps(manifest, indent=1))
        sync(staging)
        replace_folder(staging, final, folder / f"{_REPLACED}{final.name}")
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
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
    """Remove a checkpoint. It is renamed first, so half a checkpoint never has a checkpoint's name."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".removed-{path.name}"))
    shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint: it stays on the disk, but is no longer one of the run. Returns its path. Raises OSError."""
    aside, number = path.with_name(f"aside-{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"aside-{path.name}-{number}")
    return path.rename(aside)


def damage_of(path: Path) -> Damage | None:
    """Why the checkpoint at `path` is not exactly the files of its manifest, each as it was written; None if it is."""
    if path.is_symlink():
        return Damage("it is a link")
    try:
        manifest = read_json(path / MANIFEST)
    except ValueError as error:
        return Damage(str(error), lost=isinstance(error.__cause__, (FileNotFoundError, ValueError)))
    try:
        if manifest.get("format") != FORMAT:
            return Damage(f"{MANIFEST} is not of this version of fxtune")
        files = {name: FileDigest(**file) for name, file in manifest["files"].items()}
        if set(files) != {WEIGHTS, MOMENTS, STATE} or not isinstance(manifest["recipe"], str):
            return Damage(f"{MANIFEST} is none of a checkpoint")
        # File systems and desktops leave names with a leading dot (.nfs0001, .DS_Store).
        strange = {file.name for file in path.iterdir() if not file.name.startswith(".")} - {*files, MANIFEST}
    except (KeyError, TypeError, AttributeError):
        return Damage(f"{MANIFEST} is none of a checkpoint")
    except OSError as error:
        return Damage(f"it cannot be read: {error.strerror or error}")
    if strange:
        return Damage(f"{min(strange)} was not saved with it")
    return next(filter(None, (find_damage(path / name, file) for name, file in files.items())), None)


def name_of_rank(rank: int, name: str) -> str:
    """The name in MOMENTS of a tensor that rank `rank` has of its own."""
    return f"rank-{rank}/{name}"


def of_all_ranks(moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The `moments` that are not of one rank."""
    return {name: tensor for name, tensor in moments.items() if not _OF_RANK.fullmatch(name)}


def by_rank(moments: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """What the ranks have of their own in `moments`, by rank and name."""
    ranks: dict[int, dict[str, torch.Tensor]] = {}
    for full, tensor in moments.items():
        if found := _OF_RANK.fullmatch(full):
            ranks.setdefault(int(found[1]), {})[found[2]] = tensor
    return dict(sorted(ranks.items()))


def misfits(
    weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yield each reason why the tensors of a checkpoint do not fit the trained weights `model`."""
    for name in sorted(weights.keys() ^ model.keys()):
        yield f"{name} is only in {WEIGHTS if name in weights else 'the model'}"
    for name in sorted(weights.keys() & model.keys()):
        found, wanted = weights[name], model[name]
        if found.shape != wanted.shape:
            yield f"{name} is {list(found.shape)} in {WEIGHTS}, and {list(wanted.shape)} in the model"
        elif found.dtype != wanted.dtype:
            names = [DTYPES.get(tensor.dtype, tensor.dtype) for tensor in (found, wanted)]
            yield f"{name} is {names[0]} in {WEIGHTS}, and {names[1]} in the model"
    for full, moment in sorted(of_all_ranks(moments).items()):
        name, _, key = full.rpartition("/")
        if name not in model:
            yield f"{MOMENTS} has moments of {name}, which is not trained here"
        elif key in _WEIGHT_SHAPED and moment.shape != model[name].shape:
            yield f"{MOMENTS}: {full} has not the shape of its weight"
