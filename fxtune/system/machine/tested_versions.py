"""Compares the installed packages with the tested range, which pyproject.toml declares.

The range is in the metadata of the installed fxtune. fxtune uses private parts of the packages in WITHIN (upstream/),
so it refuses them outside their range. For other packages outside their range it prints a line, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from fxtune.system.machine.packages import installed_version

WITHIN = ("torch", "transformers", "peft")


@cache
def requirements() -> list[Requirement]:
    """The requirements of fxtune and its extras, without developers' tools. The list is empty in a checkout that was
    never installed."""
    try:
        needs = [Requirement(text) for text in metadata.requires("fxtune") or ()]
    except metadata.PackageNotFoundError:
        return []
    return [need for need in needs if need.marker is None or "dev" not in str(need.marker)]


def refusals(packages: Mapping[str, str]) -> list[str]:
    """A line for each package in WITHIN that is outside its tested range. `packages`: {name: version}."""
    lines = []
    for requirement in requirements():
        name, version = requirement.name, packages.get(requirement.name)
        if name not in WITHIN or version is None or requirement.specifier.contains(version, prereleases=True):
            continue
        lowest = min(Version(end.version) for end in requirement.specifier)
        side = "older" if Version(version) < lowest else "newer"
        lines.append(
            f"{name} {version} is {side} than the versions that fxtune is tested with. Install a tested one: "
            f"pip install '{name}{_range(requirement)}'"
        )
    return lines


@cache
def outside_tested_range() -> str:
    """One line that names the packages outside their tested range, except WITHIN; empty if all are inside."""
    found = {}
    for requirement in requirements():
        name, version = requirement.name, installed_version(requirement.name)
        if version and name not in WITHIN and not requirement.specifier.contains(version, prereleases=True):
            found[name] = f"{name} {version} (tested: {_range(requirement)})"
    return f"Outside the tested range: {'; '.join(found.values())}" if found else ""


def _range(requirement: Requirement) -> str:
    """The requirement's range, lower end first: `>=2.11,<2.16`."""
    return ",".join(sorted(str(requirement.specifier).split(","), reverse=True))
