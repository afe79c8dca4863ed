"""Compares the installed packages with the tested range, which pyproject.toml declares.

The range is read from the metadata of the installed fxtune. No package is imported for it. A torch above the range is
refused, because fxtune relies on more of it than its public functions. Other packages get a line, and a run goes on.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


@cache
def _requirements() -> list[Requirement]:
    """What fxtune needs, with its extras, but for the tools of developers. Empty without metadata of fxtune, as in a
    checkout that was never installed."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("fxtune") or ()]
    except metadata.PackageNotFoundError:
        return []
    return [one for one in requirements if one.marker is None or "dev" not in str(one.marker)]


def newer_torch(version: str) -> str:
    """Why this version of torch is refused: it is above the tested range. Empty if it is not."""
    for requirement in _requirements():
        upper = SpecifierSet(",".join(str(end) for end in requirement.specifier if end.operator.startswith("<")))
        if requirement.name == "torch" and not upper.contains(version, prereleases=True):
            return (
                f"torch {version} is newer than the versions that fxtune is tested with. Install a tested one: "
                f"pip install 'torch{_range(requirement)}'"
            )
    return ""


@cache
def outside_tested_range() -> str:
    """One line that names the packages with a version outside the tested range; empty if there is none. Extras count
    if they are installed."""
    found = {}
    for requirement in _requirements():
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found[requirement.name] = f"{requirement.name} {version} (tested: {_range(requirement)})"
    return f"Outside the tested range: {'; '.join(found.values())}" if found else ""


def _range(requirement: Requirement) -> str:
    """The range with its lower end first: `>=2.11,<2.15`."""
    return ",".join(sorted(str(requirement.specifier).split(","), reverse=True))
