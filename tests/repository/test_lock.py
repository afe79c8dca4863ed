"""requirements.lock names an exact version of each package that `make setup` installs, inside the range of
pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINES = [line.partition("#")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
LOCKED = {canonicalize_name(wanted.name): wanted for wanted in map(Requirement, filter(None, LINES))}
MOVING = ("torch", "transformers", "tokenizers", "huggingface-hub", "datasets", "peft", "liger-kernel", "wandb")
"""Packages of which a minor release has broken fxtune, or may."""

UNLOCKED = ("eval", "hybrid", "mlflow", "trackio")
"""Extras that need an older version of a package than the locked one. Their tests run where they are installed."""

AHEAD = {"torch": (2, 15)}
"""The newest tested minor of a package whose locked version is older: no later torch has a build for CPUs where the lock was made."""


def wanted() -> list[Requirement]:
    """All requirements of pyproject.toml, those of its locked extras and of the build included."""
    project = PYPROJECT["project"]
    groups = [
        project["dependencies"],
        PYPROJECT["build-system"]["requires"],
        *(needs for extra, needs in project["optional-dependencies"].items() if extra not in UNLOCKED),
    ]
    return [requirement for group in groups for requirement in map(Requirement, group) if requirement.name != "fxtune"]


def locked(name: str) -> Version:
    (pin,) = LOCKED[canonicalize_name(name)].specifier
    assert pin.operator == "=="
    return Version(pin.version)


def test_each_requirement_is_locked_inside_its_range():
    outside = [str(each) for each in wanted() if not each.specifier.contains(locked(each.name), prereleases=True)]
    assert not outside


def test_upper_ends_admit_the_locked_version_and_not_the_next_minor():
    for name in MOVING:
        ranges = [each.specifier for each in wanted() if each.name == name]
        major, minor = AHEAD.get(name) or locked(name).release[:2]
        assert ranges, name
        assert not any(each.contains(f"{major}.{minor + 1}.0") for each in ranges), name


def test_lines_are_public_packages_with_one_version_each():
    assert len(LOCKED) == len([line for line in LINES if line])
    assert all(re.fullmatch(r"[a-z0-9.-]+==[^ @/]+( ; .*)?", line) for line in LINES if line)


def installed_needs(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Names of the packages that an installed package needs here, directly or through others."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    for text in metadata.requires(name) or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed = canonicalize_name(need.name)
            yield needed
            yield from installed_needs(needed, frozenset(need.extras), seen)


def test_everything_that_setup_installs_is_locked():
    needs = set(installed_needs("fxtune", frozenset({"dev"}), set()))
    assert len(needs) > 100
    assert needs - LOCKED.keys() - {"fxtune"} == set()
    assert {"pip", "hatchling", "editables", "setuptools"} <= LOCKED.keys()
