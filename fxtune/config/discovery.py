"""Finds recipes and config groups. The user's recipes in ./recipes hide shipped recipes of the same name.

This module imports neither torch nor Hydra, so that `fxtune recipes` answers at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fxtune.data.read.files import KINDS
from fxtune.errors import ConfigError, StorageError, did_you_mean, writing
from fxtune.objectives.registry import OBJECTIVES

LOCAL = Path("recipes")
"""The user's own recipes, relative to the working directory."""
ENDINGS = (".yaml", ".yml")
SCHEMA = "fxtune.schema.json"
"""The file of the recipes' JSON Schema, in the folder of the shipped recipes and wherever fxtune writes a recipe."""
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA}"
"""The line of a recipe by which an editor finds the schema."""
NAME_CHARACTERS = "letters, digits, `_`, `-` and `.`"
"""The characters that a recipe's name may have."""


@dataclass(frozen=True)
class Recipe:
    name: str
    path: Path
    shipped: bool

    @property
    def title(self) -> str:
        """The first comment line of the file. It says what the recipe does."""
        try:
            with self.path.open(encoding="utf-8") as file:
                for line in file.read(4096).splitlines():
                    text = line.strip().removeprefix("#").strip()
                    if not line.startswith("#"):
                        break
                    if text and not text.startswith(("@package", "yaml-language-server:")):
                        return text
        except (OSError, UnicodeDecodeError) as error:
            return f"(cannot be read: {error})"
        return "(no header line)"


def shipped(kind: str) -> Path:
    """The shipped folder `recipes`, `configs` or `docs`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    return package / kind if (package / kind).is_dir() else package.parent / kind


@contextmanager
def removed_if_unfinished(*paths: Path) -> Iterator[None]:
    """Remove `paths` if the body raises: a part of a recipe is no recipe, and the next try would not overwrite it."""
    try:
        yield
    except BaseException:
        for path in paths:
            with suppress(OSError):
                path.unlink()
        raise


def write_new(path: Path, text: str) -> None:
    """Write a new recipe, with the schema in its folder. Raises StorageError if `path` exists or cannot be written."""
    with writing(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("x", encoding="utf-8")  # "x" fails if the file exists, without a race
        except FileExistsError as error:
            raise StorageError(f"{path} exists already and is not overwritten. Give another name.") from error
        with removed_if_unfinished(path):
            with file:
                file.write(text)
            if path.parent.resolve() != shipped("recipes").resolve():
                shutil.copyfile(shipped("recipes") / SCHEMA, path.parent / SCHEMA)


def recipes() -> dict[str, Recipe]:
    """Every recipe that `+recipe=NAME` finds from this working directory, by name.

    Names that occur in two subfolders of ./recipes are left out: find() asks for the path.
    """
    found = {path.stem: Recipe(path.stem, path, shipped=True) for path in _files(shipped("recipes"))}
    if LOCAL.resolve() != shipped("recipes").resolve():
        own = _own()
        found |= {name: Recipe(name, paths[0], shipped=False) for name, paths in own.items() if len(paths) == 1}
    return dict(sorted(found.items()))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix in ENDINGS and path.is_file())


def _own() -> dict[str, list[Path]]:
    """The user's recipes by name, at the top of ./recipes and in its subfolders. A recipe at the top hides recipes of
    the same name in subfolders."""
    found = {path.stem: [path] for path in _files(LOCAL)}
    for folder, subfolders, _ in os.walk(LOCAL):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for path in _files(Path(folder)) if Path(folder) != LOCAL else ():
            if found.get(path.stem, [path])[0].parent != LOCAL:
                found.setdefault(path.stem, []).append(path)
    return found


def is_name(text: str) -> bool:
    return all(letter.isalnum() or letter in "_-." for letter in text)


def find(name: str) -> Recipe:
    """The recipe called `name` (`mine`, or `team/mine` for recipes/team/mine.yaml), or the recipe in the file `name`.

    Raises ConfigError.
    """
    if name.endswith(ENDINGS):
        path = Path(os.path.expanduser(name))
        path = path if path.is_file() else LOCAL / path
        if not path.is_file():
            raise ConfigError(f"there is no recipe file {name}")
        return Recipe(path.stem, path, shipped=False)
    known, own = recipes(), _own()
    below = [path for path in own.get(Path(name).name, []) if path.with_suffix("") == LOCAL / name]
    if name not in known and len(below) == 1:
        return Recipe(below[0].stem, below[0], shipped=False)
    if len(paths := own.get(name, [])) > 1:
        raise ConfigError(
            f"there are {len(paths)} recipes `{name}`: {', '.join(map(str, paths))}. Name its folder: "
            f"+recipe={paths[0].relative_to(LOCAL).with_suffix('')}"
        )
    if name not in known:
        raise ConfigError(
            f"there is no recipe `{name}`{did_you_mean(name, known)} `fxtune recipes` lists them all. "
            "Put your own into ./recipes/NAME.yaml, or give a path: +recipe=./mine.yaml"
        )
    return known[name]


def groups() -> dict[str, dict[str, Path]]:
    """The config groups and their options: {"optimizer": {"muon": .../configs/optimizer/muon.yaml, ...}, ...}.

    The path of an objective from a plugin is the plugin's file.
    """
    folders = sorted(path for path in shipped("configs").iterdir() if path.is_dir())
    found = {folder.name: {path.stem: path for path in sorted(folder.glob("*.yaml"))} for folder in folders}
    found["objective"] |= {name: plugin.file for name, plugin in OBJECTIVES.added().items()}
    return found


def place(path: Path) -> str:
    """`path` as a user would type it: relative if it is below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def name_of(path: Path) -> str:
    """What `+recipe=` takes for the recipe in this file: its name, or the path of a file that is not in ./recipes."""
    return path.stem if path.parent.resolve() == LOCAL.resolve() else str(path)


def names_data(text: str) -> bool:
    """Whether a word of the command line looks like a file of rows."""
    return text.lower().endswith(tuple(KINDS))
