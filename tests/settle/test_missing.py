"""Files that are not here: all of a recipe's in one error."""

from __future__ import annotations

import pytest

from fxtune.config.compose import load
from fxtune.errors import HubError, UserError
from fxtune.training import builder


def reasons(error: UserError) -> list[str]:
    return [line.strip().replace("`", "") for line in str(error).splitlines()]


def test_all_missing_files_are_named_at_once_without_network(cwd):
    """conftest.py has HF_HUB_OFFLINE set."""
    words = [
        "model.path=nobody/model",
        "model.tokenizer=nobody/tokenizer",
        "model.adapter=nobody/adapter",
        "data.sources=[{path: nobody/data}, {path: nobody/data, split: more}, {path: builtin:quickstart_train}]",
        "data.eval_sources=[{path: data/held.jsonl}]",
        "techniques=lora",
    ]
    with pytest.raises(HubError) as caught:
        builder.RunBuilder(load(words))
    found = reasons(caught.value)
    assert found[0] == "5 files or data sets of this recipe are missing here:"
    starts = (
        "model.adapter=nobody/adapter:",
        "model.path=nobody/model:",
        "model.tokenizer=nobody/tokenizer:",
        "data.sources: nobody/data:",
        "data.sources: data/held.jsonl:",
    )
    assert all(line.startswith(start) for line, start in zip(found[1:], starts, strict=True)), found
    with pytest.raises(HubError, match=r"^model\.path=nobody/model: "):
        builder.RunBuilder(load(["model.path=nobody/model", "data.sources=[{path: builtin:quickstart_train}]"]))
    words = ["model.tokenizer=nobody/tokenizer", "data.sequence_length=256", "data.sources=[{path: nobody/data}]"]
    with pytest.raises(
        HubError,
        match=r"2 files or data sets .*\n  model\.tokenizer=nobody/tokenizer: .*\n  data\.sources: nobody/data: ",
    ):
        builder.RunBuilder(load(words))
