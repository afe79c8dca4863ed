"""Looks at the folder of a model or an adapter before any library opens it: it is data from a stranger.

A library trusts such a folder. It follows links and names that lead out of it, reads what no file should hold, loads a kernel
of the hub where a config asks for one, and builds two thousand million layers if it is told so. What is refused here:

    links that leave the folder (the hub's own cache has them, into its blobs), except to weights, which can only be numbers
    pipes, devices and folders in place of files, which would be waited for forever
    JSON that is too big or nested too deeply, and sizes in it that no model has
    names of other files that are paths: shards in an index, named chat templates
    words that have a library load code: attention kernels of the hub, Megatron modules of an adapter

Code of the model's own (`auto_map`) and pickled weights are not read at all, see model.py.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError, StorageError

READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
"""Endings of what libraries read in such a folder."""
TEMPLATES = "additional_chat_templates"
MAX_BYTES = 16 << 20
"""Of a config. Tokenizers and indices of weights may be longer."""
LONG = {"tokenizer.json": 1 << 30, "vocab.json": 1 << 30, "model.safetensors.index.json": 256 << 20}
MAX_TEMPLATE = 1 << 20
MAX_DEPTH = 64
MOST = 2**31 - 1
"""Of any whole number but a frequency's base."""
_LAYERS, MOST_LAYERS = re.compile(r"layers?$|blocks?$|depth"), 2000
_EXPERTS, MOST_EXPERTS = re.compile(r"experts?$|heads?$"), 100_000
MOST_RANK = 65_536
_KERNEL = re.compile(r"_?(attn|experts)_implementation\w*$")
_SHARD = re.compile(r"[\w.+-]+\.safetensors")
_PLAIN = re.compile(r"\w[\w.+-]*")
_STARTS = (True, False, None, "gaussian", "pissa", "olora", "orthogonal", "mica")
"""What an adapter's init_lora_weights may be: the others read files, or want data."""


def inspect_folder(folder: Path, told: str) -> None:
    """Refuse a folder of a model, tokenizer or adapter that tries to be more than data.

    Args:
        told: how the user names it, for messages: `model.path=ORG/MODEL`.

    Raises ConfigError for what a model never needs, StorageError for a file that cannot be read.
    """
    try:
        files = sorted(file for place in (folder, folder / TEMPLATES) if place.is_dir() for file in place.iterdir())
        for file in files:
            if file.suffix in READ and (file.exists() or file.is_symlink()):
                _require_own(file, folder, told)
                if file.suffix == ".json":
                    _inspect_json(file, told)
                elif file.suffix == ".jinja" and (size := file.stat().st_size) > MAX_TEMPLATE:
                    raise ConfigError(
                        f"{told}: {file} has {size:,} bytes, more than a chat template ever has ({MAX_TEMPLATE:,})."
                    )
    except OSError as error:
        raise StorageError(f"{told}: {folder} cannot be read: {error}") from error


def inspect_config(values: Any, told: str) -> None:
    """Refuse numbers that no model has, and names of code to load. `told`: where `values` stand, for messages."""
    for name, value in _leaves(values):
        key = name.rpartition(".")[2]
        if isinstance(value, str) and _KERNEL.match(key) and ("/" in value or ":" in value):
            raise ConfigError(
                f"{told}: {name}={value!r} names compiled code of the hub, which a model cannot ask for. Remove "
                "it; to use that kernel, say so in techniques.attention.backend."
            )
        if isinstance(value, str) and key == "transformers_weights" and not _SHARD.fullmatch(value):
            raise ConfigError(f"{told}: {name}={value!r} is no safetensors file of this folder.")
        if (
            isinstance(value, (int, float))
            and not isinstance(value, bool)
            and "theta" not in name
            and "base" not in key
        ):
            most = MOST_LAYERS if _LAYERS.search(key) else MOST_EXPERTS if _EXPERTS.search(key) else MOST
            if isinstance(value, int) and not -MOST <= value <= most:
                raise ConfigError(f"{told}: {name}={str(value)[:24]} is beyond what any model has ({most:,}).")


def _require_own(file: Path, folder: Path, told: str) -> None:
    root, target = folder.resolve(), file.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    weights = file.suffix == ".safetensors"
    if not weights and not target.is_relative_to(root) and not target.is_relative_to(blobs):
        raise ConfigError(
            f"{told}: {file} is a link to {target}, out of the model's folder. What it says would be read, and "
            "saved with what you train. Copy the file there if that is what you want."
        )
    if not target.exists():
        raise StorageError(f"{told}: {file} is a link to {target}, which is not there. Use a complete copy.")
    if not stat.S_ISREG(target.stat().st_mode):
        raise ConfigError(f"{told}: {file} is no regular file. Remove it.")


def _inspect_json(file: Path, told: str) -> None:
    told = f"{told}: {file}"
    size, most = file.stat().st_size, LONG.get(file.name, MAX_BYTES)
    if size > most:
        raise ConfigError(f"{told} has {size:,} bytes, more than such a file ever has ({most:,}).")
    if file.name in ("tokenizer.json", "vocab.json"):  # long, and read by code that bounds its depth
        return
    try:
        values = json.loads(file.read_bytes())
        named = list(_leaves(values))
    except RecursionError:
        raise ConfigError(f"{told} is nested more than {MAX_DEPTH} levels deep.") from None
    except ValueError:
        return  # whoever needs it says what is wrong with it
    if file.name == "config.json":
        inspect_config(values, told)
    elif file.name == "adapter_config.json" and isinstance(values, dict):
        _inspect_adapter(values, told)
    elif file.name.endswith(".index.json"):
        paths = [
            value
            for name, value in named
            if name.startswith("weight_map.") and not (isinstance(value, str) and _SHARD.fullmatch(value))
        ]
        if paths:
            raise ConfigError(
                f"{told} names {paths[0]!r} as a file of weights: only safetensors files of this folder are read."
            )
    elif file.name == "tokenizer_config.json" and isinstance(values, dict):
        for entry in values.get("chat_template") or [] if isinstance(values.get("chat_template"), list) else []:
            if not isinstance(entry, dict) or not _PLAIN.fullmatch(str(entry.get("name", ""))):
                raise ConfigError(
                    f"{told} has a chat template named {str(entry)[:80]}: a name has letters, digits, `_`, `-` "
                    "and `.`, as it becomes a file's when the tokenizer is saved."
                )


def _inspect_adapter(values: dict[str, Any], told: str) -> None:
    if values.get("megatron_config"):
        raise ConfigError(
            f"{told}: megatron_config has a library import modules by name. fxtune trains no Megatron models."
        )
    for name in ("base_model_name_or_path", "revision"):
        if not isinstance(values.get(name), (str, type(None))):
            raise ConfigError(f"{told}: {name}={str(values[name])[:24]} is no text. Use another copy of the adapter.")
    start = values.get("init_lora_weights")
    if start not in _STARTS and not str(start).startswith("pissa_niter_"):
        raise ConfigError(
            f"{told}: init_lora_weights={start!r} reads other files or needs data. Use an adapter that was saved "
            "as plain LoRA."
        )
    if values.get("layer_replication"):
        raise ConfigError(f"{told}: layer_replication builds another model than the base. fxtune does not.")
    for name, value in _leaves({key: values.get(key) for key in ("r", "rank_pattern")}):
        if value is not None and not (isinstance(value, int) and 0 < value <= MOST_RANK):
            raise ConfigError(f"{told}: {name}={str(value)[:24]} is no rank (1 to {MOST_RANK:,}).")


def _leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name, depth + 1)
    else:
        yield name, value
