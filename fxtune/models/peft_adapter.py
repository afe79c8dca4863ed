"""Loads an adapter that peft saved, from a folder or the hub, after comparing its options with the recipe's.

Any difference is an error. peft itself follows the adapter's config, drops unknown keys, only warns of missing
weights, ignores weights that have no place in the model, and accepts NaN.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from fxtune.errors import ConfigError, StorageError, readable, shortened
from fxtune.models.proof import require_unchanged
from fxtune.models.weights import misfits
from fxtune.system.files.hub import Origin, fetch, locate_adapter
from fxtune.system.terminal.console import say

CONFIG, WEIGHTS = FILES = ("adapter_config.json", "adapter_model.safetensors")
FACTORED = ("pissa", "olora")
"""Values of `init` that also change the base. Such an adapter fits only the changed base."""
TARGETS = ("target_modules", "exclude_modules", "layers_to_transform")
"""Options that name the modules with adapters."""
BESIDE = "(?#no expert)"
"""The beginning of each text that matching_modules() adds to a pattern: a comment in a regular expression."""
ADAPTER = "default"
"""peft's name of the only adapter."""
SCORES = "SEQ_CLS"
"""peft's name for the task of adapters with a head that scores documents."""
_PEFT_ONLY = (
    "bias",
    "lora_bias",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "use_bdlora",
)
"""Options of peft that change an adapter but are not keys of a recipe. peft sets some of these options by itself."""


def load_adapter(model: Any, adapter: str, options: Mapping[str, Any]) -> None:
    """Load the weights of `adapter` (a folder or a hub id) into `model`.

    `options`: the options of the model's adapters, named as in techniques.lora. `init` is default or one of FACTORED.
    Raises ConfigError if the adapter was made with other options, StorageError if the adapter is damaged or does not
    fit.
    """
    origin, key = fetch_adapter(adapter), "model.adapter"
    saved, lora_config = read_options(origin, adapter, key), model.peft_config["default"]
    if lora_config.task_type == SCORES != saved.get("task_type"):
        raise ConfigError(
            f"{key}={adapter} has no head that scores documents, and the objective trains one. fxtune merge writes "
            "its base with this adapter in it: train a new one over that (model.path)."
        )
    patterns = {name: _as_chosen(getattr(lora_config, name)) for name in ("rank_pattern", "alpha_pattern")}
    options = {**options, **patterns, "target_modules": _sorted(lora_config.target_modules)}
    options["modules_to_save"] = sorted({*_sorted(lora_config.modules_to_save)})
    if _modules_in_file(origin) == {name.rpartition(".lora_")[0] for name in adapter_weights(model)}:
        # The file has the same modules as the model, so their names in the options do not matter.
        options = {name: value for name, value in options.items() if name not in TARGETS}
    _require_same_options(saved, options, lora_config, adapter)
    load_weights(model, origin, adapter, key)
    trained_on, base = saved.get("base_model_name_or_path") or "", getattr(model, "name_or_path", "")
    # A folder that moved keeps its name.
    if trained_on and base and Path(trained_on).name.lower() != Path(base).name.lower():
        say(f"model.adapter={adapter} was trained on {trained_on}; here it is over {base}, which has the same shapes.")


def merged(model: Any, adapter: str, key: str) -> Any:
    """`model`, a base without adapters, with the weights of `adapter` added to its own. `key`: as the user named it.

    Raises ConfigError if the adapter has no options that peft can merge, StorageError if it does not fit.
    """
    from peft import LoraConfig, get_peft_model

    origin = fetch_adapter(adapter, key)
    if (kind := read_options(origin, adapter, key)["peft_type"]) != "LORA":
        raise ConfigError(f"{key}={adapter} is a {kind} adapter, and fxtune merges LoRA. Give the whole model.")
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(model, LoraConfig.from_pretrained(str(origin.folder)))
    load_weights(adapted, origin, adapter, key)
    return adapted.merge_and_unload()


