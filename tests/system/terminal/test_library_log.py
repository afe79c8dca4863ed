"""Warnings of libraries go to libraries.log of the run's folder; errors show; a developer's wish is respected."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.recipes import QUICK

from fxtune.system.terminal.library_log import FILE

NOISE = """
import logging, warnings

def make_noise():
    warnings.warn("an old keyword", FutureWarning)
    logging.getLogger("some_library").warning("a slow path")
    logging.getLogger("some_library").error("a lost file")
"""
PLUGIN = """
import fxtune

@fxtune.metric("always_right")
def always_right(answer, right):
    return 1.0

make_noise()
"""
SCRIPT = """
import multiprocessing
from pathlib import Path
from fxtune.system.terminal.library_log import LIBRARY_LOG

def worker(log):
    LIBRARY_LOG.collect_in_worker(log)
    logging.getLogger("some_library").warning("of a worker")

if __name__ == "__main__":
    with LIBRARY_LOG.collecting():
        make_noise()  # before the run has a folder
        with LIBRARY_LOG.written_to(Path()):
            process = multiprocessing.get_context("spawn").Process(target=worker, args=(LIBRARY_LOG.file,))
            process.start()
            process.join()
"""


def started(folder, *words: str, **variables: str) -> subprocess.CompletedProcess:
    variables = {**os.environ, **variables}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, env=variables)


def require_clean(done: subprocess.CompletedProcess, log: str) -> None:
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert not [words for words in ("an old keyword", "Warning", "a slow path") if words in shown]
    assert "a lost file" in done.stderr
    assert "FutureWarning: an old keyword" in log
    assert "WARNING some_library: a slow path" in log


def test_the_terminal_is_clean_and_the_folder_has_the_text_of_each_process(tmp_path):
    (tmp_path / "script.py").write_text(NOISE + SCRIPT)
    done = started(tmp_path, "script.py")
    log = (tmp_path / FILE).read_text()
    require_clean(done, log)
    assert "WARNING some_library: of a worker" in log


@pytest.mark.slow
def test_a_run_has_a_clean_terminal_and_a_developer_sees_warnings_or_has_them_raised(tmp_path):
    (tmp_path / "noisy.py").write_text(NOISE + PLUGIN)
    plugin = ("--plugin", str(tmp_path / "noisy.py"), QUICK)
    short = (
        "train.max_steps=1",
        "data.questions.path=null",
        "run.report=false",
        "loader.num_workers=1",
        "run.dir=run",
    )
    done = started(tmp_path, "-m", "fxtune", "train", *plugin, *short)
    require_clean(done, (tmp_path / "run" / FILE).read_text())
    preview = ("-m", "fxtune", "preview", *plugin)
    assert "an old keyword" in started(tmp_path, *preview, PYTHONWARNINGS="default").stderr
    raised = started(tmp_path, *preview, PYTHONWARNINGS="error:an old keyword")
    assert raised.returncode != 0
    assert "an old keyword" in raised.stderr
