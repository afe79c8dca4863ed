"""A command line whose training is a stand-in, and a root logger that is restored."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from fxtune.cli import main as command


@pytest.fixture
def trained(monkeypatch) -> list:
    """The configs that training is called with. A stand-in replaces it, so that no model is touched."""
    calls: list = []
    module = types.ModuleType("stand_in_train")
    module.run = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fxtune.cli.stand_in_train", module)
    monkeypatch.setitem(command.COMMANDS, "train", command.Command("", reads_data=True, name="stand_in_train"))
    return calls


@pytest.fixture(autouse=True)
def _restore_root_logger():
    """Restore the root logger, which Hydra's --info changes for the rest of the process."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
