"""An adapter in a folder or on the hub, as peft saves one: its options are compared with what is asked for, its weights loaded.

Both fail loudly. peft builds what an adapter's config says, whatever the recipe does. Keys that it does not know it leaves out,
of weights that are missing it only warns, weights that have no place it ignores, and NaN it takes for a number.
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
"""Ways to start an adapter that change the base as well, so whoever loads it must know."""
_NOT_OURS = (
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
"""Options of peft's that change what an adapter is or computes, and that no recipe has: peft fills in some of them by itself."""


def start(model: Any, adapter: str, asked: Mapping[str, Any]) -> None:
    """Load the weights of `adapter` (a folder or a hub id) into `model`, whose adapters have the options `asked`, named as in
    techniques.lora (`init`: default, or one of FACTORED). Notes on the model where it started (`adapter_start`).

    Raises ConfigError where the adapter was made with other options, StorageError where it is broken or does not fit.
    """
    origin = locate_adapter(adapter)
    fetch_adapter(origin, adapter, key="model.adapter")
    theirs, ours = read_options(origin, adapter, key="model.adapter"), model.peft_config["default"]
    _agree(theirs, {**asked, "target_modules": _sorted(ours.target_modules)}, ours, adapter)
    load_weights(model, origin, adapter, key="model.adapter")
    model.adapter_start = adapter
    trained_on, here = theirs.get("base_model_name_or_path") or "", getattr(model, "name_or_path", "")
    if (
        trained_on and here and Path(trained_on).name.lower() != Path(here).name.lower()
    ):  # a folder that moved keeps its name
        say(f"model.adapter={adapter} was trained on {trained_on}; here it is over {here}, which has the same shapes.")


def fetch_adapter(origin: Origin, name: str, key: str) -> None:
    """Make the two files of an adapter local. `key`, `name`: what the user calls it. Raises StorageError where one is missing."""
    pickles = sorted(path.name for path in origin.folder.glob("adapter_model*.bin"))
    if origin.revision is None and pickles and not (origin.folder / WEIGHTS).exists():
        raise StorageError(
            f"{key}={name}: {origin.folder / WEIGHTS} is missing. {pickles[0]} beside it is a pickle, which "
            "can run code when it is read; fxtune reads safetensors only. If you trust it, convert it: "
            "PeftModel.from_pretrained and then save_pretrained write safetensors."
        )
    fetch(origin, FILES, key=key)


