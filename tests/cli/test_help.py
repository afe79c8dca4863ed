"""`fxtune help KEY`: each key of the config is explained, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxtune
from fxtune.cli import help as pages
from fxtune.cli.main import COMMANDS, main
from fxtune.config.introspection import Slot, all_keys
from fxtune.config.root import Config


def page(capsys, key: str) -> str:
    assert main(["help", key]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_key_is_explained_with_type_range_default_and_file(cwd, capsys):
    text = page(capsys, "optimizer.lr")
    for part in ("Peak learning rate.", "a number", "above 0", "0.0002", "learning_rate", "fxtune/optim/optimizer.py"):
        assert part in text
    assert "auto or a whole number" in page(capsys, "run.gpus")
    text = page(capsys, "run.resume")
    assert "values │ auto, never, must" in text
    assert "fxtune/training/trainer.py" in text
    assert page(capsys, "learning_rate") == page(capsys, "optimizer.lr"), "the name in other trainers"
    assert "on the command line only" in page(capsys, "run.dir")


@pytest.mark.parametrize("spelling", ["data.sources.path", "data.sources.0.path", "data.sources[2].path"])
def test_key_of_a_list_s_entry_is_found(cwd, capsys, spelling):
    text = page(capsys, spelling)
    assert "A file, a folder, a glob" in text
    assert "it must be set" in text
    assert "fxtune/data/read/sources.py" in text


def test_section_lists_its_keys_and_its_config_group(cwd, capsys):
    text = page(capsys, "optimizer")
    assert "optimizer=muon" in text
    assert all(f"optimizer.{name}" in text for name in Slot(Config).fields["optimizer"].fields)
    assert "data.sources.0.columns" in page(capsys, "data.sources")
    assert "train.eval_every" in page(capsys, "train"), "train is a section and a command"


def test_key_of_any_name_is_explained(cwd, capsys):
    assert "anything" in page(capsys, "model.architecture.hidden_size")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("optimizer.lrr", "unknown key `optimizer.lrr`; did you mean `optimizer.lr`?"),
        ("data.sources.pth", "did you mean `data.sources.0.path`?"),
        ("zzz", "A config has: run, model"),
        ("optimizer._target_", "cannot name code"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_one(cwd, capsys, key, message):
    assert main(["help", key]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "train"])
def test_command_has_its_own_help(cwd, capsys, name):
    assert main(["help", name]) == 0
    text = capsys.readouterr().out
    assert f"fxtune {name}" in text
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out == text
    for option in COMMANDS[name].options or ():
        assert option in text
    assert ("--steps" in text) == ("--steps" in (COMMANDS[name].options or ())), "options of other commands"


def test_help_alone_is_the_help_of_fxtune(cwd, capsys):
    assert main(["help"]) == 0
    text = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert "exit codes" in text
    assert main(["train", "--help"]) == 0
    assert "may be left out" in capsys.readouterr().out


def leaves() -> list[tuple[str, ...]]:
    keys = [tuple(key.split(".")) for key in all_keys(Config)]
    return [key for key in keys if not any(other[: len(key)] == key and other != key for other in keys)]


def test_every_key_has_a_meaning():
    silent = [".".join(key) for key in leaves() for owner in pages._owners(key) if not pages._doc(owner, key[-1])]
    assert silent == [], "a string under the field documents the key"


@pytest.mark.slow
def test_every_key_acts_in_files_that_exist():
    root = Path(fxtune.__file__).parents[1]
    for key in leaves():
        files = [file for owner in pages._owners(key) for file in pages.acts_in(list(key), owner)]
        assert files
        assert all((root / file).is_file() for file in files), key


def test_objective_lists_the_metrics_with_a_line_each(cwd, capsys):
    text = page(capsys, "objective")
    for metric in ("reward_accuracy", "reward_margin", "log_probs_chosen", "length_rejected"):
        assert metric in text
    assert "tokens of the chosen answer" in text


def test_a_key_of_several_objectives_has_a_page_for_each(capsys):
    assert main(["help", "objective.beta"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("dpo", "ipo", "kto", "orpo", "simpo"):
        assert f"objective.beta of objective={name}" in said
    assert "The paper's tau" in said
    assert "default │ 2.0" in said
