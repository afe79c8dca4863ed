"""`fxtune merge`: write a LoRA adapter and its base as one safetensors model, which plain transformers loads.

    fxtune merge runs/NAME/adapter FOLDER        fxtune merge +recipe=NAME

A weight W becomes W + alpha/r * B A. The sum is computed in float32 and rounded once to the dtype in which the base is
stored, one layer at a time, so a bfloat16 model needs no more memory than its own size.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fxtune.config.root import Config
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, UserError, first_line
from fxtune.models import load as models
from fxtune.models import weights
from fxtune.models.load import DType, ModelConfig
from fxtune.models.peft_adapter import CONFIG, fetch_adapter, load_weights, read_options
from fxtune.models.save import save_model
from fxtune.models.untrusted import inspect_folder
from fxtune.system.hub import Origin, locate_adapter
from fxtune.system.oom import out_of_memory_reason
from fxtune.system.resource_limits import LimitExceeded, limit_resources

MIB = 2**20


def run(config: Config) -> Path:
    """Merge the adapter of the recipe's newest run into its run folder. Raises ConfigError if there is none."""
    root = Path(config.run.dir) if config.run.dir else Path("runs") / config.run.name
    folders = [root] if config.run.dir else [path for path in root.parent.glob("*") if _is_run(path.name, root.name)]
    adapters = [path / "adapter" for path in folders if (path / "adapter").is_dir()]
    if not adapters:
        if full := [path / "model" for path in folders if (path / "model").is_dir()]:
            raise ConfigError(f"{full[-1]} was trained without adapters, so there is nothing to merge.")
        raise ConfigError(f"No adapter in {root}: train the recipe first, or name one: fxtune merge ADAPTER FOLDER.")
    newest = max(adapters, key=lambda path: path.stat().st_mtime)
    return merge(newest, newest.parent / "merged", trust_remote_code=config.model.trust_remote_code)


def merge(adapter: Path | str, out: Path | str, *, trust_remote_code: bool = False) -> Path:
    """Write an adapter (a folder or a hub id) and the base that it names as one model into `out`, and return `out`.

    Raises ConfigError if the adapter cannot be read or names no base, StorageError if `out` exists or cannot be
    written, or if weights do not fit or are not finite.
    """
    name, out = str(adapter), Path(out)
    place = _require_writable(out)
    models.silence_libraries()
    origin = locate_adapter(name, key="adapter")
    fetch_adapter(origin, name, key="adapter")
    lora = _read_lora_config(origin, name)
    if not lora.base_model_name_or_path:
        raise ConfigError(f"{name} names no base model (it was trained on random weights), so it cannot be merged.")
    source = {"path": lora.base_model_name_or_path, "revision": lora.revision, "trust_remote_code": trust_remote_code}
    try:
        hf_config = models.load_config(ModelConfig(**source))
    except (UserError, OSError) as error:
        kind = type(error) if isinstance(error, UserError) else ConfigError
        raise kind(
            f"adapter {name}: its base, as base_model_name_or_path in {origin.folder / CONFIG} names it: "
            f"{_short(error)} "
            "If the base has moved, write where it is into that file."
        ) from error
    model = ModelConfig(**source, dtype=_stored_dtype(hf_config, source["path"]))
    hf_config._attn_implementation = "eager"  # nothing is computed, and the kernels it names may not be installed
    own = str(origin.folder) if (origin.folder / "tokenizer_config.json").exists() else None
    tokenizer = models.load_tokenizer(ModelConfig(**source, tokenizer=own))
    base = models.build(model, models.with_adapter_rope(hf_config, origin), World(torch.device("cpu")), seed=0)
    _require_space(base, out, place)
    base_name, base_revision = base.name_or_path, base.base_revision
    merged = _add_adapter(base, lora, origin, name).to(getattr(torch, model.dtype.value))
    if not weights.all_finite(merged):
        first = next(name for name, weight in merged.named_parameters() if not weight.isfinite().all())
        raise StorageError(
            f"adapter {name}: added to its base it makes NaN or infinite {model.dtype.value} numbers, first in "
            f"{first}. Nothing was written. Use another copy of the adapter, or an earlier checkpoint of it."
        )
    merged.name_or_path, merged.base_revision = base_name, base_revision
    _require_writable(out)  # again, because save_model() replaces what is there and another merge may have been faster
    return save_model(merged, tokenizer, out, card={"adapter": origin.name})


