"""Compares the installed packages with the tested range, which pyproject.toml declares.

The range is read from the metadata of the installed fxtune. No package is imported for it. A version of WITHIN above
its range is refused, because fxtune uses private parts of these packages (upstream/). Other packages get a line, and a
run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

WITHIN = ("torch", "transformers", "peft")


@cache
def _requirements() -> list[Requirement]:
    """What fxtune needs, with its extras, but for the tools of developers. Empty without metadata of fxtune, as in a
    checkout that was never installed."""
    try:
        requirements = [Requirement(text) for text in metadata.requires("fxtune") or ()]
    except metadata.PackageNotFoundError:
        return []
    return [need for need in requirements if need.marker is None or "dev" not in str(need.marker)]


def too_new(packages: Mapping[str, str]) -> list[str]:
    """Why packages ({name: version}) are refused: one line for each of WITHIN above its tested range."""
    lines = []
    for requirement in _requirements():
        name, version = requirement.name, packages.get(requirement.name, "0")
        upper = SpecifierSet(",".join(str(end) for end in requirement.specifier if end.operator.startswith("<")))
        if name in WITHIN and not upper.contains(version, prereleases=True):
            lines.append(
                f"{name} {version} is newer than the versions that fxtune is tested with. Install a tested one: "
                f"pip install '{name}{_range(requirement)}'"
            )
    return lines


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
