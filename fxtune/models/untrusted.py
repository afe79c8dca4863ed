"""Checks the folder of a model or an adapter before any library opens it. The folder is data from a stranger.

Libraries trust such a folder. They follow links and names out of it, load a kernel of the hub if a config names it,
and build two billion layers if a config asks for them. This file refuses:

- links out of the folder, except into the blobs of the hub's own cache, and except weights, which can only be numbers
- pipes, devices and folders in place of files, because reading them might never end
- JSON that is too big or nested too deeply, and sizes that no model has
- paths where a file name belongs: shards in an index, named chat templates
- values that make a library load code: attention kernels of the hub, Megatron modules of an adapter

A model's own code (`auto_map`) and pickled weights are not read at all; see load.py.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError, StorageError, readable

READ_ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors")
"""Endings of the files that libraries read in such a folder."""
TEMPLATE_FOLDER = "additional_chat_templates"
MAX_BYTES = {
    "tokenizer.json": 1 << 30,
    "vocab.json": 1 << 30,
    "model.safetensors.index.json": 256 << 20,
    ".json": 16 << 20,
    ".jinja": 1 << 20,
}
"""The largest allowed size in bytes, by a file's name. Files with other names are limited by their ending."""
MAX_DEPTH = 64
MAX_INTEGER = 2**31 - 1
"""Limit on any integer except a frequency base."""
MAX_LAYERS = 2000
LIMITS = ((re.compile(r"layers?$|blocks?$|depth"), MAX_LAYERS), (re.compile(r"experts?$|heads?$"), 100_000))
MAX_RANK = 65_536
_KERNEL = re.compile(r"_?(attn|experts)_implementation\w*$")
_SHARD = re.compile(r"[\w.+-]+\.safetensors")
_FILE_NAME = re.compile(r"\w[\w.+-]*")
_LORA_INITS = (True, False, None, "gaussian", "pissa", "olora", "orthogonal", "mica")
"""Allowed values of an adapter's init_lora_weights. Other values read files or need data."""


def inspect_folder(folder: Path, source: str) -> None:
    """Refuse the folder of a model, tokenizer or adapter if it is more than data.

    `source`: how the user names it, for messages, as in `model.path=ORG/MODEL`. Raises ConfigError for content that
    no model needs, StorageError for a file that cannot be read.
    """
    with readable(
        f"{source}: {folder} cannot be read", "Change its permissions if they forbid it, or use another copy."
    ):
        folders = [place for place in (folder, folder / TEMPLATE_FOLDER) if place.is_dir()]
        for file in sorted(file for place in folders for file in place.iterdir()):
            if file.suffix in READ_ENDINGS:
                _check_file(file, folder, source)
                if file.suffix == ".json" and file.name not in ("tokenizer.json", "vocab.json"):
                    # These two files are long, and the code that reads them limits their depth.
                    _check_json(file, f"{source}: {file}")


def inspect_config(values: Any, source: str) -> None:
    """Refuse numbers that no model has, and names of code to load. `source`: where `values` come from, for
    messages."""
    for name, value in _leaves(values):
        key = name.rpartition(".")[2]
        if isinstance(value, str) and _KERNEL.match(key) and ("/" in value or ":" in value):
            raise ConfigError(
                f"{source}: {name}={value!r} names compiled code of the hub, which a model cannot ask for. Remove "
                "it; to use that kernel, name it in techniques.attention.backend."
            )
        if isinstance(value, str) and key == "transformers_weights" and not _SHARD.fullmatch(value):
            raise ConfigError(f"{source}: {name}={value!r} is no safetensors file of this folder.")
        if type(value) is int and "theta" not in name and "base" not in key:
            limit = next((most for pattern, most in LIMITS if pattern.search(key)), MAX_INTEGER)
            if not -MAX_INTEGER <= value <= limit:
                raise ConfigError(f"{source}: {name}={str(value)[:24]} is beyond what any model has ({limit:,}).")


