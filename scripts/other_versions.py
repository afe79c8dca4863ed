"""Runs the tests with other versions of the packages than the lock's: `make test-newest`, `make test-oldest`.

    python scripts/other_versions.py newest    # without the lock and without upper ends, but for torch's
    python scripts/other_versions.py oldest    # the lower ends of pyproject.toml

Each has an environment of its own (.venv-newest, .venv-oldest). The script prints a table of the packages whose version
differs from the lock and a table of the tests that fail. A test that fails with the oldest versions makes the exit
code 1, because pyproject.toml promises them. With the newest, the exit code is 0 whatever fails.

The requirements are in pyproject.toml. `newest` keeps the upper end of torch, because fxtune refuses a newer torch:
raise it there to try one. PyPI's builds of torch bring CUDA libraries: `oldest` needs 3 GB for them, `newest` 5 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("end", choices=["newest", "oldest"])
    parser.add_argument("tests", nargs=argparse.REMAINDER, help="what pytest gets (default: the tests of `make test`)")
    options = parser.parse_args(argv)
    python = ROOT / f".venv-{options.end}" / "bin" / "python"
    results = python.parents[1] / "tests.xml"
    gate = int(options.end == "oldest")
    if not python.exists():
        subprocess.run(["python3", "-m", "venv", str(python.parents[1])], check=True)
    if not install(options.end, python):
        print("These versions cannot be installed together; the reason stands above.")
        return gate
    results.unlink(missing_ok=True)
    tests = options.tests or ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow"]
    besides = ["--deselect", "tests/repository/test_lock.py"]  # it compares the environment with the lock
    subprocess.run([python, "-m", "pytest", f"--junitxml={results}", *besides, *tests], cwd=ROOT)
    print_table(["package", "requirements.lock", options.end], moved(installed(python), locked()))
    if not results.exists():
        print("\npytest ended before it ran the tests, for the reason above.")
        return gate
    failures = list(failed(results))
    print_table([f"{len(failures)} tests that fail", "why"], failures)
    return gate if failures else 0


def install(end: str, python: Path) -> bool:
    """Install fxtune, its `dev` extra and all they need into the environment."""
    commands: list[list[str | Path]] = [[python, "-m", "pip", "install", "-qq", "--upgrade", "pip", "uv"]]
    if end == "oldest":  # the lowest versions that fit together: a lower end may be below what another package needs
        lowest = python.parents[1] / "requirements.txt"
        resolve = ["pip", "compile", "-q", "--resolution", "lowest-direct", "--extra", "dev", "-o", lowest]
        commands.append([python.with_name("uv"), *resolve, "--python", python, "pyproject.toml"])
        wanted: list[str | Path] = ["-r", lowest]
    else:
        wanted = ["--upgrade", "--upgrade-strategy", "eager", *map(str, without_upper_ends())]
    commands.append([python, "-m", "pip", "install", "-qq", *wanted])
    commands.append([python, "-m", "pip", "install", "-qq", "--no-deps", "-e", "."])
    return all(subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0 for command in commands)


def without_upper_ends() -> Iterator[Requirement]:
    """The requirements of fxtune and of its `dev` extra, each with its lower end only; torch has both."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for need in map(Requirement, [*project["dependencies"], *extras["quant"], *extras["rl"], *extras["dev"]]):
        if need.name != project["name"]:
            if need.name != "torch":
                need.specifier = SpecifierSet(",".join(str(spec) for spec in need.specifier if spec.operator == ">="))
            yield need


def locked() -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    return {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}


def installed(python: Path) -> dict[str, str]:
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True, text=True
    ).stdout
    return {canonicalize_name(each["name"]): each["version"] for each in json.loads(listed)}


def moved(here: dict[str, str], lock: dict[str, str]) -> list[tuple[str, str, str]]:
    """(package, version in the lock or `-`, installed version) of each package that differs."""
    return [
        (name, lock.get(name, "-"), version)
        for name, version in sorted(here.items())
        if name != "fxtune" and lock.get(name) != version.partition("+")[0]
    ]


def failed(results: Path) -> Iterator[tuple[str, str]]:
    """The tests that failed or could not run, each with the first line of its message."""
    for case in ElementTree.parse(results).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            why = (problem.get("message") or "").strip().partition("\n")[0]
            yield f"{case.get('classname', '')}::{case.get('name')}", why[:160]


def print_table(titles: list[str], rows: list[tuple[str, ...]]) -> None:
    print()
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    for row in [titles, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    raise SystemExit(main())
