"""scripts/make/model_table.py: tiny models of any type, and the table of docs/models.md."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("model_table", ROOT / "scripts" / "make" / "model_table.py")
    module = sys.modules["model_table"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_one_row_for_each_type_and_only_known_ones(script):
    page = script.PAGE.read_text()
    rows = script.rows_of(page)
    assert rows
    assert all(row.count(" | ") == script.HEAD.count(" | ") for row in rows.values())
    if f"transformers {transformers.__version__} are" in page:
        assert not {*rows} - {*script.kinds()}
        assert script.merged(page, []) == page


@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v3", "qwen3_next"])
def test_sizes_become_small_by_their_names(script, kind):
    from fxtune.models.load import Init, ModelConfig, load_config
    from fxtune.models.structure import skeleton

    config = load_config(ModelConfig(path=None, init=Init.random, architecture=script.tiny(kind)))
    assert sum(weight.numel() for weight in skeleton(config.to_dict()).parameters()) < 1_000_000


def test_the_page_has_every_type_and_only_a_known_one_fails(script):
    rows = script.rows_of(script.PAGE.read_text())
    assert {*script.kinds()} <= {*rows} or f"transformers {transformers.__version__}." not in script.PAGE.read_text()
    # The script finds no small sizes for this one.
    assert {kind for kind, row in rows.items() if "| fails" in row} <= {"gemma4_unified_assistant"}


@pytest.mark.slow
def test_a_part_of_all_types_trains_or_is_refused_as_the_page_says(script, tmp_path, monkeypatch):
    """Sixteen types, others with each version of transformers: all 189 take a quarter of an hour."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    chats, page = script.write_chats(tmp_path), script.PAGE.read_text()
    rows, known = script.rows_of(page), f"transformers {transformers.__version__}" in page
    for kind in random.Random(transformers.__version__).sample(script.kinds(), 16):
        row = script.attempt(kind, chats, tmp_path / "run")
        assert not row.result.startswith("fails"), row
        assert not known or str(row) == rows[kind]
