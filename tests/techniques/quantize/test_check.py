"""What is refused before a weight is read, and what is not."""

from __future__ import annotations

import dataclasses

import pytest
from support.architectures import facts_of, random_model
from support.quantized import qlora

from fxtune.facts.options import AdapterInit, DType

T4 = dict(device="cuda", device_name="Tesla T4", capability=(7, 5))
H200 = dict(device="cuda", device_name="NVIDIA H200", capability=(9, 0), dtype="bfloat16")


def refused(family: str = "llama", facts: dict | None = None, full: bool = False, **options) -> str:
    pipeline = qlora(**options)
    pipeline.lora.enabled = not full
    known = facts_of(random_model(family), **(facts or {}))
    return "\n".join(pipeline.quantize.check(dataclasses.replace(known, techniques=pipeline)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"full": True},
            "enabled: weights in nf4 cannot be trained, only adapters over them. Set techniques.lora.enabled=true",
        ),
        (
            {"facts": {"packages": {}}},
            "type: bitsandbytes stores nf4, and it is not installed. Install it: pip install 'fxtune[quant]'",
        ),
        (
            {"kind": "int8", "facts": {**T4, "capability": (7, 0)}},
            "type: int8 needs compute capability 7.5, and Tesla T4 has 7.0.",
        ),
        ({"facts": {**T4, "capability": (5, 2)}}, "type: nf4 needs compute capability 6.0"),
        ({"facts": T4, "compute": DType.bfloat16}, "compute_dtype: Tesla T4 has no bfloat16 units"),
        ({"facts": H200, "compute": DType.float16}, "compute_dtype: float16 needs loss scaling"),
        (
            {"init": AdapterInit.pissa},
            "enabled: techniques.lora.init=pissa moves a part of the weights into the adapter",
        ),
        ({"init": AdapterInit.olora}, "enabled: techniques.lora.init=olora"),
        ({"modules_to_save": ["down_proj"]}, "skip: techniques.lora.modules_to_save trains down_proj"),
        ({"skip": ("down_prj",)}, "skip: this model has no linear down_prj. Its linears are down_proj, gate_proj"),
        (
            {"skip": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")},
            "enabled: 0 % of this model's",
        ),
        (
            {"facts": {**H200, "free_memory": 60_000}},
            "enabled: the quantized model takes 0.0 GiB, and the card has 0.0 GiB free",
        ),
        (
            {"facts": {**H200, "free_memory": 110_000, "host_memory": 110_000}, "dora": True},
            "enabled: before quantization the model takes",
        ),
    ],
)
def test_check_refuses_with_what_to_change(options, reason):
    assert reason in refused(**options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "int8"},
        {"facts": H200},
        {"facts": T4, "kind": "int8"},
        {"facts": {**T4, "dtype": "float16"}, "compute": DType.float16},
        {"dora": True},
        {"kind": "int8", "dora": True},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["down_proj"], "skip": ("down_proj",)},
        {"facts": {**H200, "free_memory": 110_000, "host_memory": 2**30}, "dora": True},
        {"facts": {**H200, "free_memory": 110_000, "host_memory": 110_000}},
        {"family": "gemma"},
    ],
)
def test_check_accepts_what_can_run(options):
    assert refused(**options) == ""
