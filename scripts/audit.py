"""Checks the installed packages for known vulnerabilities with pip-audit: `make audit`, part of `make check`.

Prints one line for each vulnerability. The exit code is 1 if a version with a fix exists; a vulnerability without a
fix is printed and does not fail.

pip-audit prints "no known vulnerabilities" also if its database does not answer, as behind a package mirror without a database. So
the script first looks up a version that is known to be vulnerable. If the database does not know that one, the script
says that the audit was not done. tests/repository/test_advisories.py holds in any case: pyproject.toml allows no
version with a known vulnerability, and none is installed. The script never takes longer than --seconds.
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

FALLBACK = "tests/repository/test_advisories.py still checks that pyproject.toml allows no version with a known vulnerability."
ACCEPTED: dict[str, str] = {}
"""Advisories that do not affect fxtune, each with the reason: {"CVE-...": "we never call ..."}."""
KNOWN_BAD = "jinja2==3.1.5"  # CVE-2025-27516


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90, help="give up after this long (default 90)")
    parser.add_argument("--requirements", type=Path, help="check these pinned packages, not the installed ones")
    options = parser.parse_args(argv)
    deadline = time.monotonic() + options.seconds
    found = database_problem(options.seconds) or look_up(max(1.0, deadline - time.monotonic()), options.requirements)
    if isinstance(found, str):
        print(f"audit: not done, {found}. {FALLBACK}")
        return 0
    return report(found)


def database_problem(seconds: float) -> str | None:
    """Why the database cannot be trusted, or None if it knows the vulnerable version KNOWN_BAD."""
    with tempfile.TemporaryDirectory() as scratch:
        pinned = Path(scratch) / "known_bad.txt"
        pinned.write_text(KNOWN_BAD + "\n")
        found = look_up(seconds, pinned)
    if isinstance(found, str):
        return found
    if any(package.get("vulns") for package in found):
        return None
    reason = next((package["skip_reason"] for package in found if "skip_reason" in package), "it reports no advisory")
    return f"the database does not know that {KNOWN_BAD} is vulnerable ({reason})"


def look_up(seconds: float, requirements: Path | None = None) -> list[dict[str, Any]] | str:
    """pip-audit's answer for each package, or the reason why there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        packages_options = (
            ["--requirement", str(requirements), "--no-deps", "--disable-pip"] if requirements else ["--skip-editable"]
        )
        try:
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "pip_audit",
                    *packages_options,
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
            lines = done.stderr.strip().splitlines() or ["pip-audit printed nothing"]
            return f"pip-audit failed: {lines[-1][:300]}"
        packages: list[dict[str, Any]] = json.loads(text)["dependencies"]
    return packages


def report(packages: list[dict[str, Any]]) -> int:
    """Print the vulnerabilities. Returns 1 if a version with a fix exists for one of them, else 0."""
    known = [package for package in packages if "skip_reason" not in package]
    fixable = 0
    for package in known:
        for advisory in package["vulns"]:
            names = [advisory["id"], *advisory.get("aliases", [])]
            accepted = next((ACCEPTED[name] for name in names if name in ACCEPTED), None)
            fixed = advisory.get("fix_versions") or []
            state = accepted or (f"fixed in {', '.join(fixed)}" if fixed else "no version fixes it yet")
            print(f"audit: {package['name']} {package['version']}: {' '.join(names)}: {state}")
            fixable += bool(fixed) and accepted is None
    skipped = len(packages) - len(known)
    print(
        f"audit: {len(known)} packages checked, {fixable} to upgrade"
        + (f"; {skipped} packages that the database does not know" if skipped else "")
    )
    return 1 if fixable else 0


if __name__ == "__main__":
    sys.exit(main())
