"""Where recipes and groups are found."""

from __future__ import annotations

import pytest
from support.recipes import write_recipe

from fxtune.config import discovery
from fxtune.errors import ConfigError, did_you_mean


def test_local_recipe_hides_the_shipped_one(cwd):
    assert discovery.find("quickstart").shipped
    path = write_recipe("# mine\n", "quickstart")
    found = discovery.find("quickstart")
    assert (found.path, found.shipped, found.title) == (path, False, "mine")
    assert list(discovery.recipes()) == sorted(discovery.recipes())


def test_unknown_recipe_or_path_is_named(cwd):
    with pytest.raises(ConfigError, match="did you mean `quickstart`"):
        discovery.find("qickstart")
    with pytest.raises(ConfigError, match="there is no recipe file"):
        discovery.find("./none.yaml")


def test_groups_hold_their_options():
    assert {"adamw", "muon"} <= set(discovery.groups()["optimizer"])


def test_did_you_mean_proposes_or_lists():
    assert did_you_mean("Lorra", ["lora", "rope"]) == "; did you mean `lora`?"
    assert did_you_mean("xyz", ["lora", "rope"]) == ". There are: lora, rope."
    assert did_you_mean("xyz", map(str, range(20))) == "."


def test_recipe_in_a_subfolder_is_found_by_name(cwd):
    for folder in ("team", "other", ".hidden"):
        (cwd / "recipes" / folder).mkdir(parents=True)
    write_recipe("# ours\n", "team/mine")
    write_recipe("# no\n", ".hidden/secret")
    (cwd / "recipes" / "short.yml").write_text("# short\n")
    assert discovery.find("mine").title == discovery.find("team/mine").title == "ours"
    assert discovery.find("short").title == "short"
    assert "secret" not in discovery.recipes()
    write_recipe("# theirs\n", "other/mine")
    with pytest.raises(
        ConfigError, match=r"2 recipes `mine`: .*other/mine\.yaml, .*team/mine\.yaml.*\+recipe=other/mine"
    ):
        discovery.find("mine")
    assert discovery.find("other/mine").title == "theirs"
    write_recipe("# top\n", "mine")
    assert discovery.find("mine").title == "top", "the one at the top hides those below"
