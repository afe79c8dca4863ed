"""The compiler cache: one folder for each version of our operators, and old ones removed."""

from __future__ import annotations

import fcntl
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
from fxtune.system.files import code_digest, compiler_cache
from fxtune.techniques.attention.technique import Attention


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty cache of fxtune; the environment is restored afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(compiler_cache.VARIABLE, "any")  # so that what is set in a test is taken back
    monkeypatch.delenv(compiler_cache.VARIABLE)
    return tmp_path / "cache" / "fxtune" / "inductor"


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A copy of fxtune's source that a test may change."""
    copy = tmp_path / "fxtune"
    shutil.copytree(code_digest.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(code_digest, "PACKAGE", copy)
    code_digest.digest.cache_clear()
    return copy


def changed(file: Path) -> None:
    """Change a file, and read the source again as another process would."""
    file.write_text(file.read_text() + "\nWIDTH = 64\n")
    code_digest.digest.cache_clear()


def test_changed_operator_gets_another_folder(home, package):
    first = compiler_cache.use_cache_folder()
    assert first.parent == home
    assert os.environ[compiler_cache.VARIABLE] == str(first)
    assert compiler_cache.use_cache_folder() == first
    changed(package / "techniques" / "rope.py")
    assert compiler_cache.use_cache_folder() == first, "torch's own key covers what it traces"
    changed(package / "kernels" / "fused_lora.py")
    second = compiler_cache.use_cache_folder()
    assert second.parent == home
    assert second != first
    assert second.is_dir()
    (package / "kernels" / "fused_lora.py").rename(package / "kernels" / "lora_fused.py")
    code_digest.digest.cache_clear()
    third = compiler_cache.use_cache_folder()
    assert third not in (first, second)
    changed(package / "techniques" / "checkpointing" / "policy.py")
    assert compiler_cache.use_cache_folder() not in (first, second, third)


@pytest.mark.parametrize(
    "options",
    [
        dict(name=OptimizerName.adamw, stochastic_rounding=True),
        dict(name=OptimizerName.adamw_8bit, stochastic_rounding=True),
    ],
)
def test_compiled_optimizer_uses_the_folder(home, options):
    """torch's default is below /tmp, where other users of the machine could put code that is loaded."""
    Optimizer(nn.Linear(64, 64, bias=False).bfloat16(), OptimizerConfig(**options))
    assert os.environ[compiler_cache.VARIABLE].startswith(str(home))


def test_compiled_flex_attention_uses_the_folder(home):
    hf_config = LlamaConfig()
    Attention(enabled=True, backend="flex").configure(hf_config)
    assert hf_config._attn_implementation == "flex_attention"
    assert os.environ[compiler_cache.VARIABLE].startswith(str(home))


def test_operators_are_all_in_kernels_and_import_only_what_the_digest_covers():
    for name, path in modules().items():
        if name.startswith("kernels."):
            outside = {
                module for module in imports(path, set(modules())) if not module.startswith(("kernels", "upstream"))
            }
            # These do not change what an operator computes: an error's text, where a package keeps its files and which
            # version of it is asked for.
            assert outside <= {"errors", "system.process.oom", "system.machine.host", "system.machine.packages"}, (
                f"{name} imports {outside}: not in the digest of the compiler's cache"
            )
        else:
            assert "custom_op" not in path.read_text(), (
                f"{name}: operators are in kernels/, see fxtune/system/files/compiler_cache.py"
            )


def test_folder_named_by_the_environment_is_used_and_kept(home, package, tmp_path, monkeypatch):
    monkeypatch.setenv(compiler_cache.VARIABLE, str(tmp_path / "mine"))
    folders = []
    for _ in range(5):
        folders.append(compiler_cache.use_cache_folder())
        changed(package / "kernels" / "swiglu.py")
    assert {folder.parent for folder in folders} == {tmp_path / "mine"}
    assert len(set(folders)) == 5
    assert all(folder.is_dir() for folder in folders)
    assert not home.exists()


def test_without_a_writable_cache_the_folder_is_below_the_default(home, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path / "temporary")
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nobody")
    folder = compiler_cache.use_cache_folder()
    assert folder.parent == tmp_path / "temporary"
    assert folder.is_dir()


HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_SH)
print("held", flush=True)
sys.stdin.read()
"""


def test_old_folders_are_removed_except_the_last_used_and_locked_ones(home):
    home.mkdir(parents=True)
    folders = [home / f"fxtune-{number:012x}" for number in range(6)]
    for age, folder in enumerate(folders):
        folder.mkdir()
        (folder / "graph").write_text("compiled")
        folder.with_suffix(".lock").touch()
        os.utime(folder.with_suffix(".lock"), (1e9 - age, 1e9 - age))
    (home / "other").mkdir()
    last = folders[-1]
    command = [sys.executable, "-c", HOLD, str(last.with_suffix(".lock"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout.readline() == "held\n"
        os.utime(last.with_suffix(".lock"), (1, 1))
        mine = compiler_cache.use_cache_folder()
        there = {file.name for file in home.iterdir() if file.is_dir()}
        assert there == {mine.name, folders[0].name, folders[1].name, last.name, "other"}
        assert (last / "graph").exists()
        one.stdin.close()
    with open(mine.with_suffix(".lock")) as own, pytest.raises(BlockingIOError):
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    compiler_cache.remove_unused(home)
    assert not last.exists()
    assert not last.with_suffix(".lock").exists()
    assert mine.is_dir()


@pytest.mark.skipif(sys.platform != "linux", reason="reads libraries of Linux")
def test_truncated_libraries_are_removed_except_those_being_linked(home):
    """torch loads a library that exists even if it is truncated, so a run killed while compiling could never start again."""
    whole = (Path(torch.__file__).parent / "lib" / "libtorch_global_deps.so").read_bytes()
    at, size, count = struct.unpack_from("<Q10xHH", whole, 40)
    whole = whole[: at + size * count]  # as a linker writes it: in torch's CUDA builds something is put behind it
    folder = compiler_cache.use_cache_folder()
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
        compiler_cache.use_cache_folder()
        linker.stdin.close()
    assert sorted(file.name for file in (folder / "aa").iterdir()) == ["linked.main.so", "whole.so"]
    compiler_cache.use_cache_folder()
    assert [file.name for file in (folder / "aa").iterdir()] == ["whole.so"]
