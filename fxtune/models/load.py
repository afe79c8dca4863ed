"""Builds a model and its tokenizer from a hub id, a folder or an architecture in the recipe.

If weights do not fit a checkpoint's config, transformers warns and draws the rest at random. Here that is an error
(weights.py). Only safetensors are read, because a pickle can run code. untrusted.py refuses other attacks by a
stranger's folder.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Optional, TypeVar

import torch

from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HubError, StorageError, did_you_mean, first_line, readable, shortened
from fxtune.facts.options import DType, WeightFormat
from fxtune.models import drawn_shards, mixers, shards, weights
from fxtune.models.added_tokens import add_tokens, grow, rows_for
from fxtune.models.kinds.decoder import PROCESSORS, Decoder
from fxtune.models.kinds.known import families, kind_of, why_none, with_head, with_head_of_task
from fxtune.models.kinds.scorer import SCORE_WORDS
from fxtune.models.mtp import mtp_tensors
from fxtune.models.peft_adapter import CONFIG
from fxtune.models.prepared import PreparedModel
from fxtune.models.proof import PROOF, require_unchanged
from fxtune.models.shipped import config_without_hub
from fxtune.models.untrusted import inspect_config, inspect_folder, named_code
from fxtune.system.files import remote_code
from fxtune.system.files.hub import ModelSource, Origin, is_commit, locate, locate_all
from fxtune.system.terminal.library_log import take_loggers
from fxtune.system.terminal.progress import phase
from fxtune.upstream.transformers import forget_conversions, read_processor

QUANTIZATION = "quantization_config"
"""The key of a config.json that describes how its weights are quantized."""
FEW = 8
"""How many tokens an error lists."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Init(str, Enum):
    pretrained = "pretrained"
    random = "random"


@dataclass
class ModelConfig:
    key: ClassVar[str] = "model.path"
    """The recipe's key that gives `path`, for messages."""
    path: Optional[str] = "builtin:tiny"
    """A folder, a hub id, `builtin:tiny`, the small base model that ships with fxtune, or `builtin:tiny-vision`, which
    also reads images."""
    revision: Optional[str] = None
    """Commit, tag or branch of a hub model. Only a full commit hash cannot change."""
    dtype: DType = DType.auto
    """dtype of the weights. `auto`: bfloat16 on a GPU that supports it, float32 on a CPU."""
    init: Init = Init.pretrained
    """`random`: read only the config from `path` (or `architecture`), and draw the weights from run.seed."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """With init=random: a Hugging Face config in the recipe. With `model_type` it is a complete config (other keys
    have that type's defaults); without it, it overrides keys of the config of `path`."""
    adapter: Optional[str] = None
    """Start from the weights of this PEFT adapter (a folder or a hub id), with the RoPE scaling in its config.json.
    This does not resume a run: see run.resume."""
    tokenizer: Optional[str] = None
    """A folder or a hub id for the tokenizer; null: the tokenizer of `path`."""
    add_tokens: list[str] = field(default_factory=list)
    """Special tokens to add to the tokenizer. Their rows of the embedding and the head are spare rows of the base, or
    new rows that start as the mean of all rows; adapters train these rows as techniques.lora.train_tokens."""
    trust_remote_code: bool = False
    """Run Python code that comes with a hub model. Needs a revision that is a full commit hash."""

    @property
    def on_hub(self) -> bool:
        path = self.path or ""
        return bool(path) and not path.startswith("builtin:") and not os.path.exists(os.path.expanduser(path))


_Model = TypeVar("_Model", bound=ModelConfig)


@dataclass
class FrozenModelConfig(ModelConfig):
    """A model beside the trained one, such as a teacher."""

    key: ClassVar[str] = "objective.teacher"
    quantize: WeightFormat | None = None
    """The format of its linears. None: they keep `dtype`."""


def frozen_model(name: str, revision: str | None, dtype: DType) -> FrozenModelConfig:
    """The config of the model `name`, or of the adapter `name` over the base that its files name."""
    file = locate(name, revision, FrozenModelConfig.key).folder / "adapter_config.json"
    if not file.exists():
        return FrozenModelConfig(path=name, revision=revision, dtype=dtype)
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
        base, commit = options["base_model_name_or_path"], options.get("revision")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{FrozenModelConfig.key}={name}: {file} names no base model ({first_line(error)}). Give the whole model: "
            "`fxtune merge` writes it."
        ) from error
    return FrozenModelConfig(path=base, revision=commit, dtype=dtype, adapter=name)


