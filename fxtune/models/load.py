"""From a hub id, a folder or an architecture to a model and its tokenizer, and from a trained model to a folder.

transformers loads a checkpoint whose weights do not fit by warning and inventing the rest. Here that is an error: every
weight that the architecture has comes from the checkpoint, every weight in the checkpoint has a place, and only
safetensors are read (a pickle can run code). What else a stranger's folder may try, inspection.py refuses.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import logging
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Optional

import torch

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, first_line
from fxtune.models import weights
from fxtune.models.model_card import write_card
from fxtune.models.untrusted import inspect_config, inspect_folder
from fxtune.system.atomic_files import replace_folder
from fxtune.system.hub import Origin, is_commit, locate, locate_adapter

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Init(str, Enum):
    pretrained = "pretrained"
    random = "random"


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass
class ModelConfig:
    path: Optional[str] = "builtin:tiny"
    """A folder, a hub id, or `builtin:tiny`, the small base model that ships with fxtune."""
    revision: Optional[str] = None
    """Commit, tag or branch of a hub model. A full commit hash is the only one that cannot change under you."""
    dtype: DType = DType.auto
    """dtype of the weights. `auto`: bfloat16 on a GPU that has it, float32 on a CPU."""
    init: Init = Init.pretrained
    """`random`: only the config is read from `path` (or `architecture`), the weights are drawn from run.seed."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """With init=random: a Hugging Face config written in the recipe. With `model_type` it stands alone (the sizes it leaves
    out are that type's defaults), without it is laid over the config of `path`."""
    adapter: Optional[str] = None
    """Start from this PEFT adapter's weights (a folder or a hub id). Not a resume: see run.resume. A RoPE scaling that it was
    trained with comes with it, from the config.json beside it."""
    tokenizer: Optional[str] = None
    """Where the tokenizer comes from, when not from `path`."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Needs a revision that is a full commit hash."""


def resolve_dtype(model: ModelConfig, world: World) -> torch.dtype:
    """The dtype that the weights will have. bfloat16 in hardware starts with compute capability 8.0 (Ampere)."""
    if model.dtype is not DType.auto:
        dtype: torch.dtype = getattr(torch, model.dtype.value)
        return dtype
    capable = world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) >= (8, 0)
    return torch.bfloat16 if capable else torch.float32


def load_config(model: ModelConfig) -> Any:
    """The Hugging Face config of the model, from its folder or from the recipe's `architecture`, with the RoPE scaling that
    `model.adapter` was trained with.

    Raises ConfigError for what the recipe got wrong, StorageError for a hub out of reach or a file that cannot be read.
    """
    _vet(model)
    quiet()
    # The adapter's weights come last, and a slip in its name is told first.
    adapter = locate_adapter(model.adapter) if model.adapter else None
    if "model_type" in model.architecture:
        config = _standalone(model.architecture)
    else:
        assert model.path is not None
        config = _read_config(locate(model.path, model.revision, code=model.trust_remote_code), model)
        config = _overlaid(config, model.architecture) if model.architecture else config
    return scaled_as(config, adapter) if adapter else config


def scaled_as(config: Any, adapter: Origin) -> Any:
    """A base's config with the RoPE parameters that `adapter` was trained with, as the config.json that save() lays beside an
    adapter has them; `config` itself where there is none.

    Adapted weights fit the frequencies that they were trained with, and under others they fail without a word. Raises
    ConfigError for the config of another kind of model, StorageError for one that cannot be read.
    """
    inspect_folder(adapter.folder, f"adapter {adapter.name}")
    file = adapter.folder / "config.json"
    if not file.exists():
        return config
    try:
        kind = json.loads(file.read_text())["model_type"]
        theirs = type(config).from_pretrained(adapter.folder).get_text_config() if kind == config.model_type else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            f"{file} cannot be used: {first_line(error)}. It holds the RoPE scaling that the adapter was trained "
            "with: use a complete copy of the adapter."
        ) from error
    if theirs is None:
        raise ConfigError(
            f"The adapter {adapter.name} was trained on a {kind} model, and its base here is a "
            f"{config.model_type}: give the base that it belongs to."
        )
    scaled = copy.deepcopy(config)
    ours = scaled.get_text_config()
    for name in ("rope_parameters", "max_position_embeddings"):
        if hasattr(theirs, name):
            setattr(ours, name, copy.deepcopy(getattr(theirs, name)))
    return scaled


