"""Writes an adapter and its base, or the weights of a checkpoint, as one safetensors model. export.py calls it."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.checkpoint.folder import step_of
from fxtune.checkpoint.run_folder import RUNS
from fxtune.config.root import Config
from fxtune.errors import ConfigError, StorageError, first_line
from fxtune.export.merged_weights import recompute
from fxtune.export.rounding import LostUpdateError
from fxtune.export.save import save_model, staging_folders
from fxtune.facts.options import DType
from fxtune.models import weights
from fxtune.models.probe import Answer
from fxtune.models.shards import names_in_files
from fxtune.models.structure import base_dtype
from fxtune.outputs.adapter import OpenedAdapter, open_adapter
from fxtune.outputs.checkpoint_model import exported_model, run_of
from fxtune.outputs.run_output import OutputKind, RunOutput, find_folder, find_output, is_run, unknown
from fxtune.system.files.atomic_files import DTYPES
from fxtune.system.files.hub import Origin
from fxtune.system.process.oom import out_of_memory_reason
from fxtune.system.terminal import console

MIB = 2**20


def newest_adapter(config: Config) -> Path:
    """The adapter of the recipe's newest run. Raises ConfigError if no run has an adapter."""
    root = Path(config.run.dir) if config.run.dir else Path("runs") / config.run.name
    folders = [root] if config.run.dir else [path for path in root.parent.glob("*") if is_run(path.name, root.name)]
    adapters = [path / "adapter" for path in folders if (path / "adapter").is_dir()]
    if not adapters:
        if full := [path / "model" for path in folders if (path / "model").is_dir()]:
            raise ConfigError(f"{full[-1]} was trained without adapters, so there is nothing to merge.")
        raise ConfigError(f"No adapter in {root}: train the recipe first, or name one: fxtune merge ADAPTER FOLDER.")
    return max(adapters, key=lambda path: path.stat().st_mtime)


def merge(
    adapter: Path | str,
    out: Path | str | None = None,
    *,
    trust_remote_code: bool = False,
    unmerged: bool = False,
    card: dict[str, Any] | None = None,
) -> Path:
    """Merge an adapter into the base that it names, write the model into `out`, and return `out`. `adapter`: a run, a
    checkpoint, a folder or a hub id. Without `out`, the model goes to `merged` beside the adapter, and for a
    checkpoint to RUN/merged-step-70. The model has the base's dtype, or float32 if 16 bits would lose the update.
    `unmerged`: write the adapter of a checkpoint alone. `card`: more fields for write_card(), unless `adapter` is a
    checkpoint.

    Raises ConfigError if the adapter cannot be used, StorageError if `out` exists or cannot be written, or if weights
    do not fit or are not finite.
    """
    name = str(adapter)
    found = find(name)
    if found and found.kind is OutputKind.checkpoint:
        return _merge_checkpoint(found.folder, out, unmerged, trust_remote_code)
    if unmerged:
        raise ConfigError(f"--unmerged is for a checkpoint, and {name} is no checkpoint.")
    if found and found.kind is OutputKind.model:
        raise ConfigError(f"{found.folder} is a whole model, without adapters, so there is nothing to merge.")
    if found:
        name, out = str(found.folder), out or found.folder.with_name("merged")
    elif out is None:
        raise ConfigError(f"Where shall the merged model go? Name a new folder: fxtune merge {name} FOLDER.")
    return _merge(name, Path(out), card or {}, trust_remote_code)