def starting_from(model: ModelConfig, folder: Path | str) -> ModelConfig:
    """`model`, changed to start from the weights that its run exported to `folder`: an adapter over the same base, or
    a whole model with its tokenizer."""
    if (Path(folder) / "adapter_config.json").exists():
        return dataclasses.replace(model, adapter=str(folder))
    whole = dataclasses.replace(model, path=str(folder), revision=None, init=Init.pretrained, architecture={})
    # The added tokens are in the model's tokenizer.
    return dataclasses.replace(whole, tokenizer=None, add_tokens=[]) if model.add_tokens else whole


def resolve_dtype(model: ModelConfig, capability: tuple[int, int] | None) -> torch.dtype:
    """The dtype that the weights will have. `capability`: the GPU's compute capability; None: the device is a CPU.
    GPUs support bfloat16 from 8.0 (Ampere) on."""
    if model.dtype is not DType.auto:
        return getattr(torch, model.dtype.value)
    return torch.bfloat16 if capability and capability >= (8, 0) else torch.float32


def load_config(model: ModelConfig, head: str | None = None) -> Any:
    """The model's Hugging Face config, from its folder or the recipe's `architecture`, with the RoPE scaling of its
    adapter, and a `vocab_size` that has room for model.add_tokens. `head`: the head that the objective needs
    (Needs.head); None: the head that the model has.

    Raises ConfigError for a mistake in the recipe, StorageError if the hub cannot be reached or a file cannot be read.
    """
    _check(model)
    silence_libraries()
    model = with_shipped_config(model) if model.init is Init.random else model
    # All files are located before any is read. One error then reports all wrong names and missing files.
    adapter = ModelSource("model.adapter", model.adapter, adapter=True) if model.adapter else None
    base = None if "model_type" in model.architecture else _base(model)
    tokenizer = _tokenizer(model)
    found = locate_all(source for source in (adapter, base, tokenizer) if source is not None)

    config: Any = _read_config(found[base], model) if base else None
    config = _make_config(config, model.architecture) if model.architecture else config
    try:
        config.get_text_config()
    except ValueError as error:
        raise ConfigError(
            f"model.path: {config.model_type} holds several text models (an encoder and a decoder), and fxtune trains "
            "a decoder alone. Use another model."
        ) from error
    config = with_head(config, head, f"{model.key}={model.path}") if head else config
    kind, text = kind_of(config), config.get_text_config()
    if model.add_tokens or kind.pads_by_token:
        made = _read_tokenizer(found[tokenizer], model, kind, text.vocab_size)
        text.vocab_size = rows_for(made, text.vocab_size) if model.add_tokens else text.vocab_size
        if kind.pads_by_token and made.pad_token_id < text.vocab_size:
            text.pad_token_id = made.pad_token_id
    if adapter:
        config = with_changes_of(found[adapter], config)
        config = with_head(config, head, f"model.adapter={model.adapter}") if head else config
    return config


def with_shipped_config(model: _Model, plans: bool = False) -> _Model:
    """`model`; if the hub does not give its files, the same model with random weights and the config that ships with
    fxtune. This is for callers that need no weights. `plans`: the caller needs no tokenizer either, and must know
    whether the checkpoint is quantized.

    Raises errors as config_without_hub() does, and HubError if the config ships but a needed tokenizer does not.
    """
    if not model.on_hub or "model_type" in model.architecture or model.trust_remote_code:
        return model
    assert model.path is not None
    if (found := config_without_hub(model.path, model.revision, model.key)) is None:
        return model
    if not plans and model.tokenizer is None:
        raise HubError(
            f"model.path={model.path}: its config ships with fxtune, but not its tokenizer. Give another, as in "
            "model.tokenizer=builtin:tiny, which is enough to measure speed and memory."
        )
    values = {name: value for name, value in found.config.items() if plans or name != QUANTIZATION}
    if model.architecture:
        values = _make_config(_make_config(None, values), model.architecture).to_dict()
    return dataclasses.replace(model, path=None, revision=None, init=Init.random, architecture=values)


def rows_of_base(model: ModelConfig) -> int:
    """How many tokens the model embeds without model.add_tokens."""
    return load_config(dataclasses.replace(model, add_tokens=[], adapter=None)).get_text_config().vocab_size