def named_code(config: Path) -> str | None:
    """The first Python file that `auto_map` in a config.json or tokenizer_config.json names; None: it names no
    file."""
    try:
        references = json.loads(config.read_bytes())["auto_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    # A tokenizer's entry is a list of two classes: a slow one in pure Python and a fast one. Either may be null.
    classes = [name for entry in references for name in (entry if isinstance(entry, list) else [entry]) if name]
    return f"{str(classes[0]).rpartition('--')[2].partition('.')[0]}.py" if classes else None


def _check_file(file: Path, folder: Path, source: str) -> None:
    """Refuse a link out of the folder, a file that is not regular, and a file that is too large."""
    root, target = folder.resolve(), file.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if file.suffix != ".safetensors" and not (target.is_relative_to(root) or target.is_relative_to(blobs)):
        raise ConfigError(
            f"{source}: {file} is a link to {target}, out of the model's folder. The linked file would be read, and "
            "saved with your model. If you want this, copy the file into the folder."
        )
    if not target.exists():
        raise StorageError(f"{source}: {file} is a link to {target}, which does not exist. Use a complete copy.")
    status = target.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{source}: {file} is no regular file. Remove it.")
    limit = MAX_BYTES.get(file.name) or MAX_BYTES.get(file.suffix) or math.inf
    if status.st_size > limit:
        kind = "a chat template" if file.suffix == ".jinja" else "such a file"
        raise ConfigError(f"{source}: {file} has {status.st_size:,} bytes, more than {kind} ever has ({limit:,}).")


def _check_json(file: Path, source: str) -> None:
    try:
        values = json.loads(file.read_bytes())
        leaves = list(_leaves(values))
    except RecursionError:
        raise ConfigError(f"{source} is nested more than {MAX_DEPTH} levels deep.") from None
    except ValueError:
        return  # the code that needs the file reports what is wrong with it
    if file.name == "config.json":
        inspect_config(values, source)
    elif file.name == "adapter_config.json" and isinstance(values, dict):
        _check_adapter(values, source)
    elif file.name.endswith(".index.json"):
        for name, value in leaves:
            if name.startswith("weight_map.") and not (isinstance(value, str) and _SHARD.fullmatch(value)):
                raise ConfigError(
                    f"{source} names {value!r} as a file of weights: only safetensors files of this folder are read."
                )
    elif file.name == "tokenizer_config.json" and isinstance(values, dict):
        templates = values.get("chat_template")
        for entry in templates if isinstance(templates, list) else []:
            if not isinstance(entry, dict) or not _FILE_NAME.fullmatch(str(entry.get("name", ""))):
                raise ConfigError(
                    f"{source} has a chat template named {str(entry)[:80]}: a name has letters, digits, `_`, `-` and "
                    "`.`, as it becomes the name of a file when the tokenizer is saved."
                )


def _check_adapter(values: dict[str, Any], source: str) -> None:
    if values.get("megatron_config"):
        raise ConfigError(
            f"{source}: megatron_config makes a library import modules by name. fxtune trains no Megatron models."
        )
    for name in ("base_model_name_or_path", "revision"):
        if not isinstance(values.get(name), (str, type(None))):
            raise ConfigError(
                f"{source}: {name}={str(values[name])[:24]} is no text. Use another copy of the adapter."
            )
    init = values.get("init_lora_weights")
    if init not in _LORA_INITS and not str(init).startswith("pissa_niter_"):
        raise ConfigError(
            f"{source}: init_lora_weights={init!r} reads other files or needs data. Use an adapter that was saved as "
            "plain LoRA."
        )
    if values.get("layer_replication"):
        raise ConfigError(f"{source}: layer_replication builds another model than the base. fxtune does not.")
    for name, value in _leaves({key: values.get(key) for key in ("r", "rank_pattern")}):
        if value is not None and not (isinstance(value, int) and 0 < value <= MAX_RANK):
            raise ConfigError(f"{source}: {name}={str(value)[:24]} is no rank (1 to {MAX_RANK:,}).")


def _leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield each value that is neither a dict nor a list, with its dotted name."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, name, depth + 1)
    else:
        yield name, value
