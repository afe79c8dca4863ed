"""`fxtune import`: makes a recipe of a config of Axolotl, LLaMA-Factory, ms-swift, TRL or OpenAI's fine-tuning jobs.

    fxtune import qlora.yaml                     # writes recipes/qlora.yaml, and says what became of each key
    fxtune import qlora.yaml mine --gpus 4       # recipes/mine.yaml; the config ran on 4 cards
    fxtune import dpo.yaml --method dpo          # TRL names its method on the command line, not in the file
    fxtune import job.json --model Qwen/Qwen3-8B --data chats.jsonl  # another model, other data
    fxtune import qat.yaml --without qat         # leave out a key that fxtune refused

Each key is translated, differs, has no effect here, or is refused. A table says which, and why. If a key is refused,
no recipe is written. The first lines of the recipe say how its training differs from the other tool's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import yaml

from fxtune.cli.answer import ANSWER
from fxtune.cli.new import written
from fxtune.config import discovery
from fxtune.drafts import recipe
from fxtune.errors import ConfigError, StorageError, did_you_mean
from fxtune.migration import axolotl, llamafactory, openai, swift, trl
from fxtune.migration.account import Fate, read
from fxtune.system.terminal.console import say, table

TOOLS = {module.TOOL.name: module.TOOL for module in (axolotl, openai, trl, llamafactory, swift)}
"""The tools by name, in the order in which they are tried: tools with unmistakable keys come first."""
NEEDED = {"model.path": ("model_name_or_path", "--model ID"), "data.sources": ("dataset", "--data FILE")}
"""{a key that no recipe can lack: (the name in keys.yaml of the other tool's key, the option that gives it)}."""


def run(
    *words: str,
    tool: Optional[str] = None,
    method: str = "sft",
    model: Optional[str] = None,
    data: Optional[str] = None,
    gpus: int = 1,
    without: str = "",
) -> None:
    """Write the recipe. Raises ConfigError if the config cannot be translated, StorageError if it cannot be read."""
    if not 1 <= len(words) <= 2:
        raise ConfigError("fxtune import FILE [NAME]: name the config, and if you like the recipe.")
    file = Path(words[0])
    name = words[1] if len(words) == 2 else file.stem
    if not discovery.is_name(name):
        raise ConfigError(f"{name}: a name has {discovery.NAME_CHARACTERS}. Give one: fxtune import FILE NAME")
    values = _read(file)
    left_out = [key.strip() for key in without.split(",") if key.strip()]
    if unknown := [key for key in left_out if key not in values]:
        raise ConfigError(f"--without {unknown[0]}: {file} has no such key{did_you_mean(unknown[0], values)}")
    tool = tool or next((name for name in TOOLS if values.keys() & {*TOOLS[name].table["marks"].split()}), "")
    if tool not in TOOLS:
        raise ConfigError(f"{file} is no config of {', '.join(TOOLS)} that fxtune knows. Is it one? Say --tool NAME.")
    kept = {key: value for key, value in values.items() if key not in left_out}
    account = read(TOOLS[tool], kept, gpus=gpus, file=file, method=method, data=data or "")
    if model:
        account.set("model.path", model, "model_name_or_path")
    missing = {account.own(name): option for key, (name, option) in NEEDED.items() if not account.recipe.get(key)}
    known = [entry.key for entry in account.shown() if entry.fate is Fate.refused]
    account.refuse("a recipe needs it, and the config does not give it", *(key for key in missing if key not in known))
    for key in left_out:
        account.differ(f"{key}={values[key]} is left out")
    rows = [[entry.key, entry.fate.value, entry.text] for entry in account.shown() if entry.text != "not set"]
    say(table(f"{file}, a config of {tool}", ["key", "", ""], rows))
    for line in account.differences:
        say(f"Differs: {line}.")
    found = {"tool": tool, "recipe": account.recipe, "differences": account.differences}
    found["keys"] = [vars(entry) for entry in account.shown()]
    ANSWER.put(found)
    if refused := [entry for entry in account.shown() if entry.fate is Fate.refused]:
        lines = "\n".join(f"  {entry.key}: {entry.text}" for entry in refused)
        left_out += [entry.key for entry in refused if entry.key in values]
        without = ",".join(key for key in left_out if key not in missing)
        options = " ".join([*missing.values(), *([f"--without {without}"] if without else [])])
        again = f", or repeat the command with {options}" if options else ""
        raise ConfigError(
            f"{file} asks for what fxtune does not do, so no recipe is written:\n{lines}\nChange these keys{again}"
        )
    title = f"{account.recipe.get('model.path')}, from {file} of {tool}"
    comments = [title, "", f"  fxtune +recipe={name}", "", *(f"Differs: {line}." for line in account.differences)]
    try:
        recipe.write(name, recipe.text(comments, account.recipe))
    except ConfigError as error:
        raise ConfigError(f"{file}: its recipe would be refused:\n{error}") from error
    written(name, ("preview ", "plan ", ""), found)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} is no {'JSON' if file.suffix == '.json' else 'YAML'}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file} has no keys: a config is `key: value` lines.")
    return values
