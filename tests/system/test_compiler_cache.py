"""Where the compiler's results are kept: a folder for each state of our own operators, and no more of them than are of use."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.imports import imports, modules
from torch import nn
from transformers import LlamaConfig

from fxtune.optim.config import OptimizerConfig, OptimizerName
from fxtune.optim.optimizer import Optimizer
from fxtune.system import code_digest, compiler_cache
from fxtune.system.facts import Library
from fxtune.techniques.attention.technique import Attention


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache of fxtune's; afterwards the environment is as it was."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(compiler_cache.VARIABLE, "any")  # so that what is set in a test is taken back
    monkeypatch.delenv(compiler_cache.VARIABLE)
    return tmp_path / "cache" / "fxtune" / "inductor"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """fxtune's source, to be changed."""
    copy = tmp_path / "fxtune"
    shutil.copytree(code_digest.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_digest, "PACKAGE", copy)
    code_digest._digest.cache_clear()
    return copy


def changed(file: Path) -> None:
    """As if in another process, which reads the source anew."""
    file.write_text(file.read_text() + "\nWIDTH = 64\n")
    code_digest._digest.cache_clear()


def test_a_changed_operator_has_another_folder(home, package):
    first = compiler_cache.keep_on_disk()
    assert first.parent == home
    assert os.environ[compiler_cache.VARIABLE] == str(first)
    assert compiler_cache.keep_on_disk() == first
    changed(package / "techniques" / "rope.py")
    assert compiler_cache.keep_on_disk() == first, "what torch traces is in the graph, and so in its own key"
    changed(package / "kernels" / "fused_lora.py")
    second = compiler_cache.keep_on_disk()
    assert second.parent == home
    assert second != first
    assert second.is_dir()
    (package / "kernels" / "selective.py").rename(package / "kernels" / "selection.py")
    code_digest._digest.cache_clear()
    assert compiler_cache.keep_on_disk() not in (first, second)


@pytest.mark.parametrize(
    "options",
    [
        dict(name=OptimizerName.adamw, stochastic_rounding=True),
        dict(name=OptimizerName.adamw_8bit, library=Library.torchao),
    ],
)
def test_what_an_optimizer_compiles_lies_there_too(home, options):
    """torch's own default is below /tmp, where other users of a machine may put what would be loaded as code."""
    Optimizer(nn.Linear(64, 64, bias=False).bfloat16(), OptimizerConfig(**options))
    assert os.environ[compiler_cache.VARIABLE].startswith(str(home))


def test_what_transformers_compiles_for_flex_attention_lies_there_too(home):
    hf_config = LlamaConfig()
    Attention(enabled=True, backend="flex").configure(hf_config)
    assert hf_config._attn_implementation == "flex_attention"
    assert os.environ[compiler_cache.VARIABLE].startswith(str(home))


def test_operators_are_all_in_kernels_and_need_nothing_else_of_ours():
    for name, path in modules().items():
        if name.startswith("kernels."):
            others = {one for one in imports(path, set(modules())) if not one.startswith("kernels")}
            # Of these nothing is in what operators compute: an error's text, where a package keeps its files.
            assert others <= {"errors", "halving", "host"}, (
                f"{name} imports {others}: not in the digest of the compiler's cache"
            )
        else:
            assert "custom_op" not in path.read_text(), (
                f"{name}: operators are in kernels/, see fxtune/system/compiler_cache.py"
            )


def test_a_folder_that_the_environment_names_is_used_and_stays(home, package, tmp_path, monkeypatch):
    monkeypatch.setenv(compiler_cache.VARIABLE, str(tmp_path / "mine"))
    folders = []
    for _ in range(5):
        folders.append(compiler_cache.keep_on_disk())
        changed(package / "kernels" / "gated.py")
    assert {folder.parent for folder in folders} == {tmp_path / "mine"}
    assert len(set(folders)) == 5
    assert all(folder.is_dir() for folder in folders)
    assert not home.exists()


def test_without_a_home_it_is_below_the_systems_own(home, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path / "temporary")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    folder = compiler_cache.keep_on_disk()
    assert folder.parent == tmp_path / "temporary"
    assert folder.is_dir()


HOLD = """
import sys
from pathlib import Path
from fxtune import compiled
for folder in sys.argv[1:]:
    compiled.hold(Path(folder))
    Path(folder).mkdir(exist_ok=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_old_folders_go_but_for_the_last_ones_and_those_in_use(home):
    home.mkdir(parents=True)
    folders = [home / f"fxtune-{number:012x}" for number in range(6)]
    for age, folder in enumerate(folders):
        folder.mkdir()
        (folder / "graph").write_text("compiled")
        folder.with_suffix(".lock").touch()
        os.utime(folder.with_suffix(".lock"), (1e9 - age, 1e9 - age))
    (home / "other").mkdir()
    last = folders[-1]
    command = [sys.executable, "-c", HOLD, str(last)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout.readline() == "held\n"
        os.utime(last.with_suffix(".lock"), (1, 1))
        mine = compiler_cache.keep_on_disk()
        there = {file.name for file in home.iterdir() if file.is_dir()}
        assert there == {mine.name, folders[0].name, folders[1].name, last.name, "other"}
        assert (last / "graph").exists()
        one.stdin.close()
    compiler_cache.tidy(home)
    assert not last.exists()
    assert not last.with_suffix(".lock").exists()
    assert mine.is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="reads libraries of Linux")
def test_libraries_that_a_kill_cut_short_are_removed_but_not_what_is_being_linked(home):
    """torch loads a library that is there, whole or not, so that a run killed while it compiled could never start again."""
    whole = (Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so").read_bytes()
    at, size, count = struct.unpack_from("<Q10xHH", whole, 40)
    whole = whole[: at + size * count]  # as a linker writes it: in torch's CUDA builds something is put behind it
    folder = compiler_cache.keep_on_disk()
    (folder / "aa").mkdir()
    for name, length in (
        ("whole.so", len(whole)),
        ("empty.main.so", 0),
        ("short.so", len(whole) - 1),
        ("linked.main.so", 64),
    ):
        (folder / "aa" / name).write_bytes(whole[:length])
    (folder / "locks").mkdir()
    holds = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holds, str(folder / "locks" / "linked.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as linker:
        assert linker.stdout.readline()
        compiler_cache.keep_on_disk()
        linker.stdin.close()
    assert sorted(file.name for file in (folder / "aa").iterdir()) == ["linked.main.so", "whole.so"]
    compiler_cache.keep_on_disk()
    assert [file.name for file in (folder / "aa").iterdir()] == ["whole.so"]
