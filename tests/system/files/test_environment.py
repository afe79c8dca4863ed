"""requirements.lock of a run, and how an environment differs from it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.runs import history

from fxtune.errors import ConfigError, StorageError
from fxtune.system.files import environment
from fxtune.training import trainer

HERE = environment.machine(None, "a card")


@pytest.fixture
def lines(tmp_path) -> list[str]:
    (tmp_path / environment.FILE).write_text(environment.lock(HERE))
    return (tmp_path / environment.FILE).read_text().splitlines()


def test_a_run_writes_what_is_installed_and_a_later_environment_equals_it(narrow, cwd):
    narrow.run.dir, narrow.train.max_steps = "run", 1
    trainer.run(narrow)
    assert history(Path("run"))
    text = Path("run", environment.FILE).read_text()
    assert f"# Python: {sys.version.split()[0]}\n" in text
    assert f"\npeft=={metadata.version('peft')}\n" in text
    device = text.partition("# device: ")[2].partition("\n")[0]
    cuda = text.partition("# CUDA: ")[2].partition("\n")[0]
    assert not list(environment.differences(Path("run"), environment.machine(cuda, device)))


def test_each_package_that_fxtune_needs_has_its_exact_version(lines):
    needs = [Requirement(line.partition("#")[0]) for line in lines if line and line[0] not in "#-"]
    found = {need.name: str(need.specifier) for need in needs}
    for name in ("torch", "transformers", "safetensors", "tokenizers", "numpy", "filelock"):  # some through others
        version = metadata.version(name)
        assert found[name] in (f"=={version}", f"=={version.partition('+')[0]}")
    assert "pytest" not in found
    assert "fxtune" not in found


def test_the_file_can_be_installed(tmp_path, lines):
    """pip reads each line, and finds that the packages are installed already. It asks no index."""
    words = ["install", "--dry-run", "--no-deps", "--no-index", "-r", str(tmp_path / environment.FILE)]
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("this environment has no pip")
    done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Would install" not in done.stdout


def test_a_package_of_a_checkout_is_a_comment_without_its_secret(tmp_path, monkeypatch):
    real = metadata.PathDistribution.read_text

    def read_text(self: metadata.PathDistribution, name: str) -> str | None:
        if name == "direct_url.json" and self.metadata["Name"] == "peft":
            return '{"url": "https://me:hunter2@example.org/peft"}'
        return real(self, name)

    monkeypatch.setattr(metadata.PathDistribution, "read_text", read_text)
    (tmp_path / environment.FILE).write_text(environment.lock(HERE))
    text = (tmp_path / environment.FILE).read_text()
    assert f"# peft {metadata.version('peft')} did not come from an index" in text
    assert "hunter2" not in text
    assert not list(environment.differences(tmp_path, HERE))
    (tmp_path / environment.FILE).write_text(text.replace(f"# peft {metadata.version('peft')} ", "# peft 0.1.0 "))
    assert list(environment.differences(tmp_path, HERE)) == [("peft", "0.1.0", metadata.version("peft"))]


def test_differences(tmp_path, lines):
    changed = [line for line in lines if not line.startswith("tqdm==")]
    changed = ["peft==0.1.0" if line.startswith("peft==") else line for line in changed]
    (tmp_path / environment.FILE).write_text("\n".join([*changed, "never-published==1.0"]) + "\n")
    assert set(environment.differences(tmp_path, {**HERE, "Python": "2.7"})) == {
        ("Python", HERE["Python"], "2.7"),
        ("peft", "0.1.0", metadata.version("peft")),
        ("never-published", "1.0", None),
        ("tqdm", "", metadata.version("tqdm")),
    }


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no requirements\.lock"):
        list(environment.differences(tmp_path, HERE))
    (tmp_path / environment.FILE).write_text("# Python: 3\npeft is missing\n")
    with pytest.raises(StorageError, match=r"requirements\.lock, line 2"):
        list(environment.differences(tmp_path, {}))
