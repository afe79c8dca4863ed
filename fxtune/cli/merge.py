"""Fold an adapter into its base: one safetensors model that plain transformers loads, with no peft.

    fxtune merge runs/NAME/adapter FOLDER        fxtune merge +recipe=NAME

A weight W becomes W + alpha/r * B A. The sum is formed in float32 and rounded once to the dtype that the base is stored in,
a layer at a time, so a bfloat16 model costs no more memory than itself.
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


def run(config: Config) -> Path:
    """Merge the adapter of this recipe's newest run into the folder merged beside it. Raises ConfigError where there is none."""
    root = Path(config.run.dir) if config.run.dir else Path("runs") / config.run.name
    folders = [root] if config.run.dir else [path for path in root.parent.glob("*") if _is_run(path.name, root.name)]
    trained = [path for path in folders if (path / "adapter").is_dir()]
    if not trained:
        if whole := [path / "model" for path in folders if (path / "model").is_dir()]:
            raise ConfigError(
                f"{whole[-1]} is a whole model already: it was trained without adapters, and there is nothing to "
                "merge."
            )
        raise ConfigError(
            f"No adapter lies in {root}: train the recipe first, or name one: fxtune merge ADAPTER FOLDER."
        )
    newest = max(trained, key=lambda path: (path / "adapter").stat().st_mtime)
    return merge(newest / "adapter", newest / "merged", trust_remote_code=config.model.trust_remote_code)


def merge(adapter: Path | str, out: Path | str, *, trust_remote_code: bool = False) -> Path:
    """Write an adapter (a folder or a hub id) and the base that it names as one model into `out`, and return that.

    Raises ConfigError for what is no adapter or names no base, StorageError where `out` exists or cannot be written, or where
    weights do not fit or are no finite numbers.
    """
    out = Path(out)
    place = _require_place(out)
    models.silence_libraries()
    origin = locate_adapter(str(adapter), key="adapter")
    fetch_adapter(origin, str(adapter), key="adapter")
    description = _describe(origin, str(adapter))
    if not description.base_model_name_or_path:
        raise ConfigError(
            f"{adapter} names no base model (it was trained on random weights), so there is nothing to merge it into."
        )
    model = ModelConfig(
        path=description.base_model_name_or_path, revision=description.revision, trust_remote_code=trust_remote_code
    )
    try:
        hf_config = models.load_config(model)
    except (UserError, OSError) as error:
        kind = type(error) if isinstance(error, UserError) else ConfigError
        raise kind(
            f"adapter {adapter}: its base, as base_model_name_or_path in {origin.folder / CONFIG} names it: {_cut(error)} "
            "If the base has moved, write where it is into that file."
        ) from error
    model.dtype = _stored_in(hf_config, model)
    hf_config._attn_implementation = (
        "eager"  # nothing is computed, and kernels that the config names may not be installed
    )
    tokens = ModelConfig(
        path=model.path,
        revision=model.revision,
        trust_remote_code=trust_remote_code,
        tokenizer=str(origin.folder) if (origin.folder / "tokenizer_config.json").exists() else None,
    )
    tokenizer = models.load_tokenizer(tokens)
    base = models.build(model, models.with_adapter_rope(hf_config, origin), World(torch.device("cpu")), seed=0)
    _require_room(base, out, place)
    name, revision = base.name_or_path, base.base_revision
    merged = _fold(base, description, origin, str(adapter)).to(getattr(torch, model.dtype.value))
    if not weights.all_finite(merged):
        one = next(name for name, weight in merged.named_parameters() if not weight.isfinite().all())
        raise StorageError(
            f"adapter {adapter}: added to its base it makes NaN or infinite {model.dtype.value} numbers, first in "
            f"{one}. Nothing was written. Use another copy of the adapter, or an earlier checkpoint of it."
        )
    merged.name_or_path, merged.base_revision = name, revision
    _require_place(out)  # once more: save_model() replaces what is there, and another merge may have been faster
    return save_model(merged, tokenizer, out, card={"adapter": origin.name})


def _require_place(out: Path) -> Path:
    """Refuse a folder that cannot be written, before any work. Returns the one above it that is there.

    What stands where save_model() puts the folder together is looked at and not opened: whoever opens a pipe waits for ever.
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
                f"{path} stands where the merged model is put together, and is no folder. Remove it, or "
                f"name another folder than {out}."
            )
    place = next(above for above in out.absolute().parents if above.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        raise StorageError(
            f"{out} cannot be made: {place} may not be written to. Mend its permissions, or name another folder."
        )
    return place


def _require_room(base: Any, out: Path, place: Path) -> None:
    """Refuse a disk that cannot take what is as large as the base, before the merging."""
    needed, disk = sum(weight.numel() * weight.itemsize for weight in base.parameters()), shutil.disk_usage(place)
    if disk.free < needed and disk.total:  # some network disks do not say
        raise StorageError(
            f"The disk of {out} has no room for the merged model: it takes {needed / 2**20:,.1f} MiB, and "
            f"{disk.free / 2**20:,.1f} MiB are free. Free space there, or name a folder on another disk."
        )


def _stored_in(hf_config: Any, model: ModelConfig) -> DType:
    """The dtype of the base's weights, as its config.json says: the merged model has the same."""
    stored = str(hf_config.dtype or torch.float32).removeprefix("torch.")
    if stored not in (kinds := [kind.value for kind in DType if kind is not DType.auto]):
        raise ConfigError(
            f"The base {model.path} is stored in {stored[:40]} (dtype in its config.json); fxtune merges into "
            f"{', '.join(kinds)}. Save it in one of these."
        )
    return DType(stored)


