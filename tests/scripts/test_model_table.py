"""scripts/make/model_table.py: tiny models of any type, and the table of docs/models.md."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["apertus", "cohere2_moe"])
def test_a_row_is_as_the_page_has_it(script, kind, tmp_path, monkeypatch):
    import functools

    import torch

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    row = script.attempt(kind, script.write_chats(tmp_path), tmp_path / "run")
    assert str(row) == script.rows_of(script.PAGE.read_text())[kind]
