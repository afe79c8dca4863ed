"""Look the installed packages up in a database of known holes, with pip-audit: `make audit`, part of `make check`.

Prints one line a hole and ends with 1 where one has a version that mends it. Holes without one are told and do not fail: nobody
could do anything about them.

Honest where it cannot know. pip-audit calls what its database does not answer for "no known vulnerabilities", as behind a mirror
of packages that has no database. So it is first asked for a version that everybody knows to be bad: who does not know that one
knows nothing, and that is said. What holds then is tests/repository/test_advisories.py: no version that we know to be bad is allowed by
pyproject.toml, or installed. It never takes longer than --seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

INSTEAD = "What holds instead: tests/repository/test_advisories.py (no version with a known hole is allowed by pyproject.toml)."
ACCEPTED: dict[str, str] = {}
"""Advisories that do not reach us, each with the reason: {"CVE-...": "we never call ..."}."""
KNOWN_BAD = "jinja2==3.1.5"  # CVE-2025-27516


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="give up after this long (default 90)")
    parser.add_argument("--requirements", type=Path, help="look these pinned packages up, not what is installed")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    found = ask_for_known_bad(options.seconds) or look_up(max(1.0, deadline - time.monotonic()), options.requirements)
    if isinstance(found, str):
        print(f"audit: not done, {found}. {INSTEAD}")
        return 0
    return report(found)


def ask_for_known_bad(seconds: float) -> str | None:
    """Why nothing that the database says can be believed; None: it knows a version that is bad."""
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch) / "known_bad.txt"
        pinned.write_text(KNOWN_BAD + "\n")
        found = look_up(seconds, pinned)
    if isinstance(found, str):
        return found
    if any(package.get("vulns") for package in found):
        return None
    reason = next((package["skip_reason"] for package in found if "skip_reason" in package), "it calls that one good")
    return f"the database here does not even know {KNOWN_BAD} to be bad ({reason})"


def look_up(seconds: float, requirements: Path | None = None) -> list[dict[str, Any]] | str:
    """What pip-audit says of each package, or why it says nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        what = (
            ["--requirement", str(requirements), "--no-deps", "--disable-pip"] if requirements else ["--skip-editable"]
        )
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip_audit",
                    *what,
                    "--progress-spinner",
                    "off",
                    "--timeout",
                    "10",
                    "--format",
                    "json",
                    "--output",
                    str(answer),
                    "--cache-dir",
                    f"{scratch}/cache",
                ],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"its database did not answer in {seconds:g} s"
        if not answer.exists() or not (text := answer.read_text()).strip():
            lines = done.stderr.strip().splitlines() or ["pip-audit said nothing"]
            return f"pip-audit failed: {lines[-1][:300]}"
        packages: list[dict[str, Any]] = json.loads(text)["dependencies"]
    return packages


def report(packages: list[dict[str, Any]]) -> int:
    """Print what was found; 1 where something can be done about it."""
    known = [package for package in packages if "skip_reason" not in package]
    mendable = 0
    for package in known:
        for hole in package["vulns"]:
            names = [hole["id"], *hole.get("aliases", [])]
            excuse = next((ACCEPTED[name] for name in names if name in ACCEPTED), None)
            mended = hole.get("fix_versions") or []
            state = excuse or (f"mended in {', '.join(mended)}" if mended else "no version mends it yet")
            print(f"audit: {package['name']} {package['version']}: {' '.join(names)}: {state}")
            mendable += bool(mended) and excuse is None
    skipped = len(packages) - len(known)
    print(
        f"audit: {len(known)} packages looked up, {mendable} hole{'s' if mendable != 1 else ''} to mend"
        + (f"; {skipped} packages not known to the database and not looked up" if skipped else "")
    )
    return 1 if mendable else 0


if __name__ == "__main__":
    sys.exit(main())
