"""Commands whose standard streams the parent process has closed, as some supervisors do."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_command_with_closed_streams_does_its_work_and_prints_into_no_file(cwd, closed):
    command = f'exec "$0" -m fxtune schema --json schema.json {closed}'
    assert subprocess.run(["bash", "-c", command, sys.executable], stdin=subprocess.DEVNULL).returncode == 0
    assert "properties" in json.loads((cwd / "schema.json").read_text())


def test_a_child_process_prints_into_no_file_of_its_parent(cwd):
    code = (
        "from fxtune.system.terminal.streams import open_closed_streams; import subprocess; open_closed_streams();"
        "file = open('own', 'w'); subprocess.run(['echo', 'noise'], check=True); file.write('own'); print('noise')"
    )
    run = subprocess.run(["bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code], env=dict(os.environ))
    assert (run.returncode, (cwd / "own").read_text()) == (0, "own")