def require_same_options(adapter: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if `adapter` was made with other options than `options`; see load_adapter()."""
    saved = read_options(fetch_adapter(adapter), adapter, "model.adapter")
    _require_same_options(saved, options, None, adapter)


def fetch_adapter(name: str, key: str = "model.adapter") -> Origin:
    """Find an adapter (a folder or a hub id) and fetch its two files. `key`, `name`: as the user wrote them.

    Raises the errors of locate_adapter(), and StorageError if a file is missing or has changed since it was proven on
    saving.
    """
    origin = locate_adapter(name, key)
    pickles = sorted(path.name for path in origin.folder.glob("adapter_model*.bin"))
    if origin.revision is None and pickles and not (origin.folder / WEIGHTS).exists():
        raise StorageError(
            f"{key}={name}: {origin.folder / WEIGHTS} is missing. {pickles[0]} in the same folder is a pickle, "
            "which can run code when it is read. If you trust it, convert it: PeftModel.from_pretrained and then "
            "save_pretrained write safetensors."
        )
    fetch(origin, FILES, key=key)
    require_unchanged(origin, f"{key}={name}")
    return origin


def read_options(origin: Origin, name: str, key: str) -> dict[str, Any]:
    """Read the options in an adapter's adapter_config.json. `key`, `name`: as the user wrote them.

    Raises StorageError if the file cannot be read, ConfigError if options are invalid or peft would ignore them.
    """
    place = f"{key}={name}: {origin.folder / CONFIG}"
    with readable(f"{place} cannot be read", "Use a complete copy of the adapter."):
        saved = json.loads((origin.folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(saved, dict):
            raise ValueError("it holds no options")
        if not isinstance(saved.get("peft_type"), str):
            raise ValueError("it does not say what kind of adapter it is (peft_type)")
    for option, wrong in _wrong_values(saved):
        raise ConfigError(f"{place}: {option} {wrong}. Use another copy of the adapter.")
    if str(saved.get("init_lora_weights")).startswith("pissa_niter_"):
        raise ConfigError(
            f"{place}: init_lora_weights={saved['init_lora_weights']} subtracts a random part of the base, which "
            "cannot be computed again from the base. Where the adapter was trained, save it as plain LoRA: peft's "
            "save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    if unknown := _unknown_options(saved):
        from peft import __version__

        raise ConfigError(
            f"{place} has options that peft {__version__} does not know and would drop: {', '.join(unknown)}. "
            "Install the peft that saved it; or remove them there, if you know that they change nothing."
        )
    return saved


def _wrong_values(saved: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (option and value, what is wrong) for each option with which peft would fail or compute nonsense."""
    for option in ("target_modules", "exclude_modules", "modules_to_save"):
        value = saved.get(option)
        is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
        if not (is_list or value is None or isinstance(value, str)):
            yield f"{option}={shortened(value)}", "is not a list of names"
    tokens = saved.get("trainable_token_indices") or []
    tables = tokens.values() if isinstance(tokens, dict) else [tokens]
    if not all(isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids) for ids in tables):
        yield f"trainable_token_indices={shortened(tokens)}", "is not a list of token ids"
    alphas = {"lora_alpha": saved.get("lora_alpha")}
    for option in ("rank_pattern", "alpha_pattern"):
        value = saved.get(option) or {}
        if not isinstance(value, dict):
            yield f"{option}={shortened(value)}", "is not a table"
        elif option == "alpha_pattern":
            alphas |= {f"{option}.{module}": alpha for module, alpha in value.items()}
    for option, value in alphas.items():
        if isinstance(value, (int, float)) and not abs(value) < torch.finfo(torch.float32).max:
            yield f"{option}={shortened(value)}", "is no number to scale an adapter by"