def with_changes_of(adapter: Origin, config: Any) -> Any:
    """A base's config with the RoPE parameters, the rows for added tokens and the head with which `adapter` was
    trained. save_model() writes them to a config.json next to the adapter. With other RoPE frequencies the adapter
    gives wrong results without an error.

    Raises ConfigError if the adapter was trained on a model of another type, StorageError if its config cannot be
    read.
    """
    inspect_folder(adapter.folder, f"adapter {adapter.name}")
    file = adapter.folder / CONFIG
    with readable(f"{file} cannot be used", "Use a complete copy."):
        config = with_head_of_task(config, json.loads(file.read_text(encoding="utf-8")).get("task_type"))
    file = adapter.folder / "config.json"
    if not file.exists():
        return config
    remedy = "It holds the RoPE scaling that the adapter was trained with: use a complete copy of the adapter."
    with readable(f"{file} cannot be used", remedy):
        kind = json.loads(file.read_text(encoding="utf-8"))["model_type"]
        whole = type(config).from_pretrained(adapter.folder) if kind == config.model_type else None
    if whole is None:
        raise ConfigError(
            f"The adapter {adapter.name} was trained on a {kind} model, and its base here is a {config.model_type}: "
            "give the base that it belongs to."
        )
    trained, scaled = whole.get_text_config(), copy.deepcopy(config)
    if kind_of(whole).trains_head:
        scaled = with_head(scaled, kind_of(whole).head)
        scaled.get_text_config().pad_token_id = trained.pad_token_id
        for name in ("id2label", "label2id", "problem_type", "thresholds"):
            if hasattr(whole, name):
                setattr(scaled, name, copy.deepcopy(getattr(whole, name)))
    for name in ("rope_parameters", "max_position_embeddings"):
        if hasattr(trained, name):
            setattr(scaled.get_text_config(), name, copy.deepcopy(getattr(trained, name)))
    scaled.get_text_config().vocab_size = max(getattr(trained, "vocab_size", 0), config.get_text_config().vocab_size)
    return scaled


def ships_mxfp4(model: ModelConfig, hf_config: Any) -> bool:
    """Whether the checkpoint stores its experts in MXFP4 (gpt-oss). build() unpacks them, WeightSource does not."""
    if hf_config.model_type != "gpt_oss" or model.init is Init.random:  # other models need no look at the hub
        return QUANTIZATION in model.architecture  # only a plan keeps this key
    return weights.unpacks(_locate(model), hf_config)


def load_tokenizer(model: ModelConfig, hf_config: Any = None) -> Any:
    """The model's fast tokenizer, with a pad token and with model.add_tokens. Each of its ids has an embedding in the
    model of `hf_config` (default: load_config()).

    A tokenizer without a pad token uses its end-of-sequence token for padding, else its unknown token, else id 0. This
    is safe because no mask is derived from pad ids: targets are marked one by one, positions separate documents, and
    generation passes its own attention mask.
    """
    hf_config = hf_config or load_config(model)
    rows = hf_config.get_text_config().vocab_size
    of_base = rows_of_base(model) if model.add_tokens else rows
    source = _tokenizer(model)
    tokenizer = _read_tokenizer(locate_all([source])[source], model, kind_of(hf_config), of_base)
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if beyond:
        key = model.key if model.tokenizer is None else "model.tokenizer"
        tokens = ",".join(f'"{token}"' for _, token in beyond)
        new = f"or add its tokens to the model: model.add_tokens=[{tokens}]. " if len(beyond) <= FEW else ""
        raise ConfigError(
            f"The tokenizer of {key}={model.tokenizer or model.path} has ids up to {beyond[-1][0]}, but the model "
            f"embeds only {rows} tokens (vocab_size). Use the tokenizer that belongs to the model (model.tokenizer), "
            f"{new or 'or a model with a larger vocab_size. '}model.add_tokens adds single tokens."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def tokenizer_folder(model: ModelConfig) -> Path:
    """The folder with the files of the tokenizer and of a processor. Raises StorageError."""
    source = _tokenizer(model)
    return locate_all([source])[source].folder


def load_processor(model: ModelConfig, hf_config: Any, tokenizer: Any) -> Any:
    """transformers' processor of a model that reads images, with `tokenizer`; None if the folder has no files of a
    processor.

    Raises StorageError if the processor cannot be read.
    """
    source, folder = _tokenizer(model), tokenizer_folder(model)
    if not any(folder.glob(PROCESSORS)):
        return None
    try:
        return read_processor(folder, tokenizer, hf_config)
    except Exception as error:  # a family's processor may raise any exception
        raise StorageError(
            f"{source.key}={source.name}: the processor of images in {folder} cannot be read: {first_line(error)}. "
            "Use a complete copy of the model, and install what is named."
        ) from error


def _read_tokenizer(origin: Origin, model: ModelConfig, kind: Decoder, rows: int) -> Any:
    """The tokenizer in the files of `origin`, with model.add_tokens. `rows`: how many tokens the model embeds."""
    key, name, _, code, _ = _tokenizer(model)
    inspect_folder(origin.folder, f"{key}={name}")
    if not any((origin.folder / file).exists() for file in TOKENIZER_FILES):
        raise ConfigError(
            f"{key}={name}: {origin.folder} holds no tokenizer (no tokenizer.json). Put one there, or name one in "
            "model.tokenizer."
        )
    try:
        tokenizer = kind.read_tokenizer(origin.folder, code)
    except Exception as error:  # the tokenizers library raises a bare Exception for an unreadable file
        _explain_code(error, origin, "tokenizer_config.json")
        raise StorageError(
            f"{key}={name}: the tokenizer in {origin.folder} cannot be read: {first_line(error)}. Use a complete "
            "copy of it, or name another in model.tokenizer."
        ) from error
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{key}={name} has no fast tokenizer (no tokenizer.json), and fxtune needs its character offsets. "
            "Convert it, or name another in model.tokenizer."
        )
    if model.add_tokens:
        add_tokens(tokenizer, model.add_tokens, rows, f"the tokenizer of {key}={name}")
    return tokenizer


