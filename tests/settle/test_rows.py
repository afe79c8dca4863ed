"""Whether the rows of a run are packed."""

from __future__ import annotations

import pytest
from support.architectures import CPU, random_model

from fxtune.config.root import Config
from fxtune.data.config import AUTO, DataConfig
from fxtune.models.load import load_config
from fxtune.settle.rows import decide_rows
from fxtune.techniques.compile.technique import Compile
from fxtune.techniques.pipeline import Pipeline


def decided(**data: object) -> tuple[DataConfig, list[str], object]:
    config = Config(model=random_model("llama"), data=DataConfig(sequence_length=64, **data))
    return decide_rows(config, CPU.facts(), load_config(config.model))


def test_rows_are_packed_where_the_attention_keeps_documents_apart():
    data, notes, facts = decided()
    assert data.packing is True
    assert notes == []
    assert (facts.packing, facts.rows) == (True, (64,))


def test_rows_with_lengths_to_pad_to_are_padded_and_a_line_says_why():
    data, (note,), facts = decided(buckets=[16, 64])
    assert data.packing is False
    assert (
        note == "packing: off, because data.buckets has lengths to pad to; each row holds one document, with padding"
    )
    assert (facts.packing, facts.rows) == (False, (16, 64))


def test_padded_rows_that_are_compiled_get_a_few_lengths():
    config = Config(model=random_model("llama"), data=DataConfig(sequence_length=64))
    config.techniques = Pipeline(compile=Compile(enabled=True))
    config.techniques.attention.enabled = False
    assert config.data.packing == AUTO
    data, (note,), facts = decide_rows(config, CPU.facts(), load_config(config.model))
    assert data.buckets == [8, 16, 32, 64]
    assert "because techniques.attention.enabled=false" in note
    assert facts.rows == (8, 16, 32, 64)


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_recipe_says_is_not_decided(asked):
    _, notes, facts = decided(packing=str(asked).lower())
    assert facts.packing is asked
    assert notes == []
