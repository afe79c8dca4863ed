"""`fxtune merge`: write a LoRA adapter and its base as one safetensors model, which plain transformers loads.

    fxtune merge quickstart              # the adapter of a run, into runs/quickstart/merged
    fxtune merge quickstart FOLDER       # or into another folder
    fxtune merge quickstart/step-87      # any checkpoint, into runs/quickstart/merged-step-87
    fxtune merge me/lamps FOLDER         # an adapter of the hub, or the folder of an adapter
    fxtune merge +recipe=NAME            # the adapter of the recipe's newest run

The checkpoint of a full fine-tuning is written as a model, with nothing to merge.

A weight W becomes W + alpha/r * B A. The sum is computed in float32 and rounded once to the base's stored dtype, one
layer at a time, so merging needs no more memory than the model.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.checkpoint.folder import step_of
from fxtune.cli.run_output import RUNS, OutputKind, RunOutput, find_folder, find_output, is_run, unknown
from fxtune.config.root import Config
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, StorageError, UserError, first_line, shortened
from fxtune.export.merged_weights import recompute
from fxtune.export.save import save_model, staging_folders
from fxtune.models import load as models
from fxtune.models import weights
from fxtune.models.end_tokens import add_end_tokens, read_end_tokens
from fxtune.models.load import DType, ModelConfig
from fxtune.models.peft_adapter import CONFIG, fetch_adapter, load_weights, read_options
from fxtune.models.prepared import PreparedModel
from fxtune.models.probe import Answer
from fxtune.models.untrusted import inspect_folder
from fxtune.system.hub import Origin, locate, locate_adapter
from fxtune.system.oom import out_of_memory_reason
from fxtune.system.resource_limits import LimitExceeded, limit_resources
from fxtune.training.checkpoint_model import exported_model, run_folder
from fxtune.upstream.peft import alone
from fxtune.upstream.transformers import set_attention

MIB = 2**20


def run(config: Config, unmerged: bool = False, trust_remote_code: bool = False) -> Path:
    """Merge the adapter of the recipe's newest run into its run folder. Raises ConfigError if there is none."""
    if unmerged:
        raise ConfigError("--unmerged writes the adapter of a checkpoint: fxtune merge RUN/step-70")
    root = Path(config.run.dir) if config.run.dir else Path("runs") / config.run.name
    folders = [root] if config.run.dir else [path for path in root.parent.glob("*") if is_run(path.name, root.name)]
    adapters = [path / "adapter" for path in folders if (path / "adapter").is_dir()]
    if not adapters:
        if full := [path / "model" for path in folders if (path / "model").is_dir()]:
            raise ConfigError(f"{full[-1]} was trained without adapters, so there is nothing to merge.")
        raise ConfigError(f"No adapter in {root}: train the recipe first, or name one: fxtune merge ADAPTER FOLDER.")
    newest = max(adapters, key=lambda path: path.stat().st_mtime)
    trusted = trust_remote_code or config.model.trust_remote_code
    return merge(newest, newest.parent / "merged", trust_remote_code=trusted)


def merge(
    adapter: Path | str,
    out: Path | str | None = None,
    *,
    trust_remote_code: bool = False,
    unmerged: bool = False,
    card: dict[str, Any] | None = None,
) -> Path:
    """Write an adapter (a run, a checkpoint of it, a folder or a hub id) and the base that it names as one model into
    `out`, and return `out`. Without `out`: `merged` beside the adapter, RUN/merged-step-70 for a checkpoint.
    `unmerged`: write the adapter of a checkpoint alone. `card`: more for the model card of an adapter's folder, see
    write_card().

    Raises ConfigError if the adapter cannot be used, StorageError if `out` exists or cannot be written, or if weights
    do not fit or are not finite.
    """
    name = str(adapter)
    found = _find(name)
    if found and found.kind is OutputKind.checkpoint:
        return _merge_checkpoint(found.folder, out, unmerged, trust_remote_code)
    if unmerged:
        raise ConfigError(f"--unmerged is for a checkpoint, and {name} is no checkpoint.")
    if found and found.kind is OutputKind.model:
        raise ConfigError(f"{found.folder} is a whole model, without adapters, so there is nothing to merge.")
    if found:
        name, out = str(found.folder), out or found.folder.with_name("merged")
    elif out is None:
        raise ConfigError(f"Where shall the merged model go? Name a new folder: fxtune merge {name} FOLDER.")
    return _merge(name, Path(out), card or {}, trust_remote_code)


def _find(name: str) -> RunOutput | None:
    """What `name` means on this machine; None for a name of the hub's. Raises ConfigError for a name of neither."""
    if find_folder(name) is not None:
        return find_output(name)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith((".", f"{RUNS}/")):
        raise unknown(name)
    return None


