"""A model's weights: drawn at random, or read from safetensors, whole or not at all."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, first_line
from fxtune.system.hub import Origin, fetch
from fxtune.system.oom import out_of_memory_reason


def made_there(drawing: bool, hf_config: Any, dtype: torch.dtype, world: World, code: bool) -> bool:
    """Whether whole weights that are to be made smaller had best be on world.device at first. `drawing`: they are random.

    Random ones where they fit: a card draws them a hundred times faster than a host. Weights that are read pass through host
    memory anyway, and go to the card when they are small, unless they only fit there: a card that held all of them once would
    keep its memory cut into their pieces.
    """
    from transformers import AutoModelForCausalLM

    if world.device.type == "cpu":
        return True
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), trust_remote_code=code)
    needed = sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize
    facts = world.facts()
    return needed < 0.9 * facts.free_memory if drawing else needed > 0.9 * facts.host_memory


def draw(hf_config: Any, dtype: torch.dtype, world: World, seed: int, code: bool) -> Any:
    """A model of random weights."""
    from transformers import AutoModelForCausalLM

    cards = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), world.device:
        torch.manual_seed(seed)
        try:
            built = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, trust_remote_code=code)
        except (ValueError, TypeError, RuntimeError, KeyError, ZeroDivisionError) as error:
            if out_of_memory_reason(error):
                raise
            raise ConfigError(
                f"model.init=random: a {hf_config.model_type} of this config cannot be built: {first_line(error)}"
            ) from error
    return built


def read(origin: Origin, hf_config: Any, dtype: torch.dtype, world: World, code: bool, name: str) -> Any:
    """A model of the weights in a folder. `name`: what the user calls it, for errors."""
    files = _fetch(origin)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM.from_pretrained  # its declared type leaves out output_loading_info
    placed = {} if world.device.type == "cpu" else {"device_map": {"": world.device}}
    try:
        built, seen = loader(
            origin.folder,
            config=hf_config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            trust_remote_code=code,
            **placed,
        )
    except (
        OSError,
        SafetensorError,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        AssertionError,
        ArithmeticError,
        ImportError,
    ) as error:  # ImportError: kernels that its config.json asks for
        if out_of_memory_reason(error):
            raise
        raise StorageError(
            f"model.path={name}: the weights in {origin.folder} cannot be loaded as its config.json says: "
            f"{first_line(error)}. Use a complete copy."
        ) from error
    shapes = [
        f"{name} ({tuple(stored)} in the file, {tuple(wanted)} in the config)"
        for name, stored, wanted in seen["mismatched_keys"]
    ]
    troubles = [
        f"{len(names)} {what}, such as {sorted(names)[0]}"
        for names, what in (
            (seen["missing_keys"], "weights of the architecture are not in the files"),
            (seen["unexpected_keys"], "weights in the files have no place in the architecture"),
            (shapes, "weights have another shape"),
            (list(seen["error_msgs"]), "errors"),
        )
        if names
    ]
    if troubles:
        raise StorageError(
            f"model.path={name}: the weights in {origin.folder} do not fit its config.json "
            f"({hf_config.model_type}): "
            + "; ".join(troubles)
            + ". transformers would go on with random weights. Use a complete copy."
        )
    if whole := _no_weights([origin.folder / file for file in files], built):
        raise StorageError(
            f"model.path={name}: {whole[0]} is stored as {whole[1]} in {whole[2]}, which is no weight: a library "
            "that packs weights saved it, or it is damaged. Give the model that it was made from."
        )
    if not finite(built):
        raise StorageError(_what_is_not_finite([origin.folder / file for file in files], name, dtype))
    return built


def _no_weights(files: list[Path], model: torch.nn.Module) -> tuple[str, str, Path] | None:
    """The first weight that is whole or complex numbers in its file and would be taken for real ones: its name, what it is there,
    and where. Reads the files' headers.
    """
    from safetensors import safe_open

    wanted = {key for key, weight in model.named_parameters() if weight.is_floating_point()}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in sorted(wanted.intersection(opened.keys())):
                if "F" not in (kind := opened.get_slice(key).get_dtype()):
                    return key, kind, file
    return None


def finite(model: torch.nn.Module) -> bool:
    """Whether no weight is NaN or infinite: one number a tensor, where the tensor is, and one wait for all of them.

    It reads each weight once and needs no memory. An 8B model in bfloat16, 16 GB in 291 tensors: by arithmetic 5 ms of a card
    that reads 3.35 TB/s, and some 10 ms to start three kernels a tensor; on a host 2 s of one core (8.6 GB/s measured), beside
    the 8 s in which a disk of 2 GB/s gives them.
    """
    # min and max carry NaN along and, unlike a sum, never overflow; times 0 a finite number is 0 and all others are NaN.
    ends = [
        torch.stack(torch.aminmax(weight.detach()))
        for weight in model.parameters()
        if weight.numel() and weight.is_floating_point() and weight.itemsize > 1
    ]  # fp8 has neither operation
    return not ends or bool((torch.stack([pair.float() for pair in ends]) * 0 == 0).all())


def _what_is_not_finite(files: list[Path], name: str, dtype: torch.dtype) -> str:
    """The message for weights of which some are not. Reads the files again, tensor by tensor: there it is known what is whose."""
    from safetensors import safe_open

    infinite = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            infinite += [
                (key, file) for key in sorted(opened.keys()) if not _whole(opened.get_tensor(key)).isfinite().all()
            ]
    if not infinite:
        return (
            f"model.path={name}: weights that are finite in its files are too large for {dtype}, where they become infinite. "
            "Set model.dtype to what they were saved in: bfloat16 or float32."
        )
    key, file = infinite[0]
    return (
        f"model.path={name}: NaN or infinite numbers are in {len(infinite)} of its tensors, the first being {key} in {file}. "
        "Nothing can be learnt from such weights. Use another copy of the model, or an earlier checkpoint of it."
    )


def _whole(weight: torch.Tensor) -> torch.Tensor:
    """A tensor as numbers of which finite ones can be told: fp8 lacks that operation."""
    return weight.float() if weight.itemsize == 1 else weight


def _fetch(origin: Origin) -> list[str]:
    """Make the safetensors files that hold the model (by its index, where there is one) local, and find broken ones. Returns
    their names."""
    from safetensors import SafetensorError, safe_open

    files = ["model.safetensors"]
    index = origin.folder / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not files:
                raise ValueError("it names no files")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise StorageError(
                f"{index} is not a safetensors index: {first_line(error)}. Use a complete copy of the model."
            ) from error
    pickles = sorted(path.name for path in origin.folder.glob("*.bin"))
    if origin.revision is None and not (origin.folder / files[0]).exists() and pickles:
        raise ConfigError(
            f"model.path={origin.name} holds pickled weights ({pickles[0]}), which can run code when they are "
            "read. fxtune reads safetensors only: convert them (save_pretrained of transformers writes "
            "safetensors)."
        )
    fetch(origin, files)
    for file in files:
        try:
            with safe_open(origin.folder / file, framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise StorageError(
                f"{origin.folder / file} is broken or cut short ({first_line(error)}). Delete it and fetch or "
                "copy it again."
            ) from error
    return files