def _require_writable(out: Path) -> Path:
    """Refuse a folder that exists or cannot be written. Returns the nearest existing folder above it.

    The staging paths of save_model() are examined and not opened, because opening a pipe would wait forever.
    """
    for path in (out, *(out.with_name(f".{out.name}.{suffix}") for suffix in ("partial", "old") if out.name)):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            raise StorageError(
                f"{path} cannot be a folder for the merged model: {first_line(error)}. Name another."
            ) from error
        if path == out:
            raise StorageError(f"{out} exists, and merging never writes over anything. Name a new folder.")
        if not stat.S_ISDIR(mode):
            raise StorageError(
                f"{path} stands where the merged model is put together, and is no folder. Remove it, or name another "
                f"folder than {out}."
            )
    place = next(above for above in out.absolute().parents if above.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageError(
            f"{out} cannot be made: {place} may not be written to. Change its permissions, or name another folder."
        )
    return place


def _require_space(base: Any, out: Path, place: Path) -> None:
    """Refuse a disk without room for a model as large as the base, before the merge."""
    need, disk = sum(weight.numel() * weight.itemsize for weight in base.parameters()), shutil.disk_usage(place)
    if disk.free < need and disk.total:  # some network disks report no total
        raise StorageError(
            f"The disk of {out} has no room for the merged model: it takes {need / MIB:,.1f} MiB, and "
            f"{disk.free / MIB:,.1f} MiB are free. Free space there, or name a folder on another disk."
        )


def _stored_dtype(hf_config: Any, path: str) -> DType:
    """The dtype of the base's weights in its config.json, which the merged model keeps."""
    stored = str(hf_config.dtype or torch.float32).removeprefix("torch.")
    if stored not in (known := [kind.value for kind in DType if kind is not DType.auto]):
        raise ConfigError(
            f"The base {path} is stored in {stored[:40]} (dtype in its config.json); fxtune merges into "
            f"{', '.join(known)}. Save it in one of these."
        )
    return DType(stored)


def _read_lora_config(origin: Origin, name: str) -> Any:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig

    inspect_folder(origin.folder, f"adapter {origin.name}")
    options = read_options(origin, name, key="adapter")
    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(options["peft_type"])
    if kind is None or not issubclass(kind, LoraConfig):
        raise ConfigError(f"{origin.name} is a {options['peft_type']} adapter; fxtune merges LoRA, rsLoRA and DoRA.")
    if options.get("alora_invocation_tokens"):
        raise ConfigError(
            f"{origin.name} is an aLoRA adapter ({CONFIG}: alora_invocation_tokens): it acts on a part of a text, "
            "so no merged model can do the same. Use it with peft."
        )
    try:
        with warnings.catch_warnings(action="ignore"):
            return LoraConfig.from_pretrained(str(origin.folder))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{origin.folder / CONFIG} cannot be read: {first_line(error)}. Use a complete copy of the adapter."
        ) from error


def _add_adapter(base: Any, lora: Any, origin: Origin, name: str) -> Any:
    """The base with the adapter added to its weights, without peft's modules."""
    import peft
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    _require_fast_patterns(base, lora, name)
    try:
        with warnings.catch_warnings(action="ignore"):
            adapted: Any = peft.get_peft_model(base, lora)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError) as error:
        raise ConfigError(
            f"adapter {name}: its {CONFIG} does not fit its base: {_short(error)}. Use another copy of the adapter."
        ) from error
    load_weights(adapted, origin, name, key="adapter")
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    _untie(adapted, layers)
    for layer in layers:
        _merge_in_float32(layer, name)
    for wrapper in [module for module in adapted.modules() if isinstance(module, TrainableTokensWrapper)]:
        wrapper.token_adapter.merge()  # the rows of trainable_token_indices, which unload() would leave out
    merged = adapted.unload()
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = False
    return merged


def _untie(adapted: Any, layers: list[Any]) -> None:
    """Give a head or an embedding with an adapter its own weight, so that the adapter is added to that one only."""
    uses = Counter(id(weight) for module in adapted.modules() for weight in module.parameters(recurse=False))
    for layer in layers:
        base_layer = layer.get_base_layer()
        for name, weight in list(base_layer.named_parameters(recurse=False)):
            if uses[id(weight)] > 1:
                setattr(base_layer, name, torch.nn.Parameter(weight.detach().clone(), requires_grad=False))


def _merge_in_float32(layer: Any, name: str) -> None:
    base_layer: Any = layer.get_base_layer()  # a linear, or experts, whose weights have other names
    dtypes = {key: weight.dtype for key, weight in base_layer.named_parameters(recurse=False)}
    for weight in base_layer.parameters(recurse=False):
        weight.data = weight.data.float()
    try:
        layer.merge()
    except (RuntimeError, ValueError) as error:  # what peft cannot merge, such as a bias if the base has none
        if out_of_memory_reason(error):
            raise
        raise ConfigError(f"adapter {name} cannot be merged: {first_line(error)}. Use it with peft.") from error
    for key, weight in base_layer.named_parameters(recurse=False):
        weight.data = weight.data.to(dtypes[key])


def _require_fast_patterns(base: Any, lora: Any, name: str) -> None:
    """Match the adapter's regular expressions against the module names within a time limit, because some never end."""
    options = ("target_modules", "exclude_modules", "layers_pattern")
    patterns = {option: [value] for option in options if isinstance(value := getattr(lora, option, None), str)}
    for option in ("rank_pattern", "alpha_pattern"):
        patterns[option] = [rf"(?:.*\.)?({key})$" for key in getattr(lora, option, None) or {}]
    for option, given in patterns.items():
        try:
            with limit_resources():
                for pattern in given:
                    for module, _ in base.named_modules():
                        re.fullmatch(pattern, module)
        except (re.error, LimitExceeded) as error:
            raise ConfigError(
                f"adapter {name}: its {option} cannot be used as a pattern of names: {error}. Use another copy of the "
                "adapter."
            ) from error


def _short(error: Exception) -> str:
    """An error's message in one line of limited length: peft quotes whole models."""
    text = " ".join(str(error).split()).removesuffix("." if not isinstance(error, UserError) else "")
    return text if len(text) <= 600 else f"{text[:200]} ... {text[-200:]}"


def _is_run(name: str, root: str) -> bool:
    """Whether a folder is a run of the recipe: NAME, NAME-2, NAME-3, ..."""
    number = name.removeprefix(root)
    return not number or (number.startswith("-") and number[1:].isdigit())
