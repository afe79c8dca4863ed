"""Loads an adapter that peft saved, from a folder or the hub: compares its options with the recipe's, and loads its
weights.

Any difference is an error. peft itself builds what an adapter's config says, whatever the recipe says. It drops keys
that it does not know, only warns of missing weights, ignores weights that have no place in the model, and accepts NaN.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError, StorageError
from fxtune.system.console import say
from fxtune.system.hub import Origin, fetch, locate_adapter

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
FACTORED = ("pissa", "olora")
"""Values of `init` that also change the base, which whoever loads the adapter must know."""
_PEFT_ONLY = (
    "bias",
    "lora_bias",
    "layers_to_transform",
    "layers_pattern",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "use_bdlora",
)
"""Options of peft that change an adapter and that no recipe has. peft sets some of them by itself."""


def load_adapter(model: Any, adapter: str, options: Mapping[str, Any]) -> None:
    """Load the weights of `adapter` (a folder or a hub id) into `model`, and record it in `model.adapter_start`.

    `options`: those of the model's adapters, named as in techniques.lora (`init`: default, or one of FACTORED). Raises
    ConfigError if the adapter was made with other options, StorageError if it is damaged or does not fit.
    """
    origin = locate_adapter(adapter)
    fetch_adapter(origin, adapter, key="model.adapter")
    saved, lora_config = read_options(origin, adapter, key="model.adapter"), model.peft_config["default"]
    _require_same_options(
        saved, {**options, "target_modules": _sorted(lora_config.target_modules)}, lora_config, adapter
    )
    load_weights(model, origin, adapter, key="model.adapter")
    model.adapter_start = adapter
    trained_on, here = saved.get("base_model_name_or_path") or "", getattr(model, "name_or_path", "")
    # A folder that moved keeps its name.
    if trained_on and here and Path(trained_on).name.lower() != Path(here).name.lower():
        say(f"model.adapter={adapter} was trained on {trained_on}; here it is over {here}, which has the same shapes.")


def fetch_adapter(origin: Origin, name: str, key: str) -> None:
    """Make the two files of an adapter local. `key`, `name`: as the user wrote them. Raises StorageError
    if one is missing.
    """
    pickles = sorted(path.name for path in origin.folder.glob("adapter_model*.bin"))
    if origin.revision is None and pickles and not (origin.folder / WEIGHTS).exists():
        raise StorageError(
            f"{key}={name}: {origin.folder / WEIGHTS} is missing. {pickles[0]} in the same folder is a pickle, "
            "which can run code when it is read; fxtune reads safetensors only. If you trust it, convert it: "
            "PeftModel.from_pretrained and then save_pretrained write safetensors."
        )
    fetch(origin, FILES, key=key)


def read_options(origin: Origin, name: str, key: str) -> dict[str, Any]:
    """Read the options in an adapter's adapter_config.json. `key`, `name`: as the user wrote them.

    Raises StorageError for a file that cannot be read, ConfigError for options that are invalid or that peft would
    ignore.
    """
    file = origin.folder / CONFIG
    place = f"{key}={name}: {file}"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("it holds no options")
    except (OSError, ValueError) as error:
        raise StorageError(f"{place} cannot be read: {error}. Use a complete copy of the adapter.") from error
    if not isinstance(saved.get("peft_type"), str):
        raise StorageError(
            f"{place} cannot be read: it does not say what kind of adapter it is (peft_type). Use a complete "
            "copy of the adapter."
        )
    for option in ("target_modules", "exclude_modules", "modules_to_save"):
        if not _are_names(saved.get(option)):
            raise ConfigError(
                f"{place}: {option}={_short(saved[option])} is not a list of names. Use another copy of the adapter."
            )
    for option in ("rank_pattern", "alpha_pattern"):
        if not isinstance(saved.get(option) or {}, dict):
            raise ConfigError(
                f"{place}: {option}={_short(saved[option])} is not a table. Use another copy of the adapter."
            )
    alphas = {f"alpha_pattern.{module}": value for module, value in (saved.get("alpha_pattern") or {}).items()}
    for option, value in {"lora_alpha": saved.get("lora_alpha"), **alphas}.items():
        if isinstance(value, (int, float)) and not abs(value) < torch.finfo(torch.float32).max:
            raise ConfigError(
                f"{place}: {option}={_short(value)} is no number to scale an adapter by. Use another copy of the "
                "adapter."
            )
    if str(saved.get("init_lora_weights")).startswith("pissa_niter_"):
        raise ConfigError(
            f"{place}: init_lora_weights={saved['init_lora_weights']} subtracts a part of the base that was "
            "computed with random numbers, so it cannot be computed again from the base. Where the adapter was "
            "trained, save it as plain LoRA: peft's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    if unknown := _unknown_options(saved):
        from peft import __version__

        raise ConfigError(
            f"{place} has options that peft {__version__} does not know and would drop: {', '.join(unknown)}. "
            "Install the peft that saved it; or remove them there, if you know that they change nothing."
        )
    return saved


def _unknown_options(saved: dict[str, Any]) -> list[str]:
    """Options that are set and that LoraConfig does not have; nothing for other kinds of adapters."""
    from peft import LoraConfig

    known = {field.name for field in dataclasses.fields(LoraConfig)}
    return (
        sorted(_short(option) for option, value in saved.items() if value and option not in known)
        if saved.get("peft_type") == "LORA"
        else []
    )


def _require_same_options(saved: dict[str, Any], options: Mapping[str, Any], lora_config: Any, adapter: str) -> None:
    """Raise ConfigError unless the options `saved` with an adapter are the recipe's `options`.

    `lora_config`: the recipe's options as peft's LoraConfig.
    """
    if saved.get("peft_type") != "LORA":
        raise ConfigError(
            f"model.adapter={adapter} cannot be trained here: it is a {_short(saved.get('peft_type'))} adapter, "
            "and fxtune trains LoRA, rsLoRA and DoRA."
        )
    init = saved.get("init_lora_weights")
    found = {
        "r": saved.get("r"),
        "alpha": saved.get("lora_alpha"),
        "rslora": bool(saved.get("use_rslora")),
        "dora": bool(saved.get("use_dora")),
        "init": init if init in FACTORED else "default",
        "target_modules": _sorted(saved.get("target_modules")),
        "modules_to_save": _sorted(saved.get("modules_to_save")),
    }
    different = [
        f"  techniques.lora.{name}: {options[name]} in the recipe, {other} in the adapter"
        for name, other in found.items()
        if options[name] != other
    ]
    if different:
        raise ConfigError(
            f"model.adapter={adapter} was made with other options:\n"
            + "\n".join(different)
            + "\nSet these in the recipe as they are in the adapter."
        )
    peft_only = [
        f"  {name}: {_short(saved[name])}"
        for name in _PEFT_ONLY
        if name in saved and _comparable(saved[name]) != _comparable(getattr(lora_config, name, None))
    ]
    if peft_only:
        raise ConfigError(
            f"model.adapter={adapter} was made with options of peft that no recipe has:\n"
            + "\n".join(peft_only)
            + "\nWhere it can be merged into its base (fxtune merge), train a new adapter over that."
        )


def load_weights(model: Any, origin: Origin, name: str, key: str) -> None:
    """Load the adapter weights in `origin` into `model`. Raises StorageError unless all
    fit and are finite.
    """
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = origin.folder / WEIGHTS
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{key}={name}: {WEIGHTS} is broken: {error}. Use a complete copy of it.") from error
    wanted = adapter_weights(model)
    _drop_base_weights(stored, model, wanted, f"{key}={name}")
    common = stored.keys() & wanted.keys()
    shapes = {one for one in common if stored[one].shape != wanted[one].shape}
    troubles = [
        f"{len(names)} {what}, such as {sorted(names)[0]}"
        for names, what in (
            (wanted.keys() - stored.keys(), "weights are missing"),
            (stored.keys() - wanted.keys(), "weights have no place in the model"),
            (shapes, "weights have another shape"),
        )
        if names
    ]
    if troubles:
        raise StorageError(
            f"{key}={name} does not fit this model: {'; '.join(troubles)}. Is this the base that it was trained on?"
        )
    _require_finite(stored, wanted, file, f"{key}={name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        set_peft_model_state_dict(model, stored)


def _require_finite(
    stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], file: Path, place: str
) -> None:
    """Raise StorageError for weights that are NaN or infinite, or become so in the dtype of the model."""
    troubles = {}
    for name, weight in stored.items():
        if not weight.is_floating_point():
            troubles[name] = f"numbers of {weight.dtype}, which cannot be weights,"
        elif not weight.to(wanted[name].dtype).isfinite().all():
            finite = weight.double().isfinite().all()  # fp8 has no isfinite of its own
            troubles[name] = f"numbers too large for {wanted[name].dtype}" if finite else "NaN or infinite numbers"
    if troubles:
        first = min(troubles)
        raise StorageError(
            f"{place}: {troubles[first]} are in {len(troubles)} of its tensors, the first being {first} in {file}. "
            "Use another copy of the adapter, or an earlier checkpoint of it."
        )


def _drop_base_weights(
    stored: dict[str, torch.Tensor], model: nn.Module, wanted: Mapping[str, torch.Tensor], place: str
) -> None:
    """Remove the base's weights from `stored`: with an adapter on an embedding or a head, peft saves the base's
    weight, too.

    Raises StorageError if they are not those of `model`: the adapter belongs to the weights in its file.
    """
    base, others = model.state_dict(), []
    for name in [name for name in stored if name in base and name not in wanted]:
        in_file, in_model = stored[name], base[name].cpu()
        coarse = min(in_file.dtype, in_model.dtype, key=lambda dtype: (dtype.itemsize, str(dtype)))
        if in_file.shape == in_model.shape and torch.equal(in_file.to(coarse), in_model.to(coarse)):
            del stored[name]
        else:
            others.append(f"{name} ({tuple(in_file.shape)} in the file, {tuple(in_model.shape)} in the model)")
    if others:
        raise StorageError(
            f"{place} does not fit this model: weights of a base are saved with it, and {len(others)} of them are "
            f"not this base's, such as {others[0]}. Was its vocabulary resized, or its embedding trained? Save "
            "that base (save_pretrained) and use it as the base here."
        )


def adapter_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's tensors by their names in adapter_model.safetensors."""
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model_state_dict(model, save_embedding_layers=False)


def _are_names(value: Any) -> bool:
    names = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return names or value is None or isinstance(value, str)


def _comparable(value: Any) -> Any:
    """An option's value for comparison: as JSON has it, None for every empty value."""
    if value is None or value is False or value in ("", "none", [], {}):
        return None
    return sorted(value) if isinstance(value, (set, tuple)) else value


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _sorted(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else sorted(names or [])
