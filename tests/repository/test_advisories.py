"""No version with a hole that we know of is allowed or installed, and scripts/audit.py says what it found and what it could not.

The table is what holds where no database of holes can be reached. Each entry is a hole that would reach a user of fxtune.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
MENDED = [
    ("torch", "2.6.0", "CVE-2025-32434"),  # torch.load(weights_only=True) runs code
    ("torch", "2.10.0", "CVE-2026-24747"),  # and so it did once more
    ("transformers", "4.48.0", "CVE-2024-11392"),  # checkpoints that are unpickled
    ("transformers", "5.5.0", "CVE-2026-4372"),  # a config.json that loads code of the hub
    ("transformers", "5.5.0", "CVE-2026-5241"),
    ("jinja2", "3.1.6", "CVE-2025-27516"),  # out of the sandbox by |attr
    ("pyyaml", "5.4", "CVE-2020-14343"),  # full_load runs code
    ("numpy", "1.16.3", "CVE-2019-6446"),  # np.load unpickles unless told not to
    ("filelock", "3.20.1", "CVE-2025-68146"),  # the lock follows a link and empties what it points at
    ("filelock", "3.20.3", "CVE-2026-22701"),
    ("pyarrow", "14.0.1", "CVE-2023-47248"),  # a Parquet file whose schema is a pickle
    ("pillow", "11.3.0", "CVE-2025-48379"),
    ("requests", "2.32.4", "CVE-2024-47081"),  # netrc's passwords to another host
    ("urllib3", "2.5.0", "CVE-2025-50181"),
    ("gitpython", "3.1.41", "CVE-2024-22190"),
    ("protobuf", "6.31.1", "CVE-2025-4565"),
]
"""(package, the first version without the hole, the hole's name)."""


def floors() -> dict[str, Version]:
    """The lowest version of each package that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [Requirement(text) for group in groups for text in group]
    return {
        one.name.lower(): max(Version(spec.version) for spec in one.specifier if spec.operator in (">=", "=="))
        for one in wanted
        if one.specifier
    }


@pytest.mark.parametrize(("name", "mended", "hole"), MENDED, ids=[entry[2] for entry in MENDED])
def test_no_version_with_a_known_hole_is_allowed_or_installed(name, mended, hole):
    if name in floors():
        assert floors()[name] >= Version(mended), f"{name}>={floors()[name]} in pyproject.toml allows {hole}"
    try:
        installed = Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        assert name not in floors()
        return
    assert installed >= Version(mended), f"{name} {installed} is installed, which has {hole}"


def test_what_reads_strangers_data_has_a_floor_in_the_table():
    assert {"torch", "transformers", "jinja2", "pyyaml", "numpy", "filelock"} <= set(floors()) & {
        name for name, _, _ in MENDED
    }


BAD = {"name": "jinja2", "version": "3.1.5", "vulns": [{"id": "PYSEC-1", "aliases": [], "fix_versions": ["3.1.6"]}]}
HOLE = {"name": "thing", "version": "1.0", "vulns": [{"id": "PYSEC-2", "aliases": ["CVE-2"], "fix_versions": ["1.1"]}]}
OPEN = {"name": "other", "version": "2.0", "vulns": [{"id": "PYSEC-3", "aliases": [], "fix_versions": []}]}
FINE = {"name": "good", "version": "3.0", "vulns": []}
UNKNOWN = {"name": "mine", "skip_reason": "Dependency not found on PyPI and could not be audited: mine (1.0)"}
STAND_IN = """
import json, sys, time
known, found = json.loads({answers!r})
out = sys.argv[sys.argv.index("--output") + 1]
answer = known if "--requirement" in sys.argv else found
if answer == "hang":
    time.sleep(60)
if answer == "fail":
    sys.exit("ConnectionError: no route to the database")
open(out, "w").write(json.dumps({{"dependencies": answer, "fixes": []}}))
sys.exit(any(package.get("vulns") for package in answer))
"""


def audit(folder: Path, known: object, found: object, seconds: str = "30") -> subprocess.CompletedProcess:
    """Run the script with a pip-audit that gives these answers: for the version that is known to be bad, and for the rest."""
    folder.joinpath("pip_audit.py").write_text(textwrap.dedent(STAND_IN.format(answers=json.dumps([known, found]))))
    command = [sys.executable, str(ROOT / "scripts" / "audit.py"), "--seconds", seconds]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(folder)}
    )


@pytest.mark.parametrize(
    ("found", "code", "told"),
    [
        ([HOLE, FINE], 1, ["thing 1.0: PYSEC-2 CVE-2: mended in 1.1", "2 packages looked up, 1 hole to mend"]),
        ([OPEN, FINE], 0, ["other 2.0: PYSEC-3: no version mends it yet", "2 packages looked up, 0 holes to mend"]),
        (
            [FINE, UNKNOWN],
            0,
            ["1 packages looked up, 0 holes to mend; 1 packages not known to the database and not looked up"],
        ),
    ],
)
def test_an_audit_tells_each_hole_and_fails_where_it_can_be_mended(found, code, told, tmp_path):
    done = audit(tmp_path, [BAD], found)
    assert done.returncode == code, done.stderr
    assert all(line in done.stdout for line in told), done.stdout


@pytest.mark.parametrize(
    ("known", "found", "told"),
    [
        (
            [{**UNKNOWN, "name": "jinja2"}],
            [FINE],
            "does not even know jinja2==3.1.5 to be bad (Dependency not found on PyPI",
        ),
        ([{**BAD, "vulns": []}], [FINE], "it calls that one good"),
        ("fail", [FINE], "no route to the database"),
        ([BAD], "fail", "no route to the database"),
        ("hang", [FINE], "did not answer in 2 s"),
        ([BAD], "hang", "did not answer in"),
    ],
)
def test_an_audit_that_could_not_be_done_says_so_in_time(known, found, told, tmp_path):
    began = time.monotonic()
    done = audit(tmp_path, known, found, seconds="2")
    assert time.monotonic() - began < 20
    assert done.returncode == 0
    assert done.stdout.startswith("audit: not done, ")
    assert told in done.stdout
    assert "What holds instead: tests/repository/test_advisories.py" in done.stdout