def build(
    model: ModelConfig, hf_config: Any, world: World, seed: int, shrinks: bool = False, by_rows: bool = False
) -> PreparedModel:
    """The model of `hf_config` on world.device. Its weights are read from `model.path` or drawn from `seed`.

    Weights are read or drawn in their final dtype and on their final device: an 8B model in bfloat16 takes 16 GB on
    the device and no memory elsewhere. With parallel.shard above 1, and with `by_rows`, the weights get no memory
    here; see WeightSource. `shrinks`: the caller quantizes the weights and moves them one by one. The weights may then
    start in host memory, if that has room for a model larger than the GPU's memory.

    The module's `name_or_path` and the fields of the result say where the model came from.
    """
    silence_libraries()
    dtype, code = resolve_dtype(model, world.capability), model.trust_remote_code
    random = model.init is Init.random
    origin = None if random else _locate(model)
    if origin is not None and (origin.folder / PROOF).exists():
        weights.readable_files(origin)  # fetches the files of the hub
        require_unchanged(origin, f"{model.key}={model.path}", (world.rank, world.size))
    found = None if origin is None else _read_config(origin, model)
    rows, before = hf_config.get_text_config().vocab_size, 0
    if found is not None and rows > found.get_text_config().vocab_size:
        before = found.get_text_config().vocab_size
        hf_config = copy.deepcopy(hf_config)
        hf_config.get_text_config().vocab_size = before
    empty = by_rows or world.degrees.shard > 1
    if before and empty:
        raise ConfigError(
            "model.add_tokens: the embedding cannot grow while weights are read row by row, which this base needs "
            "here. Remove it, set parallel.shard=1, or leave techniques.quantize out."
        )
    if not empty and shrinks and not weights.start_on_device(hf_config, dtype, world, code, random):
        world = dataclasses.replace(world, device=torch.device("cpu"))
    if empty:
        built = shards.empty(hf_config, dtype, world, code)
    elif origin is None:
        with phase("Drawing random weights", announce=False):
            built = weights.draw(hf_config, dtype, world, seed, code)
    else:
        with phase("Reading the weights", announce=False):
            built = weights.read(origin, hf_config, dtype, world, code, str(model.path), seed)
    mixers.keep_float32(built, origin)
    mixers.use_reference(built)
    built.name_or_path = origin.name if origin else ""  # peft reads the base's name here
    if before:
        grow(built, rows)
    if found is not None and kind_of(hf_config).task_tells_head:
        found = with_head(found, kind_of(hf_config).head)
    prepared = PreparedModel(
        built,
        base_revision=origin.revision if origin else None,
        trust_remote_code=code,
        config_edited=found is None or before > 0 or hf_config.to_dict() != found.to_dict(),
        grown_from=before or None,
        ships_mxfp4=origin is not None and weights.unpacks(origin, hf_config),
        mtp={} if origin is None else mtp_tensors(origin, built, before),
    )
    if empty:
        WeightSource(model, hf_config, prepared, world, seed).fill_head()
    vars(built.config).pop(SCORE_WORDS, None)
    return prepared


