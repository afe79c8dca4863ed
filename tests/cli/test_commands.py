"""The table of commands."""

from __future__ import annotations

import importlib

import pytest

from fxtune.cli import main as command


def test_no_arguments_print_the_help(cwd, capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in command.COMMANDS)
    assert command.main(["preview", "--help"]) == 0


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_listed_command_exists(name):
    entry = command.COMMANDS[name]
    module = importlib.import_module(entry.module)
    assert callable(module.run)
    assert entry.positional is None or callable(getattr(module, entry.positional))
