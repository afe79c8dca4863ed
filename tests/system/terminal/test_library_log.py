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
import fxtune

@fxtune.metric("always_right")
def always_right(answer, right):
    return 1.0

warnings.warn("an old keyword", FutureWarning)
logging.getLogger("some_library").warning("a slow path")
logging.getLogger("some_library").error("a lost file")
"""


@pytest.fixture
def noisy(tmp_path):
    """Runs a command of which each process, the workers included, meets a noisy library."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
        plugin = tmp_path / "noisy.py"
        plugin.write_text(NOISE)
        command = [sys.executable, "-m", "fxtune", *words[:1], "--plugin", str(plugin), *words[1:]]
        variables = {**os.environ, **variables}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=variables)

    return run


def test_a_run_has_a_clean_terminal_and_the_text_in_its_folder(noisy, tmp_path):
    short = ("train.max_steps=1", "data.questions.path=null", "run.report=false")
    done = noisy("train", QUICK, *short, "loader.num_workers=1", "run.dir=run")
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "an old keyword" not in shown
    assert "Warning" not in shown
    assert "a slow path" not in shown
    assert "a lost file" in done.stderr
    log = (tmp_path / "run" / FILE).read_text()
    assert "FutureWarning: an old keyword" in log
    assert "WARNING some_library: a slow path" in log


@pytest.mark.slow
def test_a_developer_sees_pythons_warnings_or_has_them_raised(noisy):
    assert "an old keyword" in noisy("preview", QUICK, PYTHONWARNINGS="default").stderr
    raised = noisy("preview", QUICK, PYTHONWARNINGS="error:an old keyword")
    assert raised.returncode != 0
    assert "an old keyword" in raised.stderr