def _unknown_options(saved: dict[str, Any]) -> list[str]:
    """Options with a value that LoraConfig does not know; empty for adapters that are not LoRA."""
    from peft import LoraConfig

    known = {field.name for field in dataclasses.fields(LoraConfig)}
    unknown = [shortened(option) for option, value in saved.items() if value and option not in known]
    return sorted(unknown) if saved["peft_type"] == "LORA" else []


def _require_same_options(saved: dict[str, Any], options: Mapping[str, Any], lora_config: Any, adapter: str) -> None:
    """Raise ConfigError if an option `saved` with an adapter differs from the same option in the recipe's `options`.

    `lora_config`: the recipe's options as peft's LoraConfig; None before it is made.
    """
    if saved["peft_type"] != "LORA":
        raise ConfigError(
            f"model.adapter={adapter} cannot be trained here: it is a {shortened(saved['peft_type'])} adapter, "
            "and fxtune trains LoRA, rsLoRA and DoRA."
        )
    init, layers = saved.get("init_lora_weights"), saved.get("layers_to_transform")
    found = {
        "r": saved.get("r"),
        "alpha": saved.get("lora_alpha"),
        "rslora": bool(saved.get("use_rslora")),
        "dora": bool(saved.get("use_dora")),
        "init": init if init in FACTORED else "default",
        "target_modules": _sorted(saved.get("target_modules")),
        "exclude_modules": _sorted(saved.get("exclude_modules")),
        "layers_to_transform": [layers] if isinstance(layers, int) else layers or [],
        "rank_pattern": _as_chosen(saved.get("rank_pattern")),
        "alpha_pattern": _as_chosen(saved.get("alpha_pattern")),
        "modules_to_save": sorted({*_sorted(saved.get("modules_to_save"))}),
    }
    different = [
        f"  techniques.lora.{name}: {options[name]} in the recipe, {other} in the adapter\n"
        for name, other in found.items()
        if name in options and options[name] != other
    ]
    if different:
        merge = "fxtune merge writes its base with this adapter in it: train a new one over that (model.path)"
        raise ConfigError(
            f"model.adapter={adapter} was made with other options:\n{''.join(different)}"
            "To train this adapter further, set these in the recipe as they are in the adapter. "
            + (
                f"An adapter's rank cannot change: for rank {options['r']}, {merge}."
                if found["r"] != options["r"]
                else ""
            )
        )
    if lora_config is None:
        return
    others = ("target_parameters", "layers_pattern") if "target_modules" in options else ()
    peft_only = [
        f"  {name}: {shortened(saved[name])}\n"
        for name in (*_PEFT_ONLY, *others)
        if name in saved and comparable(saved[name]) != comparable(getattr(lora_config, name, None))
    ]
    if peft_only:
        raise ConfigError(
            f"model.adapter={adapter} was made with options of peft that no recipe has:\n{''.join(peft_only)}"
            "Where it can be merged into its base (fxtune merge), train a new adapter over that."
        )


def load_weights(model: Any, origin: Origin, name: str, key: str) -> None:
    """Load the adapter weights in `origin` into `model`. Raises StorageError if a weight does not fit or is not
    finite."""
    from peft import set_peft_model_state_dict

    file, place = origin.folder / WEIGHTS, f"{key}={name}"
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise StorageError(f"{place}: {WEIGHTS} is broken: {error}. Use a complete copy of it.") from error
    wanted = adapter_weights(model)
    _drop_base_weights(stored, model, wanted, place)
    shapes = {weight for weight in stored.keys() & wanted.keys() if stored[weight].shape != wanted[weight].shape}
    troubles = misfits(
        ("weights are missing", wanted.keys() - stored.keys()),
        ("weights have no place in the model", stored.keys() - wanted.keys()),
        ("weights have another shape", shapes),
    )
    if troubles:
        first = min(shapes, default="")
        sizes = f" ({tuple(stored[first].shape)} in the file, {tuple(wanted[first].shape)} here)" if shapes else ""
        experts = ", with as many experts" if ".experts." in first else ""
        raise StorageError(
            f"{place} does not fit this model: {troubles}{sizes}. Is this the base that it was trained on{experts}?"
        )
    _require_finite(stored, wanted, file, place)
    with warnings.catch_warnings(action="ignore"):
        set_peft_model_state_dict(model, stored)


