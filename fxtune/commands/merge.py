"""Fold an adapter into its base: one safetensors model that plain transformers loads, with no peft.

    fxtune merge runs/NAME/adapter FOLDER        fxtune merge +recipe=NAME

A weight W becomes W + alpha/r * B A. The sum is formed in float32 and rounded once to the dtype that the base is stored in,
a layer at a time, so a bfloat16 model costs no more memory than itself.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from fxtune import model as models
from fxtune.adapter_files import FILES, load_weights
from fxtune.config import Config
from fxtune.errors import ConfigError, StorageError
from fxtune.fence import Exceeded, fence
from fxtune.hub import Origin, fetch, locate_adapter
from fxtune.inspection import inspect_folder
from fxtune.model import DType, ModelConfig
from fxtune.world import World


def run(config: Config) -> Path:
    """Merge the adapter of this recipe's newest run into the folder merged beside it. Raises ConfigError where there is none."""
    root = Path(config.run.dir) if config.run.dir else Path("runs") / config.run.name
    folders = [root] if config.run.dir else [path for path in root.parent.glob(f"{root.name}*") if _is_run(path.name, root.name)]
    trained = [path for path in folders if (path / "adapter").is_dir()]
    if not trained:
        raise ConfigError(f"No adapter lies in {root}: train the recipe first, or name one: fxtune merge ADAPTER FOLDER.")
    newest = max(trained, key=lambda path: (path / "adapter").stat().st_mtime)
    return merge(newest / "adapter", newest / "merged", trust_remote_code=config.model.trust_remote_code)


def merge(adapter: Path | str, out: Path | str, *, trust_remote_code: bool = False) -> Path:
    """Write an adapter (a folder or a hub id) and the base that it names as one model into `out`, and return that.

    Raises ConfigError for what is no adapter or names no base, StorageError where `out` exists or weights do not fit.
    """
    out = Path(out)
    if out.exists():
        raise StorageError(f"{out} exists, and merging never writes over anything. Name a new folder.")
    models.quiet()
    origin = locate_adapter(str(adapter), key="adapter")
    fetch(origin, FILES, key="adapter")
    description = _describe(origin)
    if not description.base_model_name_or_path:
        raise ConfigError(f"{adapter} names no base model (it was trained on random weights), so there is nothing to merge it "
                          "into.")
    model = ModelConfig(path=description.base_model_name_or_path, revision=description.revision,
                        trust_remote_code=trust_remote_code)
    hf_config = models.load_config(model)
    stored = hf_config.dtype or torch.float32
    model.dtype = DType(str(stored).removeprefix("torch."))
    base = models.build(model, models.scaled_as(hf_config, origin), World(torch.device("cpu")), seed=0)
    name, revision = base.name_or_path, base.base_revision
    merged = _fold(base, description, origin, str(adapter)).to(getattr(torch, model.dtype.value))
    merged.name_or_path, merged.base_revision = name, revision
    tokens = ModelConfig(path=model.path, revision=model.revision, trust_remote_code=trust_remote_code,
                         tokenizer=str(origin.folder) if (origin.folder / "tokenizer_config.json").exists() else None)
    return models.save(merged, models.load_tokenizer(tokens), out, card={"adapter": origin.name})


def _describe(origin: Origin) -> Any:
    from peft import LoraConfig, PeftConfig

    inspect_folder(origin.folder, f"adapter {origin.name}")
    try:
        description = PeftConfig.from_pretrained(str(origin.folder))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{origin.folder / 'adapter_config.json'} cannot be read: {error}. Use a complete copy of the "
                           "adapter.") from error
    if not isinstance(description, LoraConfig):
        raise ConfigError(f"{origin.name} is a {description.peft_type} adapter; fxtune merges LoRA, rsLoRA and DoRA.")
    return description


def _fold(base: Any, description: Any, origin: Origin, name: str) -> Any:
    import peft
    from peft.tuners.lora import LoraLayer

    _try_patterns(base, description, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted: Any = peft.get_peft_model(base, description)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ConfigError(f"adapter {name}: what its adapter_config.json describes does not fit its base: {error}. Use "
                              "another copy of the adapter.") from error
    load_weights(adapted, origin, name, key="adapter")
    for layer in [module for module in adapted.modules() if isinstance(module, LoraLayer)]:
        base_layer: Any = layer.get_base_layer()  # a linear, or a mixture's experts, whose weights have other names
        dtypes = {name: weight.dtype for name, weight in base_layer.named_parameters(recurse=False)}
        for weight in base_layer.parameters(recurse=False):
            weight.data = weight.data.float()
        layer.merge(safe_merge=True)
        for name, weight in base_layer.named_parameters(recurse=False):
            weight.data = weight.data.to(dtypes[name])
    return adapted.unload()


def _try_patterns(base: Any, description: Any, name: str) -> None:
    """Match an adapter's regular expressions with the names that peft will match them with: some would never come to an end."""
    found = {option: getattr(description, option, None) for option in ("target_modules", "exclude_modules", "layers_pattern")}
    patterns = {option: [value] if isinstance(value, str) else [] for option, value in found.items()}
    for option in ("rank_pattern", "alpha_pattern"):
        patterns[option] = [rf"(?:.*\.)?({key})$" for key in getattr(description, option, None) or {}]
    for option, given in patterns.items():
        try:
            with fence():
                for pattern in given:
                    for module, _ in base.named_modules():
                        re.fullmatch(pattern, module)
        except (re.error, Exceeded) as error:
            raise ConfigError(f"adapter {name}: its {option} cannot be used as a pattern of names: {error}. Use another copy of "
                              "the adapter.") from error


def _is_run(name: str, root: str) -> bool:
    rest = name.removeprefix(root)
    return not rest or (rest.startswith("-") and rest[1:].isdigit())
