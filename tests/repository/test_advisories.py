"""No version with a known vulnerability is allowed or installed, and scripts/audit.py reports its findings and
failures.

The table protects users where no vulnerability database can be reached. Each entry is a vulnerability that affects
fxtune.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
FIXED = [
    ("torch", "2.6.0", "CVE-2025-32434"),  # torch.load(weights_only=True) runs code
    ("torch", "2.10.0", "CVE-2026-24747"),  # torch.load(weights_only=True) runs code
    ("transformers", "4.48.0", "CVE-2024-11392"),  # unpickles checkpoints
    ("transformers", "5.5.0", "CVE-2026-4372"),  # a config.json loads code from the hub
    ("transformers", "5.5.0", "CVE-2026-5241"),
    ("jinja2", "3.1.6", "CVE-2025-27516"),  # |attr escapes the sandbox
    ("pyyaml", "5.4", "CVE-2020-14343"),  # full_load runs code
    ("numpy", "1.16.3", "CVE-2019-6446"),  # np.load unpickles by default
    ("filelock", "3.20.1", "CVE-2025-68146"),  # the lock follows a link and truncates its target
    ("filelock", "3.20.3", "CVE-2026-22701"),
    ("pyarrow", "14.0.1", "CVE-2023-47248"),  # unpickles the schema of a Parquet file
    ("pillow", "11.3.0", "CVE-2025-48379"),
    ("requests", "2.32.4", "CVE-2024-47081"),  # sends .netrc passwords to another host
    ("urllib3", "2.5.0", "CVE-2025-50181"),
    ("gitpython", "3.1.41", "CVE-2024-22190"),
    ("protobuf", "6.31.1", "CVE-2025-4565"),
]
"""(package, the first fixed version, the advisory)."""


def minimum_versions() -> dict[str, Version]:
    """The lowest version of each package that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(text) for group in groups for text in group]
    return {
        requirement.name.lower(): max(
            Version(spec.version) for spec in requirement.specifier if spec.operator in (">=", "==")
        )
        for requirement in wanted
        if requirement.specifier
    }


@pytest.mark.parametrize(("name", "fixed", "advisory"), FIXED, ids=[entry[2] for entry in FIXED])
def test_no_vulnerable_version_is_allowed_or_installed(name, fixed, advisory):
    if name in minimum_versions():
        assert minimum_versions()[name] >= Version(fixed), (
            f"{name}>={minimum_versions()[name]} in pyproject.toml allows {advisory}"
        )
    try:
        installed = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        assert name not in minimum_versions()
        return
    assert installed >= Version(fixed), f"{name} {installed} is installed, which has {advisory}"


def test_packages_that_read_untrusted_data_have_a_minimum_version():
    assert {"torch", "transformers", "jinja2", "pyyaml", "numpy", "filelock"} <= set(minimum_versions()) & {
        name for name, _, _ in FIXED
    }


VULNERABLE = {
    "name": "jinja2",
    "version": "3.1.5",
    "vulns": [{"id": "PYSEC-1", "aliases": [], "fix_versions": ["3.1.6"]}],
}
FIXABLE = {
    "name": "thing",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-2", "aliases": ["CVE-2"], "fix_versions": ["1.1"]}],
}
UNFIXED = {"name": "other", "version": "2.0", "vulns": [{"id": "PYSEC-3", "aliases": [], "fix_versions": []}]}
FINE = {"name": "good", "version": "3.0", "vulns": []}
UNKNOWN = {"name": "mine", "skip_reason": "Dependency not found on PyPI and could not be audited: mine (1.0)"}
STAND_IN = """
import json, sys, time
known, found = json.loads({answers!r})
out = sys.argv[sys.argv.index("--output") + 1]
answer = known if "--requirement" in sys.argv else found
if answer == "hang":
    time.sleep(600)
if answer == "fail":
    sys.exit("ConnectionError: no route to the database")
open(out, "w").write(json.dumps({{"dependencies": answer, "fixes": []}}))
sys.exit(any(package.get("vulns") for package in answer))
"""


def audit(folder: Path, known: object, found: object, seconds: str = "300") -> subprocess.CompletedProcess:
    """Run the script with a fake pip-audit that answers `known` for the vulnerable version and `found` for the
    installed packages.
    """
    folder.joinpath("pip_audit.py").write_text(textwrap.dedent(STAND_IN.format(answers=json.dumps([known, found]))))
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), "--seconds", seconds]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": str(folder)}
    )


@pytest.mark.parametrize(
    ("found", "code", "lines"),
    [
        ([FIXABLE, FINE], 1, ["thing 1.0: PYSEC-2 CVE-2: fixed in 1.1", "2 packages checked, 1 to upgrade"]),
        ([UNFIXED, FINE], 0, ["other 2.0: PYSEC-3: no version fixes it yet", "2 packages checked, 0 to upgrade"]),
        ([FINE, UNKNOWN], 0, ["1 packages checked, 0 to upgrade; 1 packages that the database does not know"]),
    ],
)
def test_audit_lists_vulnerabilities_and_fails_if_one_has_a_fix(found, code, lines, tmp_path):
    done = audit(tmp_path, [VULNERABLE], found)
    assert done.returncode == code, done.stderr
    assert all(line in done.stdout for line in lines), done.stdout


@pytest.mark.parametrize(
    ("known", "found", "reason"),
    [
        (
            [{**UNKNOWN, "name": "jinja2"}],
            [FINE],
            "does not know that jinja2==3.1.5 is vulnerable (Dependency not found on PyPI",
        ),
        ([{**VULNERABLE, "vulns": []}], [FINE], "it reports no advisory"),
        ("fail", [FINE], "no route to the database"),
        ([VULNERABLE], "fail", "no route to the database"),
        ("hang", [FINE], "did not answer in 2 s"),
        ([VULNERABLE], "hang", "did not answer in"),
    ],
)
def test_audit_that_cannot_run_reports_why(known, found, reason, tmp_path):
    done = audit(tmp_path, known, found, seconds="2" if "hang" in (known, found) else "300")
    assert done.returncode == 0
    assert done.stdout.startswith("audit: not done, ")
    assert reason in done.stdout
    assert "tests/repository/test_advisories.py still checks" in done.stdout
