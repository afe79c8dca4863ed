"""What `fxtune doctor` finds out without torch: disks, limits, memory, and servers that do or do not answer."""

from __future__ import annotations

import http.server
import os
import resource
import shutil
import threading
from pathlib import Path

import pytest

from fxtune.diagnostics import system_report
from fxtune.diagnostics.system_report import State
from fxtune.distributed.world import Device, World
from fxtune.system.machine import host

CANARY = "hf_canary0123456789abcdef"


def test_a_folder_that_is_not_writable_is_broken(cwd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(str(cwd)))
    assert {finding.what: finding.state for finding in system_report.disks()}["runs"] is State.broken


def test_a_file_in_place_of_a_folder_is_broken(cwd):
    (cwd / "cache").write_text("")
    (finding,) = (one for one in system_report.disks(tokens="cache/tokens") if one.what == "token cache")
    assert finding.state is State.broken
    assert f"{cwd / 'cache'} is no folder" in finding.seen


def test_a_full_disk_and_few_open_files_are_warnings(cwd, monkeypatch):
    usage = shutil.disk_usage(cwd)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    assert {finding.state for finding in system_report.disks()} == {State.warning}
    assert {finding.what: finding.remedy for finding in system_report.host()}["open files"] == "ulimit -n 4096"


def test_the_memory_limit_of_a_container_counts(monkeypatch):
    limits = {
        "/sys/fs/cgroup/memory.max": "2147483648\n",
        "/sys/fs/cgroup/memory.current": "1610612736\n",
        "/sys/fs/cgroup/memory.stat": "anon 1073741824\ninactive_file 536870912\n",
    }
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: limits.get(str(self)) or read_text(self, *a, **k))
    assert host.memory() == (2 << 30, 1 << 30)
    assert World.create(Device.cpu).facts().host_memory == 2 << 30


@pytest.fixture
def server():
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(401)

        def log_message(self, *arguments):
            pass

    running = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize(
    ("check", "variable", "switch", "off"),
    [
        (system_report.hub, "HF_ENDPOINT", "HF_HUB_OFFLINE", "1"),
        (system_report.wandb, "WANDB_BASE_URL", "WANDB_MODE", "offline"),
    ],
)
def test_a_server_answers_or_not_or_is_switched_off(server, tmp_path, monkeypatch, check, variable, switch, off):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv(switch, raising=False)
    monkeypatch.setattr(system_report, "TIMEOUT", 300.0)  # the machine may be busy
    monkeypatch.setenv(variable, server)
    assert check().state is State.works
    monkeypatch.setenv(variable, "http://me:hunter2@127.0.0.1:9")
    refused = check()
    assert refused.state is State.warning
    assert "cannot be reached" in refused.seen
    assert "hunter2" not in refused.seen
    monkeypatch.setenv(switch, off)
    assert "offline" in check().seen
    assert check().state is State.info


def test_a_stored_token_is_found_and_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert "no token" in system_report.hub().seen
    (tmp_path / "token").write_text(CANARY)
    assert "a token in" in system_report.hub().seen
    assert CANARY not in system_report.hub().seen
