"""requirements.lock of a run's folder: the environment of training, and its differences from another environment.

The file has the exact version of each installed package that fxtune needs, directly or through another package.
`pip install -r requirements.lock` installs these versions. The first lines are comments: Python, CUDA, the card. A
package from no index (a checkout, a wheel from a folder) is a comment, because pip could not find its version.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from fxtune import __version__
from fxtune.errors import ConfigError, StorageError
from fxtune.system.machine.facts import PACKAGES
from fxtune.system.machine.tested_versions import requirements
from fxtune.system.terminal.redact import redact_text

FILE = "requirements.lock"
INDEX = "https://download.pytorch.org/whl/"
"""The index with torch builds that have a local version (2.11.0+cu130)."""
_FACT = re.compile(r"# ([\w ]+): (.+)")
_ELSEWHERE = re.compile(r"# (\S+) (\S+) did not come from an index")


def machine(cuda: str | None, device: str) -> dict[str, str]:
    """The facts that no package gives. `cuda`: the version that torch is built for; `device`: the name of the card."""
    return {
        "fxtune": __version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "CUDA": cuda or "none",
        "device": device,
    }


@cache
def installed() -> dict[str, metadata.Distribution]:
    """{name: package} of the installed packages that fxtune needs, directly or through another package."""
    found: dict[str, metadata.Distribution] = {}
    # A checkout that was never installed has no metadata.
    waiting = [*requirements()] or [Requirement(name) for name in PACKAGES]
    seen = set[str]()
    while waiting:
        need = waiting.pop()
        if str(need) in seen:
            continue
        seen.add(str(need))
        try:
            package = metadata.distribution(need.name)
            Version(package.version)
        except (metadata.PackageNotFoundError, InvalidVersion):
            continue
        found[canonicalize_name(need.name)] = package
        for text in package.requires or ():
            with suppress(InvalidRequirement):  # of an old package
                below, extras = Requirement(text), ("", *need.extras)
                if below.marker is None or any(below.marker.evaluate({"extra": extra}) for extra in extras):
                    waiting.append(below)
    return dict(sorted(found.items()))


def lock(facts: Mapping[str, str]) -> str:
    """The text of the file for this process. `facts`: machine()."""
    packages = installed()
    local = Version(packages["torch"].version).local if "torch" in packages else None
    local = local if re.fullmatch(r"cpu|xpu|cu\d+|rocm[\d.]+", local or "") else None  # others: a vendor's builds
    lines = [
        f"# What ran. `pip install -r {FILE}` installs it, `fxtune doctor RUN` compares it with another environment.",
        *(f"# {name}: {value}" for name, value in facts.items()),
        *([f"--extra-index-url {INDEX}{local}"] if local else []),
        *(_line(name, package, local) for name, package in packages.items()),
    ]
    return "\n".join(lines) + "\n"


def _line(name: str, package: metadata.Distribution, local: str | None) -> str:
    """The line of a package. `local`: the local version of torch, whose index has builds with this version."""
    version = Version(package.version)
    if origin := package.read_text("direct_url.json"):
        url = redact_text(str(json.loads(origin).get("url")))
        return f"# {name} {version} did not come from an index, but from {url}"
    if version.local in (None, local):
        return f"{name}=={version}"
    return f"{name}=={version.public}  # {version}"


def differences(folder: Path, facts: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield (name, the run's value, the value here) for each fact and package that differs. None: missing here.

    `facts`: machine() here. Raises ConfigError if the run in `folder` has no FILE, StorageError if a line of FILE
    cannot be read.
    """
    file = folder / FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} has no {FILE}: it is no run, or an early version of fxtune trained it. Name a newer run."
        ) from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}. Bring it back.") from error
    here, had = {name: package.version for name, package in installed().items()}, dict[str, str]()
    for number, line in enumerate(lines, 1):
        if (fact := _FACT.fullmatch(line)) and fact[1] in facts and fact[2] != facts[fact[1]]:
            yield fact[1], fact[2], facts[fact[1]]
        if elsewhere := _ELSEWHERE.match(line):
            had[elsewhere[1]] = elsewhere[2]
        if not line.strip() or line.startswith(("#", "-")):
            continue
        try:
            need = Requirement(line.partition("#")[0])
        except InvalidRequirement as error:
            raise StorageError(f"{file}, line {number}: {error}. Bring the file back as it was.") from error
        had[canonicalize_name(need.name)] = str(need.specifier).removeprefix("==")
    for name in sorted({**had, **here}):
        before, now = had.get(name, ""), here.get(name)
        if not before or now is None or not SpecifierSet(f"=={before}").contains(now, prereleases=True):
            yield name, before, now
