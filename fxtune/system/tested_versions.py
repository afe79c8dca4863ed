"""Compares the installed packages with the tested range, which pyproject.toml declares.

The range is read from the metadata of the installed fxtune. No package is imported for it.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata

from packaging.requirements import Requirement


@cache
def outside_tested_range() -> str:
    """One line that names the packages with a version outside the tested range; empty if there is none.

    Extras count if they are installed, but for the tools of developers. Without metadata of fxtune, as in a checkout
    that was never installed, nothing is known and the line is empty.
    """
    try:
        requirements = [Requirement(text) for text in metadata.requires("fxtune") or ()]
    except metadata.PackageNotFoundError:
        return ""
    found = {}
    for requirement in requirements:
        if requirement.marker is not None and "dev" in str(requirement.marker):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            tested = ", ".join(sorted(str(requirement.specifier).split(","), reverse=True))
            found[requirement.name] = f"{requirement.name} {version} (tested: {tested})"
    return f"Outside the tested range: {'; '.join(found.values())}" if found else ""