def load_tokenizer(model: ModelConfig) -> Any:
    """The fast tokenizer of the model, with a pad token, and with no id that the model has no embedding for.

    A tokenizer without a pad token gets its end-of-sequence token as one (else its unknown token, else id 0); nothing is
    resized. That is safe here because no mask is ever derived from pad ids: targets are marked one by one, documents are
    kept apart by their positions, and generation passes its own attention mask.
    """
    from transformers import AutoTokenizer

    config = load_config(model)
    key, name = (
        ("model.tokenizer", model.tokenizer) if model.tokenizer else ("model.path", model.path or "builtin:tiny")
    )
    own = model.tokenizer is None
    origin = locate(name, model.revision if own and model.path else None, key, code=own and model.trust_remote_code)
    inspect_folder(origin.folder, f"{key}={name}")
    if not any((origin.folder / file).exists() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}={name}: {origin.folder} holds no tokenizer (no tokenizer.json). Put one there, or name one "
            "in model.tokenizer."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(origin.folder, trust_remote_code=own and model.trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise StorageError(
            f"{key}={name}: the tokenizer in {origin.folder} cannot be read: {first_line(error)}. Use a "
            "complete copy of it, or name another in model.tokenizer."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key}={name} has no fast tokenizer (no tokenizer.json), and fxtune needs its character offsets. "
            "Convert it, or name another in model.tokenizer."
        )
    largest, rows = max(tokenizer.get_vocab().values(), default=-1), config.get_text_config().vocab_size
    if largest >= rows:
        raise ConfigError(
            f"The tokenizer of {key}={name} has ids up to {largest}, but the model embeds only {rows} tokens "
            "(vocab_size). Use the tokenizer that belongs to the model (model.tokenizer), or a model with a "
            "larger vocab_size."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def build(model: ModelConfig, hf_config: Any, world: World, seed: int, shrinks: bool = False) -> Any:
    """The model of `hf_config` on world.device, its weights read from `model.path` or drawn from `seed`.

    The weights are made or read in their final dtype and on their final device: an 8B model in bfloat16 costs 16 GB there
    and nothing elsewhere. `shrinks`: whoever calls makes them smaller and then moves them, one by one, so they may lie in host
    memory, where a model larger than the card has room. `name_or_path` and `base_revision` of what is returned say where it
    came from, `config_edited` whether its config differs from the one found there.
    """
    quiet()
    dtype = resolve_dtype(model, world)
    drawing, code = model.init is Init.random, model.trust_remote_code
    if shrinks and not weights.made_there(drawing, hf_config, dtype, world, code):
        world = dataclasses.replace(world, device=torch.device("cpu"))
    if drawing:
        built = weights.draw(hf_config, dtype, world, seed, code)
        built.name_or_path, built.base_revision, built.config_edited = "", None, True
        return built
    assert model.path is not None
    origin = locate(model.path, model.revision, code=code)
    built = weights.read(origin, hf_config, dtype, world, code, model.path)
    built.name_or_path, built.base_revision = origin.name, origin.revision
    built.config_edited = hf_config.to_dict() != _read_config(origin, model).to_dict()
    return built


def save(model: Any, tokenizer: Any, folder: Path, card: dict[str, Any] | None = None) -> Path:
    """Write a trained model where plain peft or plain transformers loads it, and return `folder`.

    With adapters: PEFT's own layout (adapter_model.safetensors, adapter_config.json). Where the base's config was edited (RoPE
    scaling), PEFT's layout has no place for that: config.json beside it is the config to build the base with, as the card
    says and as scaled_as() does. Without adapters: the whole model in safetensors, its config.json with all of rope_parameters
    and the raised max_position_embeddings: the keys that transformers 5 and vLLM read. Tokenizer and model card (see card.py
    for what `card` may hold) lie beside both. The folder is staged and then renamed: it is whole or absent, and one that is
    there is replaced. Raises StorageError when the disk does not take it.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    staging, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    try:
        for leftover in (staging, old):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir(parents=True)
        if type(model).__module__.startswith("peft."):
            for adapter in model.peft_config.values():
                if isinstance(adapter.target_modules, set):  # whose order differs from process to process
                    adapter.target_modules = sorted(adapter.target_modules)
            # Left to itself peft asks the hub whether the base's vocabulary was resized. Ours never is.
            model.save_pretrained(staging, save_embedding_layers=False)
            if model.config_edited:
                model.config.save_pretrained(staging)
        else:
            model.save_pretrained(staging)
        try:
            tokenizer.save_pretrained(staging)
        except Exception as error:  # tokenizers has no class of its own for what a disk refuses
            if "os error" not in str(error):
                raise
            raise OSError(str(error)) from error
        write_card(
            staging,
            {"title": folder.name, "base": model.name_or_path, "revision": model.base_revision, **(card or {})},
        )
        for (
            file
        ) in staging.iterdir():  # safetensors makes its files readable by their owner alone; a model is to be shared
            file.chmod((staging / "README.md").stat().st_mode)
            with file.open("rb") as opened:
                os.fsync(
                    opened.fileno()
                )  # before the renaming: a power cut must not leave empty files under the final name
        replace_folder(staging, folder, old)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise StorageError(
            f"The trained model cannot be written to {folder}: {error}. Free space there or mend its permissions."
        ) from error
    return folder


def quiet() -> None:
    """Keep libraries' warnings and bars off the user's terminal: what matters in them is an error here."""
    import huggingface_hub
    import transformers

    # peft imports torchao and bitsandbytes where they are installed, and they tell of each extension built for others.
    for chatty in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()


def _vet(model: ModelConfig) -> None:
    if model.architecture and model.init is not Init.random:
        raise ConfigError(
            "model.architecture is read only with model.init=random. Set that, or remove the architecture."
        )
    if model.path is None and "model_type" not in model.architecture:
        raise ConfigError(
            "model.path is null and model.architecture has no model_type: name a model, or write an "
            "architecture (model_type and its sizes) with model.init=random."
        )
    local = model.path is None or model.path.startswith("builtin:") or os.path.exists(os.path.expanduser(model.path))
    if model.trust_remote_code and (local or not is_commit(model.revision)):
        raise ConfigError(
            "model.trust_remote_code=true runs Python code of the model's author. Pin what you have read: it "
            f"needs a hub id in model.path (here {model.path}) and its full 40-digit commit in model.revision "
            f"(here {model.revision})."
        )


def _read_config(origin: Origin, model: ModelConfig) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    inspect_folder(origin.folder, f"model.path={model.path}")
    if (origin.folder / "adapter_config.json").exists():
        raise ConfigError(
            f"model.path={model.path} is a PEFT adapter. Put its base model in model.path and this in model.adapter."
        )
    if not (origin.folder / "config.json").exists():
        raise ConfigError(
            f"model.path={model.path}: {origin.folder} holds no config.json, so it is not a Hugging Face model."
        )
    try:
        config = AutoConfig.from_pretrained(origin.folder, trust_remote_code=model.trust_remote_code)
    except (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        raise ConfigError(
            f"model.path={model.path}: {origin.folder / 'config.json'} cannot be used: {first_line(error)}. A "
            "model newer than this transformers needs a newer one; one with code of its own needs "
            "model.trust_remote_code."
        ) from error
    remote = model.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not remote:
        raise ConfigError(
            f"model.path={model.path} is a {config.model_type} model, which is no causal language model."
        )
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"model.path={model.path} is quantised already. Give the model that it was made from.")
    return config


def _standalone(architecture: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = architecture["model_type"]
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(str(kind), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, n=1)
        raise ConfigError(
            f"model.architecture.model_type={kind} is no causal language model that this transformers knows."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    values = {name: value for name, value in architecture.items() if name != "model_type"}
    return _constructed(CONFIG_MAPPING[kind], values, values)


def _overlaid(config: Any, changes: dict[str, Any]) -> Any:
    """`changes` over a config. What its author computed from a size that changes is dropped, so that it is computed anew."""
    values = config.to_dict()
    if {"hidden_size", "num_attention_heads"} & set(changes):
        values.pop("head_dim", None)
    if "num_hidden_layers" in changes:
        values.pop("layer_types", None)
    values.pop("model_type", None)
    return _constructed(type(config), {**values, **changes}, changes)


def _constructed(kind: Any, values: dict[str, Any], named: Iterable[str]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    inspect_config({name: values[name] for name in named}, "model.architecture")
    known = [*kind().to_dict(), *kind.attribute_map, "rope_theta", "rope_scaling"]
    for name in named:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"model.architecture.{name}: {kind.model_type} has no such key."
                + (f" Did you mean {near[0]}?" if near else "")
            )
    try:
        return kind(**values)
    except (ValueError, TypeError, KeyError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.architecture does not make a {kind.model_type}: {' '.join(str(error).split())}"
        ) from error