@dataclass(frozen=True)
class WeightSource:
    """Reads or draws the weights of `built`, a model that build() made from the other fields without weights."""

    model: ModelConfig
    hf_config: Any
    built: PreparedModel
    world: World
    seed: int

    @torch.no_grad()
    def fill_head(self) -> None:
        """If the base lacks the head, allocate the head and fill in its values before the other weights. Such a head
        has one row, so it is not divided over ranks, and adapters copy it."""
        module, heads = self.built.module, dict[str, tuple[int, ...]]()
        for name in kind_of(self.hf_config).drawn_weights(dict(module.named_parameters())):
            parent, _, leaf = name.rpartition(".")
            weight = module.get_parameter(name)
            empty = torch.nn.Parameter(torch.empty_like(weight, device=self.world.device))
            module.get_submodule(parent)._parameters[leaf] = empty
            heads[name] = tuple(weight.shape)
        files = None if self.model.init is Init.random else self._files
        drawn = heads.keys() - weights.names(files) if files and heads else set()
        weights.start_head(
            {name: module.get_parameter(name) for name in sorted(drawn)}, self.hf_config, self.seed, files
        )
        if wanted := {name: shape for name, shape in heads.items() if name not in drawn}:
            self.each(wanted, lambda name, value: module.get_parameter(name).copy_(value))

    def each(self, wanted: Mapping[str, tuple[int, ...]], take: Callable[[str, torch.Tensor], None]) -> None:
        """Call `take` with each whole weight of `wanted`, given by name and shape, on world.device. There is memory
        for one weight at a time, so `take` must not keep it."""
        if self.model.init is Init.random:
            drawn_shards.draw_each(wanted, self._draw, take)
        else:
            dtype = resolve_dtype(self.model, self.world.capability)
            path = str(self.model.path)
            shards.read_each(self._files, self.built.module, wanted, self.world, dtype, path, take)

    def fill(
        self, pieces: Mapping[str, list[shards.Piece]], elsewhere: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """Read or draw this rank's rows of each weight. `pieces`: the result of shards.pieces_of() from before the
        parameters got memory. `elsewhere`: names and shapes of the tensors that each() has handed out."""
        module = self.built.module
        if self.model.init is Init.random:
            forget_conversions(module)
            drawn_shards.draw(module, pieces, self._draw)
        else:
            shards.read(self._files, module, pieces, self.world, str(self.model.path), elsewhere)
        shards.complete(module, self.world)

    def _draw(self) -> Any:
        dtype, code = resolve_dtype(self.model, self.world.capability), self.model.trust_remote_code
        return weights.draw(self.hf_config, dtype, self.world, self.seed, code)

    @property
    def _files(self) -> Origin:
        """The files that build() found, even if the hub now has newer files."""
        return _locate(dataclasses.replace(self.model, revision=self.built.base_revision or self.model.revision))


def silence_libraries() -> None:
    """Turn off the log and the progress bars of libraries. Whatever matters in them, fxtune reports as an error.

    In a command, warnings go to the run's folder instead (system/terminal/library_log.py).
    """
    import huggingface_hub
    import transformers

    # peft imports these libraries if they are installed, and they log every extension that does not load.
    for name in ("torchao", "bitsandbytes", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    huggingface_hub.logging.set_verbosity_error()
    take_loggers()


def _check(model: ModelConfig) -> None:
    if model.architecture and model.init is not Init.random:
        raise ConfigError("model.architecture needs model.init=random. Set that, or remove the architecture.")
    if model.path is None and "model_type" not in model.architecture:
        raise ConfigError(
            "model.path is null and model.architecture has no model_type: name a model, or write an architecture "
            "(model_type and its sizes) with model.init=random."
        )
    if model.trust_remote_code and (not model.on_hub or not is_commit(model.revision)):
        raise ConfigError(
            "model.trust_remote_code=true runs Python code of the model's author. Pin what you have read: it needs a "
            f"hub id in model.path (here {model.path}) and its full 40-digit commit in model.revision (here "
            f"{model.revision})."
        )


def _locate(model: ModelConfig) -> Origin:
    base = _base(model)
    return locate_all([base])[base]


def _base(model: ModelConfig) -> ModelSource:
    assert model.path is not None
    return ModelSource(model.key, model.path, model.revision, model.trust_remote_code)


def _tokenizer(model: ModelConfig) -> ModelSource:
    if model.tokenizer is not None:
        return ModelSource("model.tokenizer", model.tokenizer)
    return ModelSource("model.path", "builtin:tiny") if model.path is None else _base(model)


def _read_config(origin: Origin, model: ModelConfig) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    name, file = f"{model.key}={model.path}", origin.folder / "config.json"
    inspect_folder(origin.folder, name)
    if (origin.folder / "adapter_config.json").exists():
        raise ConfigError(f"{name} is a PEFT adapter. Put its base model in model.path and this in model.adapter.")
    if not file.exists():
        raise ConfigError(f"{name}: {origin.folder} holds no config.json, so it is not a Hugging Face model.")
    unusable = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, StrictDataclassError)
    try:
        config = AutoConfig.from_pretrained(origin.folder, trust_remote_code=model.trust_remote_code)
    except unusable as error:
        _explain_code(error, origin, file.name)
        raise ConfigError(
            f"{name}: {file} cannot be used: {first_line(error)}. A model newer than this transformers needs a newer "
            "transformers; a model with its own code needs model.trust_remote_code."
        ) from error
    kind_of(config, name, own_code=model.trust_remote_code)
    if getattr(config, QUANTIZATION, None):
        if not weights.unpacks(origin, config):
            raise ConfigError(f"{name} is quantized already. Give the model that it was made from.")
        del config.quantization_config  # the built model has weights in 16 or 32 bits
    return config


def _explain_code(error: Exception, origin: Origin, config: str) -> None:
    """If transformers refused the folder because it needs code of the author, raise the error that names the Python
    file."""
    if "trust_remote_code" in str(error) and (code := named_code(origin.folder / config)):
        raise remote_code.refusal(origin.folder, code) from error


def _make_config(base: Any, architecture: dict[str, Any]) -> Any:
    """The config that `architecture` describes: `base` with the keys of `architecture`, or a complete config if `base`
    is None. Values of `base` that depend on a changed size are dropped and computed again."""
    from huggingface_hub.errors import StrictDataclassError

    changes = {name: value for name, value in architecture.items() if name not in ("model_type", QUANTIZATION)}
    inspect_config(changes, "model.architecture")
    kind = _config_class(architecture["model_type"]) if base is None else type(base)
    values = {} if base is None else base.to_dict()
    values.pop("model_type", None)
    if {"hidden_size", "num_attention_heads"} & set(changes):
        values.pop("head_dim", None)
    if "num_hidden_layers" in changes:
        values.pop("layer_types", None)
    values |= changes
    known = [*kind().to_dict(), *kind.attribute_map, "rope_theta", "rope_scaling"]
    for name in changes:
        if name not in known and not _is_read(kind, values, name):
            hint = did_you_mean(name, known)
            raise ConfigError(f"model.architecture.{name}: {kind.model_type} has no such key{hint}")
    try:
        return kind(**values)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, StrictDataclassError) as error:
        raise ConfigError(f"model.architecture does not make a {kind.model_type}: {shortened(error, 600)}") from error


