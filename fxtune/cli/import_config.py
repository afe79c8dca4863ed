"""`fxtune import`: a recipe from a config of Axolotl, LLaMA-Factory, ms-swift, TRL or OpenAI's fine-tuning jobs.

    fxtune import qlora.yaml                     # writes recipes/qlora.yaml, and says what became of each key
    fxtune import qlora.yaml mine --gpus 4       # recipes/mine.yaml; the config ran on 4 cards
    fxtune import dpo.yaml --method dpo          # TRL has its method in the command, and not in the file
    fxtune import job.json --model Qwen/Qwen3-8B # another model
    fxtune import qlora.yaml --data chats.jsonl  # other data
    fxtune import qat.yaml --without qat         # leave a key out that fxtune cannot do, after reading why

Every key is translated, or has no effect here and the reason is said, or is refused. With a refused key no recipe is
written. What the recipe trains otherwise than the other tool stands in its first lines.
"""

from __future__ import annotations

import json as json_
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

import yaml

from fxtune.cli.options import write_json
from fxtune.config import discovery
from fxtune.drafts import recipe
from fxtune.errors import ConfigError, StorageError, did_you_mean
from fxtune.migration import axolotl, llamafactory, openai, swift, trl
from fxtune.migration.account import Account, Fate
from fxtune.system.console import say, table

TOOLS: dict[str, ModuleType] = {
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "swift": swift,
    "trl": trl,
    "openai": openai,
}
MARKS = {
    "axolotl": ("base_model",),
    "openai": ("training_file",),
    "trl": ("dataset_name",),
    "llamafactory": ("finetuning_type", "stage", "lora_target", "cutoff_len"),
    "swift": ("train_type", "tuner_type", "rlhf_type", "lora_rank", "model"),
}
"""Keys by which a tool's config is known, the surest first."""


def run(
    *words: str,
    tool: Optional[str] = None,
    method: str = "sft",
    model: Optional[str] = None,
    data: Optional[str] = None,
    gpus: int = 1,
    without: str = "",
    json: Optional[Path] = None,
) -> None:
    """Write the recipe. Raises ConfigError for a config that cannot be translated, StorageError for files."""
    if not 1 <= len(words) <= 2:
        raise ConfigError("fxtune import FILE [NAME]: name the config, and if you like the recipe.")
    file = Path(words[0])
    name = words[1] if len(words) == 2 else file.stem
    if not discovery.is_name(name):
        raise ConfigError(
            f"{name}: a recipe's name has {discovery.NAME_CHARACTERS}. Give one: fxtune import FILE NAME"
        )
    values = _read(file)
    left_out = [key.strip() for key in without.split(",") if key.strip()]
    if unknown := [key for key in left_out if key not in values]:
        raise ConfigError(f"--without {unknown[0]}: {file} has no such key{did_you_mean(unknown[0], values)}")
    tool = tool or _tool(values, file)
    account = Account({key: value for key, value in values.items() if key not in left_out}, gpus)
    for key in left_out:
        account.differ(f"{key}={values[key]} is left out")
    _translate(account, tool, file, method)
    if model:
        account.set("model.path", model, "model", "base_model", "model_name_or_path")
    if data:
        account.set("data.sources", [{"path": data}], "dataset", "datasets", "dataset_name", "training_file")
    _report(account, file, tool)
    if json is not None:
        write_json(json, {"tool": tool, "recipe": account.recipe, "differences": account.differences}
                   | {"keys": [vars(entry) for entry in account.entries.values()]})  # fmt: skip
    if refused := account.of(Fate.refused):
        lines = "\n".join(f"  {entry.key}: {entry.text}" for entry in refused)
        keys = ",".join(entry.key for entry in refused)
        raise ConfigError(
            f"{file} asks for what fxtune does not do, so no recipe is written:\n{lines}\nChange these keys, or leave "
            f"them out: fxtune import {file} --without {keys}"
        )
    _write(account, name, file, tool)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{file} cannot be read as text: {error}") from error
    try:
        values = json_.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is no {'JSON' if file.suffix == '.json' else 'YAML'}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file} has no keys: a config is `key: value` lines.")
    return values


def _tool(values: dict[str, Any], file: Path) -> str:
    for name, marks in MARKS.items():
        if any(mark in values for mark in marks):
            return name
    raise ConfigError(f"{file} is no config of {', '.join(TOOLS)} that fxtune knows. Is it one? Say --tool NAME.")


def _translate(account: Account, tool: str, file: Path, method: str) -> None:
    if tool == "llamafactory":
        llamafactory.read(account, file.parent)
    elif tool == "trl":
        trl.read(account, method)
    else:
        TOOLS[tool].read(account)


def _report(account: Account, file: Path, tool: str) -> None:
    rows = [[entry.key, entry.fate.value, entry.text] for entry in account.entries.values() if entry.text != "not set"]
    say(table(f"{file}, a config of {tool}", ["key", "", ""], rows))
    for line in account.differences:
        say(f"Differs: {line}.")


def _write(account: Account, name: str, file: Path, tool: str) -> None:
    title = f"{account.recipe.get('model.path')}, from {file} of {tool}"
    comments = [title, "", f"  fxtune +recipe={name}", "", *(f"Differs: {line}." for line in account.differences)]
    try:
        path = recipe.write(name, recipe.text(comments, account.recipe))
    except ConfigError as error:
        raise ConfigError(f"{file}: its recipe would be refused:\n{error}") from error
    say(f"{path} is written. Next:")
    for word in ("preview ", "plan ", ""):
        say(f"  fxtune {word}+recipe={name}")