def _describe(origin: Origin, name: str) -> Any:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig

    inspect_folder(origin.folder, f"adapter {origin.name}")
    theirs = read_options(origin, name, key="adapter")
    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(theirs["peft_type"])
    if kind is None or not issubclass(kind, LoraConfig):
        raise ConfigError(f"{origin.name} is a {theirs['peft_type']} adapter; fxtune merges LoRA, rsLoRA and DoRA.")
    if theirs.get("alora_invocation_tokens"):
        raise ConfigError(
            f"{origin.name} is an aLoRA adapter ({CONFIG}: alora_invocation_tokens): it acts on a part of a text "
            "alone, so no one model does what it does. Use it with peft."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LoraConfig.from_pretrained(str(origin.folder))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{origin.folder / CONFIG} cannot be read: {first_line(error)}. Use a complete copy of the adapter."
        ) from error


def _fold(base: Any, description: Any, origin: Origin, name: str) -> Any:
    import peft
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

    _try_patterns(base, description, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted: Any = peft.get_peft_model(base, description)
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ArithmeticError,
            NotImplementedError,
        ) as error:
            raise ConfigError(
                f"adapter {name}: what its adapter_config.json describes does not fit its base: "
                f"{_cut(error)}. Use another copy of the adapter."
            ) from error
    load_weights(adapted, origin, name, key="adapter")
    layers = [module for module in adapted.modules() if isinstance(module, LoraLayer)]
    _untie(adapted, layers)
    for layer in layers:
        _add(layer, name)
    for wrapper in [module for module in adapted.modules() if isinstance(module, TrainableTokensWrapper)]:
        wrapper.token_adapter.merge()  # the rows of trainable_token_indices, which unload() would leave out
    merged = adapted.unload()
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if head is not None and head.weight is not embedding.weight:
        merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = False
    return merged


def _untie(adapted: Any, layers: list[Any]) -> None:
    """Give a head or an embedding that has an adapter a weight of its own: what is added to one is not the other's."""
    held = Counter(id(weight) for module in adapted.modules() for weight in module.parameters(recurse=False))
    for layer in layers:
        base_layer = layer.get_base_layer()
        for name, weight in list(base_layer.named_parameters(recurse=False)):
            if held[id(weight)] > 1:
                setattr(base_layer, name, torch.nn.Parameter(weight.detach().clone(), requires_grad=False))


def _add(layer: Any, name: str) -> None:
    """Add an adapter to the weights that it is over, in float32."""
    base_layer: Any = layer.get_base_layer()  # a linear, or a mixture's experts, whose weights have other names
    dtypes = {found: weight.dtype for found, weight in base_layer.named_parameters(recurse=False)}
    for weight in base_layer.parameters(recurse=False):
        weight.data = weight.data.float()
    try:
        layer.merge()
    except (RuntimeError, ValueError) as error:  # what peft cannot fold, such as a bias where the base has none
        if out_of_memory_reason(error):
            raise
        raise ConfigError(f"adapter {name} cannot be merged: {first_line(error)}. Use it with peft.") from error
    for found, weight in base_layer.named_parameters(recurse=False):
        weight.data = weight.data.to(dtypes[found])


def _try_patterns(base: Any, description: Any, name: str) -> None:
    """Match an adapter's regular expressions with the names that peft will match them with: some would never come to an end."""
    found = {
        option: getattr(description, option, None)
        for option in ("target_modules", "exclude_modules", "layers_pattern")
    }
    patterns = {option: [value] if isinstance(value, str) else [] for option, value in found.items()}
    for option in ("rank_pattern", "alpha_pattern"):
        patterns[option] = [rf"(?:.*\.)?({key})$" for key in getattr(description, option, None) or {}]
    for option, given in patterns.items():
        try:
            with limit_resources():
                for pattern in given:
                    for module, _ in base.named_modules():
                        re.fullmatch(pattern, module)
        except (re.error, LimitExceeded) as error:
            raise ConfigError(
                f"adapter {name}: its {option} cannot be used as a pattern of names: {error}. Use another copy of "
                "the adapter."
            ) from error


def _cut(error: Exception) -> str:
    """An error's message as one line that is not too long: peft quotes whole models, the system whole names."""
    text = " ".join(str(error).split()).removesuffix("." if not isinstance(error, UserError) else "")
    return text if len(text) <= 600 else f"{text[:200]} ... {text[-200:]}"


def _is_run(name: str, root: str) -> bool:
    rest = name.removeprefix(root)
    return not rest or (rest.startswith("-") and rest[1:].isdigit())
