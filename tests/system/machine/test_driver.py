import os
import shutil
import subprocess
import sys

import pytest

from fxtune.system.machine.driver import LIBRARY

DRIVER = """#include <stdio.h>
int cuInit(unsigned flags) { puts("started"); fflush(stdout); return 100; }
"""
START = "from fxtune.system.machine.driver import start_driver; start_driver().join()"


def told(**variables: str) -> str:
    command = [sys.executable, "-c", START]
    return subprocess.run(command, env={**os.environ, **variables}, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not shutil.which("cc"), reason="a stand-in for the driver needs a C compiler")
def test_the_driver_is_started_and_its_error_is_left_to_torch(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / LIBRARY, tmp_path / "driver.c"], check=True)
    assert told(LD_LIBRARY_PATH=str(tmp_path)) == "started\n"


def test_a_library_without_the_function_changes_nothing(tmp_path):
    (tmp_path / LIBRARY).write_text("no library")
    assert told(LD_LIBRARY_PATH=str(tmp_path)) == ""