def lost_on_loading(model: Any) -> list[str]:
    """Modules whose adapters peft would drop on loading, because it renames the adapter's tensors as transformers
    renames tensors in the family's files. Call this on a PEFT model whose modules are peft's own. Nothing is loaded.
    """
    from peft import set_peft_model_state_dict

    found: dict[str, torch.Tensor] = {}

    def receive(state: Mapping[str, torch.Tensor], **_: Any) -> None:
        found.update(state)

    stored = {name: tensor.to("meta") for name, tensor in adapter_weights(model).items()}
    model.load_state_dict = receive
    try:
        with warnings.catch_warnings(action="ignore"):
            set_peft_model_state_dict(model, stored)
    finally:
        del model.load_state_dict
    names = [name for name, _ in model.named_parameters() if ".lora_" in name and name not in found]
    return sorted({name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names})


def _require_finite(
    stored: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], file: Path, place: str
) -> None:
    """Raise StorageError if a weight is NaN or infinite, or becomes infinite in the dtype of the model."""
    troubles = {}
    for name, weight in stored.items():
        if not weight.is_floating_point():
            troubles[name] = f"numbers of {weight.dtype}, which cannot be weights,"
        elif not weight.to(wanted[name].dtype).isfinite().all():
            finite = weight.double().isfinite().all()  # fp8 has no isfinite
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
    """Remove the base's weights from `stored`. peft also saves these if an embedding or a head has an adapter.

    Raises StorageError if these differ from the weights of `model`, because the adapter was trained on the file's
    weights.
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


def adapter_weights(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors by their names in its file."""
    from peft import get_peft_model_state_dict

    with warnings.catch_warnings(action="ignore"):
        return get_peft_model_state_dict(model, save_embedding_layers=False)


def matching_modules(patterns: Mapping[str, Any], default: Any, modules: Sequence[str]) -> dict[str, Any]:
    """Rewrite `patterns` for ranks or alphas so that each pattern matches a module, and no module or tensor of experts
    gets another value. peft warns of a pattern that matches no module, even if it matches a tensor of experts.

    Each pattern that matches no module gets the first of `modules` as an alternative. A pattern before all others
    keeps that module's own value. `default`: the value of modules that no pattern matches.
    """

    def matches(pattern: str, module: str) -> bool:  # as peft does
        return re.match(rf"(.*\.)?({pattern})$", module) is not None

    others = [pattern for pattern in patterns if not any(matches(pattern, module) for module in modules)]
    if not others or not modules:
        return dict(patterns)
    own = next((value for pattern, value in patterns.items() if matches(pattern, modules[0])), default)
    beside = BESIDE + re.escape(modules[0])
    found = {f"{name}|{beside}" if name in others else name: value for name, value in patterns.items()}
    return {beside: own, **found}


def _as_chosen(patterns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The patterns before matching_modules() changed them."""
    kept = {name.partition(f"|{BESIDE}")[0]: value for name, value in (patterns or {}).items()}
    return {name: value for name, value in kept.items() if not name.startswith(BESIDE)}


def _modules_in_file(origin: Origin) -> set[str]:
    """The modules that have an adapter in the file of weights; empty if that file cannot be read."""
    try:
        with safe_open(origin.folder / WEIGHTS, "pt") as stored:
            return {name.rpartition(".lora_")[0] for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return set()


def comparable(value: Any) -> Any:
    """An option's value for comparison: in JSON's types, with None for every empty value."""
    if value is None or value is False or value in ("", "none", [], {}):
        return None
    return sorted(value) if isinstance(value, (set, tuple)) else value


def _sorted(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else sorted(names or [])
