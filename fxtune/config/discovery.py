"""Finds recipes and config groups: in ./recipes of the working directory first, then among those that ship.

The shipped ones are next to the package in a checkout, and inside it in a wheel. This file imports neither torch nor
Hydra, so that `fxtune recipes` answers at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fxtune.errors import ConfigError, did_you_mean

LOCAL = Path("recipes")
"""The user's own recipes, relative to the working directory."""
_HEADER_CHARACTERS = 4096
"""Characters at the start of a recipe that are searched for its first comment line."""


@dataclass(frozen=True)
class Recipe:
    name: str
    path: Path
    shipped: bool

    @property
    def title(self) -> str:
        """The file's first comment line, which says what the recipe does."""
        try:
            with self.path.open(encoding="utf-8") as file:
                for line in file.read(_HEADER_CHARACTERS).splitlines():
                    text = line.strip().removeprefix("#").strip()
                    if not line.startswith("#"):
                        break
                    if text and not text.startswith("@package"):
                        return text
        except (OSError, UnicodeDecodeError) as error:
            return f"(cannot be read: {error})"
        return "(no header line)"


def shipped(kind: str) -> Path:
    """The folder of `recipes` or `configs` that ships with this copy of fxtune."""
    package = Path(__file__).resolve().parents[1]
    return package / kind if (package / kind).is_dir() else package.parent / kind


def recipes() -> dict[str, Recipe]:
    """Every recipe that `+recipe=NAME` finds from this working directory, by name."""
    found = {path.stem: Recipe(path.stem, path, shipped=True) for path in sorted(shipped("recipes").glob("*.yaml"))}
    if LOCAL.resolve() != shipped("recipes").resolve():
        found |= {
            path.stem: Recipe(path.stem, path, shipped=False)
            for path in sorted(LOCAL.glob("*.yaml"))
            if path.is_file()
        }
    return dict(sorted(found.items()))


def find(name: str) -> Recipe:
    """The recipe called `name`, or the one in the file `name` if that ends in .yaml or .yml. Raises ConfigError."""
    if name.endswith((".yaml", ".yml")):
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {name}")
        return Recipe(path.stem, path, shipped=False)
    known = recipes()
    if name not in known:
        raise ConfigError(
            f"there is no recipe `{name}`{did_you_mean(name, known)} `fxtune recipes` lists them all. "
            "Put your own into ./recipes/NAME.yaml, or give a path: +recipe=./mine.yaml"
        )
    return known[name]


def groups() -> dict[str, dict[str, Path]]:
    """The config groups and their options: {"optimizer": {"muon": .../configs/optimizer/muon.yaml, ...}, ...}."""
    folders = sorted(path for path in shipped("configs").iterdir() if path.is_dir())
    return {folder.name: {path.stem: path for path in sorted(folder.glob("*.yaml"))} for folder in folders}


def place(path: Path) -> str:
    """`path` as a user would type it: relative if it is below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
