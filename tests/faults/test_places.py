"""The environment of a command: no home folder, a deleted working directory, no terminal, unusual names.

Also its exit codes.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.harness import user_environment, wait_for

from fxtune.checkpoint.run_folder import claim, sweep_folder
from fxtune.cli import main as command
from fxtune.cli import recipes
from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.read.sources import open_source
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import (
    CheckError,
    ConfigError,
    DataError,
    HardwareError,
    HubError,
    MemoryShortError,
    NumbersError,
    Stopped,
    StorageError,
)
from fxtune.models.load import ModelConfig, load_tokenizer
from fxtune.system.files.hub import locate
from fxtune.system.machine.host import cache_home
from fxtune.training import trainer

RUN = ["+recipe=quickstart", "run.dir=run"]


@pytest.fixture
def user_without_home(monkeypatch):
    """A user without a passwd entry, as in containers."""

    def unknown(_):
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_tilde_is_the_home_folder(cwd, monkeypatch):
    monkeypatch.setenv("HOME", str(cwd / "home"))
    claim("run", "~/run", "auto", {"run": {"seed": 1}}).release()
    assert (cwd / "home" / "run" / "config.yaml").exists()
    assert not Path("~").exists()
    assert (
        command.main([*RUN[:1], "run.dir='~/sweep'", "-m", "train.max_steps=0,1"]) == 2
    )  # max_steps must be positive
    given: list[str] = []

    def train(config):
        given.append(config.run.dir)
        return Path(config.run.dir), {}

    monkeypatch.setattr(trainer, "train", train)
    assert command.main(["-m", *RUN[:1], "run.dir='~/sweep'", "train.max_steps=1,2"]) == 0
    assert given == [str(cwd / "home" / "sweep" / f"train.max_steps={steps}") for steps in (1, 2)]
    assert sweep_folder(Path("~nobody-of-that-name/x"), "auto", {}) == Path("~nobody-of-that-name/x")


def test_missing_home_error_names_the_variables_to_set(user_without_home, cwd, monkeypatch):
    with pytest.raises(StorageError, match=r"no home folder.* Set HOME or XDG_CACHE_HOME"):
        cache_home()
    with pytest.raises(ConfigError, match="there is no such folder"):
        locate("~/model")
    with pytest.raises(DataError, match="there is no such file"):
        open_source(SourceConfig(path="~/rows.jsonl"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cwd))
    assert cache_home() == cwd / "fxtune"


def test_deleted_working_directory_is_an_error(cwd, capfd):
    Path("gone").mkdir()
    os.chdir("gone")
    Path("../gone").rmdir()
    for words in (["recipes"], RUN):
        assert command.main(words) == 6
        assert capfd.readouterr().err.startswith("fxtune: The working directory does not exist any more.")


def test_broken_link_to_data_is_an_error(cwd):
    Path("rows.jsonl").symlink_to("elsewhere/rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl is a broken link to elsewhere/rows\.jsonl"):
        open_source(SourceConfig(path="rows.jsonl"))


def test_waiting_for_another_tokenizing_process_is_reported(cwd, capsys):
    Path("rows.jsonl").write_text('{"text": "a b c"}\n')
    data, tokenizer = (
        DataConfig(sources=[SourceConfig(path="rows.jsonl")], cache_dir="cache"),
        load_tokenizer(ModelConfig()),
    )
    shutil.rmtree(tokenize(data.sources[0], data, tokenizer, progress=False).folder)
    [lock] = Path("cache/tokens").glob("*.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        seen, waits = [], "Another process is tokenizing rows.jsonl; waiting for it."

        def end_when_it_waits() -> None:
            wait_for(lambda: seen.append(capsys.readouterr().out) or waits in "".join(seen))
            fcntl.flock(held, fcntl.LOCK_UN)

        other = threading.Thread(target=end_when_it_waits)
        other.start()
        assert len(tokenize(data.sources[0], data, tokenizer, progress=False)) == 1
        other.join()


# --- exit codes


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (CheckError("x"), 1),
        (ConfigError("x"), 2),
        (DataError("x"), 3),
        (HardwareError("x"), 4),
        (MemoryShortError("x"), 4),
        (NumbersError("x"), 5),
        (StorageError("x"), 6),
        (HubError("x"), 6),
        (Stopped(signal.SIGTERM), 75),
        (Stopped(signal.SIGUSR1), 75),
        (Stopped(signal.SIGINT), 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_module_exit_code_matches_the_error(error, code, cwd, monkeypatch, capfd):
    """The exit code of `python -m fxtune`. test_signals.py causes the faults; a bug is 1 (test_canary.py)."""

    def run():
        if error:
            raise error

    monkeypatch.setattr(recipes, "run", run)
    monkeypatch.setattr(sys, "argv", ["fxtune", "recipes"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fxtune", run_name="__main__")
    assert ended.value.code == code
    assert "Traceback" not in capfd.readouterr().err


def test_signal_inside_argparse_exits_with_the_signal_code(tmp_path):
    """A signal during parse_known_intermixed_args makes its cleanup fail with an AttributeError, because attributes
    are missing.
    """
    (tmp_path / "broken_off.py").write_text("""
import argparse, os, signal, sys
from fxtune.cli.main import main

def broken_off(*_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        raise AttributeError("save_nargs")

argparse.ArgumentParser.parse_intermixed_args = broken_off
sys.exit(main(["+recipe=quickstart"]))
""")
    done = subprocess.run(
        [sys.executable, "broken_off.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=user_environment(),
    )
    assert (done.returncode, "Traceback" in done.stderr) == (75, False), done.stderr
    assert "SIGTERM: ended before there was anything to save" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_during_startup_exits_with_a_message(number, code, cwd):
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "fxtune", *RUN],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=user_environment(),
        )
    finally:
        signal.signal(signal.SIGINT, usual)
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        process.kill()
        pytest.skip("this system does not list the signals that a process handles")

    def answers() -> bool:
        caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)

    wait_for(answers)
    process.send_signal(number)
    assert process.wait(600) == code
    assert (
        process.stderr.read().strip().endswith("ended before there was anything to save. Give the same command again.")
    )
    assert not Path("run").exists()