def read_options(origin: Origin, name: str, key: str) -> dict[str, Any]:
    """What the adapter_config.json in `origin` says. `key`, `name`: what the user calls the adapter.

    Raises StorageError for a file that cannot be read, ConfigError for options that cannot be meant, or that peft would not obey.
    """
    file = origin.folder / CONFIG
    told = f"{key}={name}: {file}"
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(theirs, dict):
            raise ValueError("it holds no options")
    except (OSError, ValueError) as error:
        raise StorageError(f"{told} cannot be read: {error}. Use a complete copy of the adapter.") from error
    if not isinstance(theirs.get("peft_type"), str):
        raise StorageError(
            f"{told} cannot be read: it does not say what kind of adapter it is (peft_type). Use a complete "
            "copy of the adapter."
        )
    for option in ("target_modules", "exclude_modules", "modules_to_save"):
        if not _are_names(theirs.get(option)):
            raise ConfigError(
                f"{told}: {option}={_short(theirs[option])} is no list of names. Use another copy of the adapter."
            )
    for option in ("rank_pattern", "alpha_pattern"):
        if not isinstance(theirs.get(option) or {}, dict):
            raise ConfigError(
                f"{told}: {option}={_short(theirs[option])} is no table. Use another copy of the adapter."
            )
    alphas = {f"alpha_pattern.{module}": value for module, value in (theirs.get("alpha_pattern") or {}).items()}
    for option, value in {"lora_alpha": theirs.get("lora_alpha"), **alphas}.items():
        if isinstance(value, (int, float)) and not abs(value) < torch.finfo(torch.float32).max:
            raise ConfigError(
                f"{told}: {option}={_short(value)} is no number to scale an adapter by. Use another copy of the "
                "adapter."
            )
    if str(theirs.get("init_lora_weights")).startswith("pissa_niter_"):
        raise ConfigError(
            f"{told}: init_lora_weights={theirs['init_lora_weights']} took a part out of the base that was found "
            "with random numbers, so nobody who has the base alone finds it again. Where the adapter was trained, "
            "save it as plain LoRA: peft's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    if strange := _unknown(theirs):
        from peft import __version__

        raise ConfigError(
            f"{told} has options that peft {__version__} does not know and would leave out: {', '.join(strange)}. "
            "Install the peft that saved it; or remove them there, if you know that they change nothing."
        )
    return theirs


def _unknown(theirs: dict[str, Any]) -> list[str]:
    """Options that are set and that a LoraConfig does not have; those of other kinds of adapters are not looked at."""
    from peft import LoraConfig

    known = {field.name for field in dataclasses.fields(LoraConfig)}
    return (
        sorted(_short(option) for option, value in theirs.items() if value and option not in known)
        if theirs.get("peft_type") == "LORA"
        else []
    )


def _agree(theirs: dict[str, Any], asked: Mapping[str, Any], ours: Any, adapter: str) -> None:
    """Every option that shapes the adapter must be what the recipe says: it must not say one thing and train another.

    `ours`: the LoraConfig that peft has for what `asked` asks for.
    """
    if theirs.get("peft_type") != "LORA":
        raise ConfigError(
            f"model.adapter={adapter} cannot be trained here: it is a {_short(theirs.get('peft_type'))} adapter, "
            "and fxtune trains LoRA, rsLoRA and DoRA."
        )
    init = theirs.get("init_lora_weights")
    found = {
        "r": theirs.get("r"),
        "alpha": theirs.get("lora_alpha"),
        "rslora": bool(theirs.get("use_rslora")),
        "dora": bool(theirs.get("use_dora")),
        "init": init if init in FACTORED else "default",
        "target_modules": _sorted(theirs.get("target_modules")),
        "modules_to_save": _sorted(theirs.get("modules_to_save")),
    }
    unlike = [
        f"  techniques.lora.{name}: {asked[name]} in the recipe, {other} in the adapter"
        for name, other in found.items()
        if asked[name] != other
    ]
    if unlike:
        raise ConfigError(
            f"model.adapter={adapter} was made with other options:\n"
            + "\n".join(unlike)
            + "\nSet these in the recipe as they are in the adapter."
        )
    foreign = [
        f"  {name}: {_short(theirs[name])}"
        for name in _NOT_OURS
        if name in theirs and _plain(theirs[name]) != _plain(getattr(ours, name, None))
    ]
    if foreign:
        raise ConfigError(
            f"model.adapter={adapter} was made with options of peft's that no recipe has:\n"
            + "\n".join(foreign)
            + "\nWhere it can be merged into its base (fxtune merge), train a new adapter over that."
        )


def load_weights(model: Any, origin: Origin, name: str, key: str) -> None:
    """Put the adapter weights in `origin` into `model`, which has adapters of that shape. Raises StorageError unless all fit, and
    all of them are finite numbers.

    peft itself only warns of weights that are missing and ignores those that have no place.
    """
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = origin.folder / WEIGHTS
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{key}={name}: {WEIGHTS} is broken: {error}. Use a complete copy of it.") from error
    wanted = weights_of(model)
    _leave_out_the_base_s(stored, model, wanted, f"{key}={name}")
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
    stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], file: Path, told: str
) -> None:
    """Refuse weights that training, or a sum with the base, would make NaN of."""
    troubles = {}
    for name, weight in stored.items():
        if not weight.is_floating_point():
            troubles[name] = f"numbers of {weight.dtype}, which are no weights,"
        elif not weight.to(wanted[name].dtype).isfinite().all():
            whole = weight.double().isfinite().all()  # fp8 has no isfinite of its own
            troubles[name] = f"numbers too large for {wanted[name].dtype}" if whole else "NaN or infinite numbers"
    if troubles:
        first = min(troubles)
        raise StorageError(
            f"{told}: {troubles[first]} are in {len(troubles)} of its tensors, the first being {first} in {file}. "
            "Use another copy of the adapter, or an earlier checkpoint of it."
        )


def _leave_out_the_base_s(
    stored: dict[str, torch.Tensor], model: nn.Module, wanted: Mapping[str, torch.Tensor], told: str
) -> None:
    """Take the base's own weights out of `stored`: beside adapters on an embedding or a head peft saves what they are over.

    Raises StorageError where they are not those of `model`: the adapter belongs to what is in its file, of which the model knows
    nothing.
    """
    base, others = model.state_dict(), []
    for name in [name for name in stored if name in base and name not in wanted]:
        theirs, ours = stored[name], base[name].cpu()
        coarse = min(theirs.dtype, ours.dtype, key=lambda dtype: (dtype.itemsize, str(dtype)))
        if theirs.shape == ours.shape and torch.equal(theirs.to(coarse), ours.to(coarse)):
            del stored[name]
        else:
            others.append(f"{name} ({tuple(theirs.shape)} in the file, {tuple(ours.shape)} in the model)")
    if others:
        raise StorageError(
            f"{told} does not fit this model: weights of a base are saved with it, and {len(others)} of them are "
            f"not this base's, such as {others[0]}. Was its vocabulary resized, or its embedding trained? Save "
            "that base (save_pretrained), and give it in place of this one."
        )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that they have in adapter_model.safetensors."""
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model_state_dict(model, save_embedding_layers=False)


def _are_names(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(one, str) for one in value))
    )


def _plain(value: Any) -> Any:
    """An option's value for comparison: as JSON has it, nothing for whatever stands for nothing."""
    if value is None or value is False or value in ("", "none", [], {}):
        return None
    return sorted(value) if isinstance(value, (set, tuple)) else value


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _sorted(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else sorted(names or [])
