"""Whether the rows of a run are packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.architectures import CPU, random_model

from fxtune.config.root import Config
from fxtune.data.config import AUTO, DataConfig
from fxtune.models.load import DType, load_config
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.dpo import DPO
from fxtune.objectives.kto import KTO
from fxtune.objectives.reward import Reward
from fxtune.settle.refusals import refusals
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


def decided_for_pairs(objective=DPO, family: str = "llama", device: str = "cpu", **data: object):
    """As decided(), with `share_prompts` as chosen, the notes, and what a run would be refused for."""
    model = replace(random_model(family), dtype=DType.float32)
    config = Config(model=model, data=DataConfig(sequence_length=64, **data), objective=objective())
    here = CPU.facts()
    machine = here if device == "cpu" else replace(here, device="cuda", capability=(9, 0), device_name="H200")
    chosen, notes, facts = decide_rows(config, machine, load_config(config.model))
    assert facts.shares_prompts is chosen.shares_prompts
    return chosen.share_prompts, notes, list(refusals(replace(config, data=chosen), facts))


@pytest.mark.parametrize(("objective", "shares"), [(DPO, True), (Reward, True), (KTO, False), (CausalLM, False)])
def test_pairs_share_their_prompt_and_nothing_else_does(objective, shares):
    assert decided_for_pairs(objective)[:2] == (shares, [])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"packing": False}, "rows are not packed"),
        ({"family": "gemma2"}, "eager does not take bounds of keys here"),  # its soft cap
        ({"device": "cuda"}, "sdpa does not take bounds of keys here"),  # float32 on a GPU
    ],
)
def test_a_line_says_why_prompts_are_not_shared_and_a_demand_is_refused(options, why):
    if options.get("device") != "cuda":  # packing=auto gives up there, too
        assert decided_for_pairs(**options)[:2] == (False, [f"share_prompts: off, because {why}"])
    assert decided_for_pairs(**options, share_prompts=False)[1:] == ([], [])
    _, notes, refused = decided_for_pairs(**options, share_prompts=True)
    assert notes == []
    assert [reason for reason in refused if reason.startswith(f"data.share_prompts: true, but {why}. ")]


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_recipe_says_is_not_decided(asked):
    _, notes, facts = decided(packing=str(asked).lower())
    assert facts.packing is asked
    assert notes == []
