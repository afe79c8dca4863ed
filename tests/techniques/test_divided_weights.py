"""What cannot be combined with weights that are divided over ranks."""

from dataclasses import replace

import pytest
from support.forecasts import LLAMA, card

from fxtune.distributed.parallel import Degrees
from fxtune.errors import ConfigError
from fxtune.techniques import divided_weights
from fxtune.techniques.quantize.check import WITHOUT_FP8

LORA = {"lora": {}}


def sharded(techniques, model=None):
    return card(80, 4096, model=LLAMA | (model or {}), techniques=techniques, degrees=Degrees(shard=2))


@pytest.mark.parametrize(
    ("techniques", "reason"),
    [
        (
            {**LORA, "quantize": {}},
            "weights in nf4 are packed, and not cut by rows. Set techniques.quantize",
        ),
        ({**LORA, "quantize": {"type": "int8"}}, "Set techniques.quantize.type=fp8, "),
        ({"lora": {"dora": True}}, "Set techniques.lora.dora=false"),
        ({"lora": {"init": "pissa"}}, "pissa computes adapters from whole weights"),
        ({"lora": {"modules_to_save": ["lm_head"]}}, "modules_to_save copies whole weights"),
        ({"lora": {"train_tokens": ["a"]}}, "train_tokens copies rows of whole weights"),
        ({**LORA, "compile": {"scope": "model"}}, "Set techniques.compile.scope=layers"),
    ],
)
def test_techniques_that_need_whole_weights_are_refused_with_a_change(techniques, reason):
    facts = sharded(techniques)
    assert any(reason in found for found in divided_weights.refusals(facts)), list(divided_weights.refusals(facts))
    with pytest.raises(ConfigError, match=r"parallel\.shard=2: "):
        facts.techniques.check(facts)


@pytest.mark.parametrize(
    "device", [{"device": "cpu", "capability": None}, {"capability": (8, 0)}], ids=["cpu", "A100"]
)
def test_where_fp8_does_not_run_each_type_gets_one_advice_that_is_not_refused(device):
    advice = set()
    for kind in ("fp8", "nf4", "int8"):
        facts = replace(sharded({**LORA, "quantize": {"type": kind}}), **device)
        with pytest.raises(ConfigError) as refused:
            facts.techniques.check(facts)
        lines = [line for line in str(refused.value).splitlines() if "packed" in line or "fp8" in line]
        assert lines, str(refused.value)
        advice |= {line.partition("Set ")[2] for line in lines if "Set techniques.quantize.enabled=false" in line}
        assert not [line for line in lines if "Use nf4" in line or "type=fp8" in line], lines
    assert advice == {WITHOUT_FP8 + "."}
    assert not list(divided_weights.refusals(replace(sharded({**LORA}), **device)))


@pytest.mark.parametrize(
    ("experts", "lora", "reason"),
    [
        (4, {}, None),
        (3, {}, "2 ranks cannot have equally many experts"),
        (3, {"exclude_modules": ["experts"]}, None),
    ],
)
def test_adapters_of_experts_need_ranks_that_divide_the_experts(experts, lora, reason):
    model = {"model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    facts = sharded({"lora": {"target_modules": ["all-linear"], **lora}}, model)
    found = list(divided_weights.refusals(facts))
    assert [reason in text for text in found] == [True] if reason else not found, found


def test_adapters_over_a_plain_or_fp8_base_are_not_refused():
    together = {**LORA, "compile": {}, "liger": {}, "checkpointing": {}}
    for techniques in (together, {**together, "quantize": {"type": "fp8"}}):
        assert not list(divided_weights.refusals(sharded(techniques)))


def test_experts_in_mxfp4_are_divided_if_the_checkpoint_has_them_so():
    facts = sharded({**LORA, "quantize": {"type": "mxfp4"}})

    def packed(facts):
        return any("weights in mxfp4 are packed" in reason for reason in divided_weights.refusals(facts))

    assert packed(facts)
    assert not packed(replace(facts, ships_mxfp4=True))


def test_a_rank_needs_memory_for_its_part_of_a_quantized_base():
    """130 billion weights in fp8 take 121 GiB; in bfloat16 no host here has room."""
    model = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=150, num_attention_heads=64)
    facts = sharded({**LORA, "quantize": {"type": "fp8"}}, model)
    assert not [reason for reason in facts.techniques.quantize.check(facts) if "GiB" in reason]
    alone = replace(facts, degrees=Degrees())
    assert any("the quantized model takes 1" in reason for reason in facts.techniques.quantize.check(alone))


def test_recorded_passes_are_refused():
    facts = sharded({**LORA, "compile": {"cuda_graphs": "on"}})
    with pytest.raises(ConfigError, match=r"cuda_graphs: ranks gather weights inside a pass \(parallel\.shard\)"):
        facts.techniques.check(facts)