def _config_class(family: str) -> Any:
    """transformers' config class of the models with this `model_type`."""
    from transformers import CONFIG_MAPPING

    known = families()
    if family in CONFIG_MAPPING and family not in known:
        raise ConfigError(f"model.architecture.model_type={family} is a {family} model, {why_none(family)}.")
    if family not in known:
        hint = did_you_mean(str(family), known)
        raise ConfigError(
            f"model.architecture.model_type={family} is no model that fxtune trains and this transformers has{hint}"
        )
    return CONFIG_MAPPING[family]


def _is_read(kind: Any, values: dict[str, Any], name: str) -> bool:
    """Whether a key that a config class does not declare has an effect. It has one if the class stores it under
    another name, or if the model's constructor reads it: the constructor of Qwen3-MoE reads `head_dim`."""
    from huggingface_hub.errors import StrictDataclassError

    wrong_value = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
    read = set()

    class Recorded(kind):
        def __getattribute__(self, key: str) -> Any:
            read.add(key)
            return super().__getattribute__(key)

    try:
        config = Recorded(**values)
        if name not in vars(config):
            return True
        build = kind_of(config).model_class(kind)
        read.clear()
        with torch.device("meta"):
            build(config)
    except (*wrong_value, StrictDataclassError):
        return False
    return name in read
