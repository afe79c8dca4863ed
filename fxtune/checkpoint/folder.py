"""One checkpoint as a folder: how it is written, and every way in which it can turn out not to be what was written.

    step-00000120/  weights.safetensors  optimizer.safetensors  state.json  manifest.json

It is written under a name that begins with a dot, synced to the disk and renamed. What begins with a dot is unfinished business,
and goes with the next save. What is called `aside-step-00000120` is no checkpoint of the run any more, and nobody but the user
removes it (see set_aside). Nothing of what is read here is code, and no name in a file is used as a path.
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
from safetensors import SafetensorError, safe_open

from fxtune.system.atomic_files import DTYPES, Seal, broken, gone, read_json, sync, write_tensors, write_text

MANIFEST, STATE, WEIGHTS, MOMENTS = "manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors"
FORMAT = 2
"""Of the manifest. Raise it when an older fxtune could not read what is written."""
_REPLACED = ".replaced-"
_NAME = re.compile(r"step-(\d{8,})")
_LIKE_WEIGHT = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Moments that have the shape of their weight."""


def paths(folder: Path) -> list[Path]:
    """What has a checkpoint's name in `folder`, oldest step first."""
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def was_best(path: Path) -> bool:
    """Whether the checkpoint at `path` was the best of its run when it was saved: better than all before it."""
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
    """Write the checkpoint of `step` and return where it is; one that is there is replaced. Raises OSError; nothing is left then.

    `recipe`: a digest of what the run learns by. `state`: JSON.
    """
    final = folder / f"step-{step:08d}"
    staging = folder / f".staging-{final.name}"
    try:
        staging.mkdir()
        seals = {
            WEIGHTS: write_tensors(staging / WEIGHTS, weights),
            MOMENTS: write_tensors(staging / MOMENTS, moments),
            STATE: write_text(staging / STATE, state),
        }
        manifest = {"format": FORMAT, "recipe": recipe, "files": {name: asdict(seal) for name, seal in seals.items()}}
        write_text(staging / MANIFEST, json.dumps(manifest, indent=1))
        sync(staging)
        before = None
        if final.is_dir() and not final.is_symlink():  # the same step again, maybe the only checkpoint: see sweep()
            before = final.rename(folder / f"{_REPLACED}{final.name}")
        elif final.is_symlink() or final.exists():
            final.unlink()
        os.replace(staging, final)
        sync(folder)
        if before is not None:
            remove(before)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return final


def sweep(folder: Path) -> None:
    """Remove what killed saves left; a checkpoint that was to be replaced, and was not, is put back. Raises OSError."""
    for leftover in folder.glob(".*-step-*"):
        place = folder / leftover.name.removeprefix(_REPLACED)
        if leftover.name.startswith(_REPLACED) and not place.exists() and not lost(leftover):
            leftover.rename(place)
        else:
            remove(leftover)


def remove(path: Path) -> None:
    """Remove a checkpoint. Its name goes first: half a checkpoint is never seen under it."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    if not path.name.startswith("."):
        path = path.rename(path.with_name(f".removed-{path.name}"))
    shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Give what has a checkpoint's name another one, under which it is no checkpoint and stays; returns it. Raises OSError."""
    aside, number = path.with_name(f"aside-{path.name}"), 1
    while aside.is_symlink() or aside.exists():
        number += 1
        aside = path.with_name(f"aside-{path.name}-{number}")
    return path.rename(aside)


def lost(path: Path) -> bool:
    """Whether what was saved at `path` is known to be gone: a file is missing, or was read and is not what was written.

    That is less than damaged(): another fxtune may read a manifest of another format, and an error of a disk may pass.
    """
    if path.is_symlink():
        return False
    try:
        manifest = read_json(path / MANIFEST)
    except ValueError as error:  # no JSON, or what the disk said
        return isinstance(error.__cause__, (FileNotFoundError, ValueError))
    try:
        seals = {name: Seal(**manifest["files"][name]) for name in (WEIGHTS, MOMENTS, STATE)}
    except (KeyError, TypeError):
        return False
    return manifest.get("format") == FORMAT and any(gone(path / name, seal) for name, seal in seals.items())


def damaged(path: Path) -> str | None:
    """Why the checkpoint at `path` is not whole, or None: every file of the manifest is there as it was written, and no other."""
    if path.is_symlink():
        return "it is a link"
    try:
        manifest = read_json(path / MANIFEST)
        if manifest.get("format") != FORMAT:
            return f"{MANIFEST} is not of this version of fxtune"
        seals = {name: Seal(**seal) for name, seal in manifest["files"].items()}
        if set(seals) != {WEIGHTS, MOMENTS, STATE} or not isinstance(manifest["recipe"], str):
            return f"{MANIFEST} is none of a checkpoint"
        # A leading dot: what file systems and desktops leave behind (.nfs0001, .DS_Store).
        strange = {file.name for file in path.iterdir() if not file.name.startswith(".")} - {*seals, MANIFEST}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return str(error) if type(error) is ValueError else f"{MANIFEST} is none of a checkpoint"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    if strange:
        return f"{sorted(strange)[0]} was not saved with it"
    return next(filter(None, (broken(path / name, seal) for name, seal in seals.items())), None)


def misfits(path: Path, model: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Why the tensors of a checkpoint do not belong to the trained weights `model`."""
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            names = set(file.keys())
            for name in sorted(names ^ set(model)):
                yield f"{name} is only in {WEIGHTS if name in names else 'the model'}"
            for name in sorted(names):
                found, wanted = file.get_slice(name), model[name]
                if list(found.get_shape()) != list(wanted.shape):
                    yield f"{name} is {found.get_shape()} in {WEIGHTS}, and {list(wanted.shape)} in the model"
                elif found.get_dtype() != DTYPES[wanted.dtype]:
                    yield f"{name} is {found.get_dtype()} in {WEIGHTS}, and {DTYPES[wanted.dtype]} in the model"
        with safe_open(path / MOMENTS, framework="pt") as file:
            for full in sorted(file.keys()):
                name, _, key = full.rpartition("/")
                if name not in model:
                    yield f"{MOMENTS} has moments of {name}, which is not trained here"
                elif key in _LIKE_WEIGHT and list(file.get_slice(full).get_shape()) != list(model[name].shape):
                    yield f"{MOMENTS}: {full} has not the shape of its weight"
    except (SafetensorError, OSError) as error:
        yield f"its tensors cannot be read: {error}"
