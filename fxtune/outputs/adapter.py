"""Opens a LoRA adapter, from a folder or the hub, together with the base that the adapter names."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, UserError, readable, shortened
from fxtune.facts.options import DType
from fxtune.models import load as models
from fxtune.models.end_tokens import add_end_tokens, read_end_tokens
from fxtune.models.load import ModelConfig
from fxtune.models.peft_adapter import CONFIG, fetch_adapter, load_weights, read_options
from fxtune.models.prepared import PreparedModel
from fxtune.models.untrusted import inspect_folder
from fxtune.system.files.hub import Origin, locate
from fxtune.system.process.resource_limits import LimitExceeded, limit_resources
from fxtune.upstream.peft import alone
from fxtune.upstream.transformers import set_attention


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter with checked files, and the base that the adapter names."""

    name: str
    origin: Origin
    lora: Any
    model: ModelConfig
    """Where the base is, with its stored dtype."""
    hf_config: Any
    """The base's config, with the adapter's RoPE scaling and rows for the tokens that the adapter's run added."""
    tokenizer: Any

    @property
    def base(self) -> Origin:
        """Where the base's files are."""
        return locate(str(self.model.path), self.model.revision, code=self.model.trust_remote_code)

    def build_base(self, device: torch.device) -> PreparedModel:
        base = models.build(self.model, self.hf_config, World(device), seed=0)
        add_end_tokens(base, read_end_tokens(self.origin.folder))
        return base

    def adapt(self, base: Any) -> Any:
        """A model of peft: `base` with the adapter. Raises ConfigError if the two do not fit each other."""
        options = ("target_modules", "exclude_modules", "layers_pattern")
        patterns = {name: [value] for name in options if isinstance(value := getattr(self.lora, name, None), str)}
        for option in ("rank_pattern", "alpha_pattern"):
            patterns[option] = [rf"(?:.*\.)?({key})$" for key in getattr(self.lora, option, None) or {}]
        for option, given in patterns.items():
            try:
                with limit_resources():  # some regular expressions never end
                    for pattern in given:
                        for module, _ in base.named_modules():
                            re.fullmatch(pattern, module)
            except (re.error, LimitExceeded) as error:
                raise ConfigError(
                    f"adapter {self.name}: its {option} cannot be used as a pattern of names: {error}. Use another "
                    "copy of the adapter."
                ) from error
        try:
            with alone() as peft, warnings.catch_warnings(action="ignore"):
                adapted: Any = peft.get_peft_model(base, self.lora)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, NotImplementedError) as error:
            reason = shortened(error, 400).rstrip(".")
            raise ConfigError(
                f"adapter {self.name}: its {CONFIG} does not fit its base: {reason}. Use another copy of the adapter."
            ) from error
        load_weights(adapted, self.origin, self.name, key="adapter")
        return adapted


def open_adapter(name: str, use: str, trust_remote_code: bool = False) -> OpenedAdapter:
    """Check the files of an adapter (a folder or a hub id) and find its base. `use`: a word for messages (`merged`).

    Raises ConfigError if the adapter cannot be used or names no base, StorageError if a file cannot be read.
    """
    models.silence_libraries()
    origin = fetch_adapter(name, key="adapter")
    lora = _read_lora_config(origin, name)
    if not lora.base_model_name_or_path:
        raise ConfigError(f"{name} names no base model (it was trained on random weights), so it cannot be {use}.")
    source = {"path": lora.base_model_name_or_path, "revision": lora.revision, "trust_remote_code": trust_remote_code}
    try:
        hf_config = models.load_config(ModelConfig(**source))
    except (UserError, OSError) as error:
        kind = type(error) if isinstance(error, UserError) else ConfigError
        raise kind(
            f"adapter {name}: its base, as base_model_name_or_path in {origin.folder / CONFIG} names it: "
            f"{shortened(error, 400)} "
            "If the base has moved, write where it is into that file, and remove proof.json beside it."
        ) from error
    model = ModelConfig(**source, dtype=stored_dtype(hf_config, source["path"]))
    set_attention(hf_config, "eager")  # the attention kernels that the config names may not be installed
    own = str(origin.folder) if (origin.folder / "tokenizer_config.json").exists() else None
    hf_config = models.with_changes_of(origin, hf_config)
    tokenizer = models.load_tokenizer(ModelConfig(**source, tokenizer=own), hf_config)
    return OpenedAdapter(name, origin, lora, model, hf_config, tokenizer)


def stored_dtype(hf_config: Any, path: str) -> DType:
    """The dtype of the base's stored weights, from its config.json. The merged model keeps this dtype."""
    stored = str(hf_config.dtype or torch.float32).removeprefix("torch.")
    if stored not in (known := [kind.value for kind in DType if kind is not DType.auto]):
        raise ConfigError(
            f"The base {path} is stored in {stored[:40]} (dtype in its config.json); fxtune merges into "
            f"{', '.join(known)}. Save the base in one of these dtypes."
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
    broken = readable(f"{origin.folder / CONFIG} cannot be read", "Use a complete copy of the adapter.")
    with broken, warnings.catch_warnings(action="ignore"):
        return LoraConfig.from_pretrained(str(origin.folder))
