"""Isolation of the tracking tests from this machine's accounts."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    """Hide the keys, servers and settings of this machine, and keep tests out of the home folder."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