def find(name: str) -> RunOutput | None:
    """The output that `name` means on this machine; None if `name` can be a hub id. Otherwise raises ConfigError."""
    if find_folder(name) is not None:
        return find_output(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", f"{RUNS}/")):
        raise unknown(name)
    return None


def _merge_checkpoint(checkpoint: Path, out: Path | str | None, unmerged: bool, trust_remote_code: bool) -> Path:
    name = f"{'adapter' if unmerged else 'merged'}-step-{step_of(checkpoint)}"
    out = run_of(checkpoint) / name if out is None else Path(out)
    require_writable(out)
    model, tokenizer, card = exported_model(checkpoint, trust_remote_code)
    if unmerged or not hasattr(model.module, "peft_config"):
        return save_model(model, tokenizer, out, card)
    with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch:
        save_model(model, tokenizer, Path(scratch) / "adapter", card)
        del model
        return _merge(str(Path(scratch) / "adapter"), out, {**card, "adapter": str(checkpoint)}, trust_remote_code)


def _merge(name: str, out: Path, card: dict[str, Any], trust_remote_code: bool) -> Path:
    require_writable(out)
    opened = open_adapter(name, "merged", trust_remote_code)
    try:
        return _write_merged(opened, out, card)
    except LostUpdateError as error:
        console.say(
            f"In {opened.model.dtype.value} {error}. So the merged model is in float32 (vllm serve --dtype float32). "
            "To keep 16 bits, serve the adapter beside its base: fxtune export RUN --to vllm"
        )
    return _write_merged(replace(opened, model=replace(opened.model, dtype=DType.float32)), out, card)


def _write_merged(opened: OpenedAdapter, out: Path, card: dict[str, Any]) -> Path:
    name, place = opened.name, require_writable(out)
    base = opened.build_base(torch.device("cpu"))
    require_space(sum(weight.numel() * weight.itemsize for weight in base.module.parameters()), out, place)
    base_name, dtypes = base.module.name_or_path, _dtypes(base.module, opened.base)
    adapted = opened.adapt(base.module)
    answer = Answer.of(adapted)
    merged = _merge_into_base(adapted, name)
    for key, tensor in merged.state_dict(keep_vars=True).items():
        tensor.data = tensor.data.to(dtypes[key])
    if not weights.all_finite(merged):
        first = next(key for key, weight in merged.named_parameters() if not weight.isfinite().all())
        raise StorageError(
            f"adapter {name}: added to its base it makes NaN or infinite {opened.model.dtype.value} numbers, first in "
            f"{first}. Nothing was written. Use another copy of the adapter, or an earlier checkpoint of it."
        )
    merged.name_or_path = base_name
    require_writable(out)  # again: another merge may have written `out` since, and save_model() would replace it
    return save_model(
        replace(base, module=merged),
        opened.tokenizer,
        out,
        card={"adapter": opened.origin.name, **card},
        answer=lambda: answer,
        check=partial(recompute, base=opened.base, adapter=opened.origin, lora=opened.lora, model=merged),
        keeps=f"The adapter {name} is as it was: merge it again.",
        merged=opened.origin.folder,
    )


def _dtypes(base: Any, origin: Origin) -> dict[str, torch.dtype]:
    """The dtype in a merged model of each tensor of `base`: the tensor's own. transformers reads some parameters as
    float32 although the files of `origin` store them like all others. They get the others' dtype."""
    found = {name: tensor.dtype for name, tensor in base.state_dict().items()}
    stored = {key: file.get_slice(key).get_dtype() for _, key, file in weights.stored(weights.readable_files(origin))}
    usual = base_dtype(base)
    return found | {name: usual for name, key in names_in_files(base, stored).items() if stored[key] == DTYPES[usual]}


def require_writable(out: Path, what: str = "merged model") -> Path:
    """Refuse a folder that exists or cannot be written. Returns the nearest existing folder above `out`. No file is
    opened, because opening a pipe would wait forever."""
    for path in (out, *(staging_folders(out) if out.name else ())):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise StorageError(
                f"{path} cannot be a folder for the {what}: {first_line(error)}. Name another."
            ) from error
        if path == out:
            raise StorageError(f"{out} exists, and exporting never writes over anything. Name a new folder.")
        if not stat.S_ISDIR(mode):
            raise StorageError(
                f"{path} stands where the {what} is put together, and is no folder. Remove it, or name another "
                f"folder than {out}."
            )
    place = next(above for above in out.absolute().parents if above.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageError(
            f"{out} cannot be made: {place} may not be written to. Change its permissions, or name another folder."
        )
    return place


def require_space(need: int, out: Path, place: Path, what: str = "merged model") -> None:
    """Raise StorageError if the disk of `place`, an existing folder above `out`, lacks `need` bytes."""
    disk = shutil.disk_usage(place)
    if disk.free < need and disk.total:  # some network disks report no total
        raise StorageError(
            f"The disk of {out} has no room for the {what}: it takes {need / MIB:,.1f} MiB, and "
            f"{disk.free / MIB:,.1f} MiB are free. Free space there, or name a folder on another disk."
        )


def _merge_into_base(adapted: Any, name: str) -> Any:
    """Add the adapter to the weights of its base, and return the base without peft's modules. `adapted`: a model of
    peft. `name`: the adapter's name, for messages."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    # If a head and an embedding share a weight, the one with an adapter gets a copy, so that only it is changed.
    uses = Counter(id(weight) for module in adapted.modules() for weight in module.parameters(recurse=False))
    for base_layer in [layer.get_base_layer() for layer in layers]:
        for key, weight in list(base_layer.named_parameters(recurse=False)):
            if uses[id(weight)] > 1:
                setattr(base_layer, key, torch.nn.Parameter(weight.detach().clone(), requires_grad=False))
    for layer in layers:
        _merge_in_float32(layer, name)
    for wrapper in [module for module in adapted.modules() if isinstance(module, TrainableTokensWrapper)]:
        wrapper.token_adapter.merge()  # unload() would leave out the rows of trainable_token_indices
    merged = adapted.unload()
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = False
    return merged


def _merge_in_float32(layer: Any, name: str) -> None:
    base_layer: Any = layer.get_base_layer()  # a linear layer, or experts with weights of other names
    dtypes = {key: weight.dtype for key, weight in base_layer.named_parameters(recurse=False)}
    for weight in base_layer.parameters(recurse=False):
        weight.data = weight.data.float()
    try:
        layer.merge()
    except (RuntimeError, ValueError) as error:  # peft cannot merge, for example, a bias if the base has none
        if out_of_memory_reason(error):
            raise
        raise ConfigError(f"adapter {name} cannot be merged: {first_line(error)}. Use it with peft.") from error
    for key, weight in base_layer.named_parameters(recurse=False):
        weight.data = weight.data.to(dtypes[key])
