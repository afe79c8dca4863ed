import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHILD = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', 'import torch'])"


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder with a package that has the name of the largest one, without compiled files."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VALUE = 1\n")
    return package.parent


def compiled(site: Path, code: str = "", **variables: str) -> list[str]:
    """Start fxtune (or `code` after its first lines) with the packages of `site`. Returns the names of the files that
    were compiled into fxtune's cache."""
    cache = site.parent / "cache"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(cache), **variables}
    words = ["-c", f"import fxtune.__main__\n{code}"] if code else ["-m", "fxtune", "--version"]
    subprocess.run([sys.executable, *words], env=environment, check=True, capture_output=True, timeout=600)
    return sorted(file.name.partition(".")[0] for file in (cache / "fxtune" / "bytecode").rglob("*.pyc"))


def test_compiled_files_are_kept_where_python_keeps_none(site):
    assert "commands" in compiled(site, PYTHONDONTWRITEBYTECODE="1")  # fxtune/cli/commands.py


def test_a_child_process_keeps_its_files_there_too(site):
    compiled(site, CHILD, PYTHONDONTWRITEBYTECODE="1")
    assert list(site.parent.joinpath("cache").rglob("site/torch/__init__.*.pyc"))


def test_files_that_lie_beside_the_packages_are_used(site):
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(site)], check=True)
    assert compiled(site, PYTHONDONTWRITEBYTECODE="1") == []


def test_a_folder_of_the_user_stays(site, tmp_path):
    chosen = str(tmp_path / "chosen")
    assert compiled(site, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=chosen) == []


def test_python_keeps_the_files_itself_where_it_can(site):
    assert compiled(site, "import torch", PYTHONPYCACHEPREFIX="") == []
    assert list(site.rglob("*.pyc"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_compiled_files_of_packages_without_permission_are_kept(site):
    (site / "torch").chmod(0o555)
    assert "commands" in compiled(site)
