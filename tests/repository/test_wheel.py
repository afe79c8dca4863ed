"""A wheel, built and installed outside a checkout, contains its recipes, config groups, pages and assets."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("hatchling", reason="building a wheel without a network needs hatchling installed")
    out = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=CHECKOUT, check=True, capture_output=True, timeout=600)
    (built,) = out.glob("fxtune-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with only the installed package. Its dependencies come from this environment."""
    target = tmp_path_factory.mktemp("site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(pip, check=True, capture_output=True, timeout=600)
    return target


def run(installed: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess:
    """Run the installed package's main in `cwd`, outside a checkout."""
    script = f"import sys; sys.path.insert(0, {str(installed)!r}); from fxtune.cli.main import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": ""},
    )


def test_wheel_holds_all_recipes_configs_pages_and_assets(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, inside in (
        ("recipes", "fxtune/recipes"),
        ("configs", "fxtune/configs"),
        ("docs", "fxtune/docs"),
        ("fxtune/assets", "fxtune/assets"),
    ):
        files = [path for path in (CHECKOUT / folder).rglob("*") if path.is_file()]
        assert files
        missing = {f"{inside}/{path.relative_to(CHECKOUT / folder)}" for path in files} - names
        assert not missing
    assert not any("tests/" in name or name.endswith(".pyc") for name in names)


@pytest.mark.vital
def test_installed_wheel_finds_its_recipes_from_any_folder(installed, tmp_path):
    done = run(installed, tmp_path, "recipes")
    assert done.returncode == 0
    assert f"shipped with fxtune, in {installed}/fxtune/recipes/" in done.stdout
    assert f"such as docs/data.md, is in {installed}/fxtune/docs." in run(installed, tmp_path, "--help").stdout
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("# mine\ndefaults: [quickstart]\ntrain: {max_steps: 123}\n")
    done = run(installed, tmp_path, "+recipe=mine", "optimizer=muon", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "max_steps: 123" in done.stdout
    assert "name: muon" in done.stdout
    assert "path: builtin:quickstart_train" in done.stdout


def test_checkout_finds_its_recipes_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", "recipes"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert done.returncode == 0
    assert f"shipped with fxtune, in {CHECKOUT}/recipes/" in done.stdout
