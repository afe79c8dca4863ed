"""Where recipes and config groups lie: ./recipes of the working directory first, then those that ship.

In a checkout the shipped ones are at the top, beside the package; in a wheel they travel inside it. No torch and no Hydra
here, so that `fxtune recipes` answers at once.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fxtune.errors import ConfigError

LOCAL = Path("recipes")
"""The user's own recipes, relative to the working directory."""
HEADER = 4096
"""Characters of a recipe that are looked at for its first comment line."""


@dataclass(frozen=True)
class Recipe:
    name: str
    path: Path
    shipped: bool

    @property
    def title(self) -> str:
        """The file's first comment line, which says in one line what the recipe does."""
        try:
            with self.path.open(encoding="utf-8") as file:
                for line in file.read(HEADER).splitlines():
                    text = line.strip().removeprefix("#").strip()
                    if not line.startswith("#"):
                        break
                    if text and not text.startswith("@package"):
                        return text
        except (OSError, UnicodeDecodeError) as error:
            return f"(cannot be read: {error})"
        return "(no header line)"


def shipped(kind: str) -> Path:
    """The folder of the `recipes` or `configs` that belong to this copy of fxtune."""
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
    """The recipe called `name`, or the one in the file `name` when that ends in .yaml. Raises ConfigError."""
    if name.endswith((".yaml", ".yml")):
        path = Path(os.path.expanduser(name))
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {name}")
        return Recipe(path.stem, path, shipped=False)
    known = recipes()
    if name not in known:
        raise ConfigError(
            f"there is no recipe `{name}`{did_you_mean(name, known)} `fxtune recipes` lists them all; "
            "your own go into ./recipes/NAME.yaml, or are given as a path: +recipe=./mine.yaml"
        )
    return known[name]


def groups() -> dict[str, dict[str, Path]]:
    """The config groups and their options: {"optimizer": {"muon": .../configs/optimizer/muon.yaml, ...}, ...}."""
    folders = sorted(path for path in shipped("configs").iterdir() if path.is_dir())
    return {folder.name: {path.stem: path for path in sorted(folder.glob("*.yaml"))} for folder in folders}


def place(path: Path) -> str:
    """`path` as a user would type it: relative where it lies below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that looks most like `word`, if any does."""
    by_case = {option.lower(): option for option in known}
    close = difflib.get_close_matches(word.lower(), by_case, 1, cutoff)
    return by_case[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str], form: str = "{}") -> str:
    """The end of a sentence about `word`: a full stop, or a suggestion."""
    known = list(known)
    close = nearest(word, known)
    if close is not None:
        return f"; did you mean `{form.format(close)}`?"
    return f". There are: {', '.join(known)}." if 0 < len(known) <= 12 else "."