def _merge_checkpoint(checkpoint: Path, out: Path | str | None, unmerged: bool, trust_remote_code: bool) -> Path:
    name = f"{'adapter' if unmerged else 'merged'}-step-{step_of(checkpoint)}"
    out = run_folder(checkpoint) / name if out is None else Path(out)
    _require_writable(out)
    model, tokenizer, card = exported_model(checkpoint, trust_remote_code)
    if unmerged or not hasattr(model.module, "peft_config"):
        return save_model(model, tokenizer, out, card)
    with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch:
        save_model(model, tokenizer, Path(scratch) / "adapter", card)
        del model
        return _merge(str(Path(scratch) / "adapter"), out, {**card, "adapter": str(checkpoint)}, trust_remote_code)


def _merge(name: str, out: Path, card: dict[str, Any], trust_remote_code: bool) -> Path:
    place = _require_writable(out)
    opened = open_adapter(name, "merged", trust_remote_code)
    base = opened.build_base(torch.device("cpu"))
    _require_space(base.module, out, place)
    base_name = base.module.name_or_path
    adapted = opened.adapt(base.module)
    answer = Answer.of(adapted)
    merged = _merge_into_base(adapted, opened.name).to(getattr(torch, opened.model.dtype.value))
    if not weights.all_finite(merged):
        first = next(name for name, weight in merged.named_parameters() if not weight.isfinite().all())
        raise StorageError(
            f"adapter {name}: added to its base it makes NaN or infinite {opened.model.dtype.value} numbers, first in "
            f"{first}. Nothing was written. Use another copy of the adapter, or an earlier checkpoint of it."
        )
    merged.name_or_path = base_name
    _require_writable(out)  # again, because save_model() replaces what is there and another merge may have been faster
    return save_model(
        replace(base, module=merged),
        opened.tokenizer,
        out,
        card={"adapter": opened.origin.name, **card},
        answer=lambda: answer,
        check=partial(recompute, base=opened.base, adapter=opened.origin, lora=opened.lora, model=merged),
        keeps=f"The adapter {name} is as it was: merge it again.",
    )


@dataclass(frozen=True)
class OpenedAdapter:
    """An adapter whose files were checked, and the base that it names."""

    name: str
    origin: Origin
    lora: Any
    model: ModelConfig
    """The base, in its stored dtype."""
    hf_config: Any
    """The base's config, with the RoPE scaling of the adapter and rows for the tokens that its run added."""
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
        """The base with the adapter as a model of peft. Raises ConfigError if they do not fit each other."""
        _require_fast_patterns(base, self.lora, self.name)
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
    """Check the files of an adapter (a folder or a hub id) and find its base. `use`: for messages.

    Raises ConfigError if the adapter cannot be used or names no base, StorageError if a file cannot be read.
    """
    models.silence_libraries()
    origin = locate_adapter(name, key="adapter")
    fetch_adapter(origin, name, key="adapter")
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
    set_attention(hf_config, "eager")  # the kernels that it names may not be installed
    own = str(origin.folder) if (origin.folder / "tokenizer_config.json").exists() else None
    hf_config = models.with_changes_of(origin, hf_config)
    tokenizer = models.load_tokenizer(ModelConfig(**source, tokenizer=own), hf_config)
    return OpenedAdapter(name, origin, lora, model, hf_config, tokenizer)


def _require_writable(out: Path) -> Path:
    """Refuse a folder that exists or cannot be written. Returns the nearest existing folder above it. Nothing is
    opened, as opening a pipe would wait forever."""
    for path in (out, *(staging_folders(out) if out.name else ())):
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
    need, disk = sum(weight.numel() * weight.itemsize for weight in base.parameters()), shutil.disk_usage(place)
    if disk.free < need and disk.total:  # some network disks report no total
        raise StorageError(
            f"The disk of {out} has no room for the merged model: it takes {need / MIB:,.1f} MiB, and "
            f"{disk.free / MIB:,.1f} MiB are free. Free space there, or name a folder on another disk."
        )


def stored_dtype(hf_config: Any, path: str) -> DType:
    """The dtype of the base's weights in its config.json, which the merged model keeps."""
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
    try:
        with warnings.catch_warnings(action="ignore"):
            return LoraConfig.from_pretrained(str(origin.folder))
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"{origin.folder / CONFIG} cannot be read: {first_line(error)}. Use a complete copy of the adapter."
        ) from error


def _merge_into_base(adapted: Any, name: str) -> Any:
    """The base of a model of peft with the adapter added to its weights, without peft's modules. `name`: the
    adapter's, for messages."""
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import TrainableTokensWrapper

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
    """Separate a tied head or embedding with an adapter from the weight that it shares, so that the adapter is added
    to one of the two only."""
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
    """Match the adapter's regular expressions against the module names within a time limit: some never end."""
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
