"""`fxtune recipes`: which recipes there are; `fxtune recipes copy NAME mine.yaml`: one to edit."""

from __future__ import annotations

from pathlib import Path

from fxtune.config import discovery
from fxtune.errors import ConfigError, StorageError
from fxtune.system.console import say

_USAGE = (
    "fxtune recipes                      list the recipes\nfxtune recipes copy NAME mine.yaml  copy one, to edit it"
)


def run(*arguments: str) -> None:
    """List the recipes, or copy one. Raises ConfigError for anything else."""
    if not arguments:
        say(listing())
    elif arguments[0] == "copy" and len(arguments) == 3:
        target = copy(arguments[1], Path(arguments[2]))
        found = discovery.recipes().get(target.stem)
        name = target.stem if found and found.path.resolve() == target.resolve() else _typed(target)
        print(f"{arguments[1]} -> {target}\nEdit it, then: fxtune +recipe={name}")
    else:
        known = "" if arguments[0] == "copy" else f" There is no `fxtune recipes {arguments[0]}`."
        raise ConfigError(f"What shall be done with the recipes?{known}\n{_USAGE}")


def listing() -> str:
    """The recipes, each with its header line, by where they are from."""
    found = discovery.recipes()
    width = max((len(name) for name in found), default=0)
    ours = discovery.place(discovery.shipped("recipes"))
    blocks = []
    for shipped, title in ((False, f"in {discovery.LOCAL}/"), (True, f"shipped with fxtune, in {ours}/")):
        lines = [f"  {recipe.name:{width}}  {recipe.title}" for recipe in found.values() if recipe.shipped is shipped]
        if lines:
            blocks.append("\n".join([title, *lines]))
    return "\n\n".join(
        [*blocks, "Run one: fxtune +recipe=NAME. Make it yours: fxtune recipes copy NAME recipes/mine.yaml"]
    )


def copy(name: str, target: Path) -> Path:
    """Copy the recipe `name` to `target` (a folder: under its own name there). Never writes over a file."""
    source = discovery.find(name)
    if target.is_dir():
        target = target / f"{source.name}.yaml"
    if target.suffix != ".yaml":
        raise ConfigError(f"{target}: a recipe's file ends in .yaml; use {target.with_suffix('.yaml')}")
    try:
        text = source.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source.path} cannot be read as a text file: {error}") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as file:  # "x": fails where there is a file, in one step
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{target} is there already and is left as it is; choose another name") from error
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    return target


def _typed(path: Path) -> str:
    text = str(path)
    return text if "/" in text else f"./{text}"
