"""An adapter in a folder or on the hub, as peft saves one: its options are compared with what is asked for, its weights loaded.

Both fail loudly. peft builds what an adapter's config says, whatever the recipe does; of weights that are missing it only warns,
and weights that have no place it ignores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxtune.errors import ConfigError, StorageError
from fxtune.hub import Origin, fetch, locate_adapter

FILES = ("adapter_config.json", "adapter_model.safetensors")
FACTORED = ("pissa", "olora")
"""Ways to start an adapter that change the base as well, so whoever loads it must know."""


def start(model: Any, adapter: str, asked: Mapping[str, Any]) -> None:
    """Load the weights of `adapter` (a folder or a hub id) into `model`, whose adapters have the options `asked`, named as in
    techniques.lora (`init`: default, or one of FACTORED). Notes on the model where it started (`adapter_start`).

    Raises ConfigError where the adapter was made with other options, StorageError where it is broken or does not fit.
    """
    origin = locate_adapter(adapter)
    fetch(origin, FILES, key="model.adapter")
    try:
        theirs = json.loads((origin.folder / "adapter_config.json").read_text())
        if not isinstance(theirs, dict):
            raise ValueError("it holds no options")
    except (OSError, ValueError) as error:
        raise StorageError(f"model.adapter={adapter}: its adapter_config.json is broken: {error}. Use a complete copy of "
                           "it.") from error
    _agree(theirs, {**asked, "target_modules": _sorted(model.peft_config["default"].target_modules)}, adapter)
    load_weights(model, origin, adapter, key="model.adapter")
    model.adapter_start = adapter


def _agree(theirs: dict[str, Any], asked: Mapping[str, Any], adapter: str) -> None:
    """Every option that shapes the adapter must be what the recipe says: it must not say one thing and train another."""
    init = theirs.get("init_lora_weights")
    found = {"r": theirs.get("r"), "alpha": theirs.get("lora_alpha"), "rslora": bool(theirs.get("use_rslora")),
             "dora": bool(theirs.get("use_dora")), "init": init if init in FACTORED else "default",
             "target_modules": _sorted(theirs.get("target_modules")), "modules_to_save": _sorted(theirs.get("modules_to_save"))}
    unlike = [f"  techniques.lora.{name}: {asked[name]} in the recipe, {other} in the adapter"
              for name, other in found.items() if asked[name] != other]
    if theirs.get("peft_type") != "LORA" or theirs.get("rank_pattern") or theirs.get("alpha_pattern"):
        unlike.append(f"  it is a {theirs.get('peft_type')} adapter with patterns of rank or alpha that fxtune does not make")
    if unlike:
        raise ConfigError(f"model.adapter={adapter} was made with other options:\n" + "\n".join(unlike)
                          + "\nSet these in the recipe as they are in the adapter.")


def load_weights(model: Any, origin: Origin, name: str, key: str) -> None:
    """Put the adapter weights in `origin` into `model`, which has adapters of that shape. Raises StorageError unless all fit.

    peft itself only warns of weights that are missing and ignores those that have no place.
    """
    from peft import set_peft_model_state_dict
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        stored = load_file(origin.folder / "adapter_model.safetensors")
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{key}={name}: adapter_model.safetensors is broken: {error}. Use a complete copy of it.") from error
    wanted = weights_of(model)
    shapes = {one for one in stored.keys() & wanted.keys() if stored[one].shape != wanted[one].shape}
    troubles = [f"{len(names)} {what}, such as {sorted(names)[0]}" for names, what in (
        (wanted.keys() - stored.keys(), "weights are missing"),
        (stored.keys() - wanted.keys(), "weights have no place in the model"),
        (shapes, "weights have another shape")) if names]
    if troubles:
        raise StorageError(f"{key}={name} does not fit this model: {'; '.join(troubles)}. Is this the base that it was trained "
                           "on?")
    set_peft_model_state_dict(model, stored)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that they have in adapter_model.safetensors."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, save_embedding_layers=False)


def _sorted(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else sorted(names or [])
