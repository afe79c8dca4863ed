"""run.deterministic=true: kernels without reproducible bits are refused, and no kernel is chosen by timing."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.architectures import enable
from support.runs import history

from fxtune.facts.options import CompileMode
from fxtune.facts.run import Facts
from fxtune.techniques.attention.backends.registry import BACKENDS, hub
from fxtune.techniques.compile.technique import Compile
from fxtune.training import trainer

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "vocab_size": 128256,
}
FREE = Facts(
    device="cuda",
    device_name="NVIDIA H200",
    capability=(9, 0),
    memory=140 * 2**30,
    free_memory=100 * 2**30,
    packages={"torch": "2.11.0", "liger-kernel": "0.8.5", "kernels": "0.11.1"},
    model=LLAMA,
    dtype="bfloat16",
    packing=True,
    sequence_length=4096,
    rows=(4096,),
    techniques=enable(compile={}),
)
FIXED = dataclasses.replace(FREE, deterministic=True)


def test_deterministic_run_times_no_kernels():
    compiled = Compile(enabled=True, mode=CompileMode.max_autotune)
    assert not [why for why in compiled.check(FREE) if "clock" in why]
    assert [why for why in compiled.check(FIXED) if "run.deterministic=true" in why]


@pytest.mark.parametrize("backend", [BACKENDS["cudnn"], hub("hub:kernels-community/flash-attn3")])
def test_nondeterministic_attention_is_refused(backend):
    assert not [why for why, _ in backend.refusals(FREE) if "same bits" in why]
    assert ("does not guarantee the same bits each time", "Set run.deterministic=false, or use auto") in [
        *backend.refusals(FIXED)
    ]


def test_deterministic_cpu_run_repeats_bit_for_bit_without_filling_memory(narrow, cwd):
    narrow.run.deterministic, narrow.techniques.lora.dropout = True, 0.1
    found = []
    for name in ("one", "two"):
        narrow.run.name = name
        trainer.run(narrow)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        found.append(
            (
                (cwd / "runs" / name / "adapter" / "adapter_model.safetensors").read_bytes(),
                [(line.get("train/loss"), line.get("train/grad_norm")) for line in history(cwd / "runs" / name)],
            )
        )
    torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]
