"""`fxtune recipes` lists the recipes; `fxtune recipes copy NAME mine.yaml` copies one to edit."""

from __future__ import annotations

from pathlib import Path

from fxtune import plugins
from fxtune.cli.answer import ANSWER
from fxtune.config import discovery
from fxtune.errors import ConfigError
from fxtune.system.terminal.console import say

_USAGE = (
    "fxtune recipes                      list the recipes\nfxtune recipes copy NAME mine.yaml  copy one, to edit it"
)


def run(*arguments: str) -> None:
    if not arguments:
        known = discovery.recipes()
        ANSWER.put({name: {"title": recipe.title, "path": str(recipe.path)} for name, recipe in known.items()})
        width, shipped = max((len(name) for name in known), default=0), discovery.place(discovery.shipped("recipes"))
        blocks = []
        for is_shipped, title in ((False, f"in {discovery.LOCAL}/"), (True, f"shipped with fxtune, in {shipped}/")):
            found = [recipe for recipe in known.values() if recipe.shipped is is_shipped]
            if found:
                blocks.append("\n".join([title, *(f"  {recipe.name:{width}}  {recipe.title}" for recipe in found)]))
        blocks += filter(None, [plugins.summary()])
        blocks.append("Run one: fxtune +recipe=NAME. Make it yours: fxtune recipes copy NAME recipes/mine.yaml")
        say("\n\n".join(blocks))
    elif arguments[0] == "copy" and len(arguments) == 3:
        target = copy(arguments[1], Path(arguments[2]))
        made = discovery.recipes().get(target.stem)
        typed = str(target) if "/" in str(target) else f"./{target}"
        name = target.stem if made and made.path.resolve() == target.resolve() else typed
        ANSWER.put({"path": str(target), "next": [f"fxtune +recipe={name}"]})
        print(f"{arguments[1]} -> {target}\nEdit it, then: fxtune +recipe={name}")
    else:
        raise ConfigError(f"`fxtune recipes {' '.join(arguments)}` is not a command. Use one of:\n{_USAGE}")


def copy(name: str, target: Path) -> Path:
    """Copy the recipe `name` to `target`, a file or a folder. Never overwrites a file."""
    source = discovery.find(name)
    if target.is_dir():
        target = target / f"{source.name}.yaml"
    if target.suffix not in discovery.ENDINGS:
        raise ConfigError(f"{target}: a recipe's file ends in .yaml; use {target.with_suffix('.yaml')}")
    if target.exists():
        raise ConfigError(f"{target} exists already and is not overwritten; choose another name")
    try:
        text = source.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source.path} cannot be read as a text file: {error}") from error
    discovery.write_new(target, text if discovery.SCHEMA_LINE in text else f"{discovery.SCHEMA_LINE}\n{text}")
    return target
