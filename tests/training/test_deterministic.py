"""run.deterministic=true: kernels without reproducible bits are refused, and no kernel is chosen by timing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from support.architectures import enable
from support.cases import slow_but
from support.decoder_sizes import decoder_sizes
from support.runs import history

from fxtune.cli.main import main
from fxtune.facts.options import CompileMode
from fxtune.facts.run import Facts
from fxtune.techniques.attention.backends.registry import BACKENDS, hub
from fxtune.techniques.compile.technique import Compile
from fxtune.training import trainer

LLAMA = {
    "model_type": "llama",
    **decoder_sizes(4096, 14336, heads=32, vocabulary=128256),
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
    assert [why for why in compiled.check(FIXED) if "run.deterministic=false" in why]


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


WITHOUT_ORDER = """
import fxtune, torch

@fxtune.objective("mine")
class Mine(fxtune.Objective):
    steps = 0

    def loss(self, model, batch):
        Mine.steps += torch.is_grad_enabled()
        if Mine.steps > AFTER:  # torch has no deterministic put_
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        return model.summed_loss(batch), {}

    def normalizer(self, plan, step):
        return float(plan.supervised(step))
"""


@pytest.mark.parametrize("after", slow_but([0, 3], 3), ids=["in the proofs", "in a step"])
def test_an_operator_without_a_deterministic_form_is_one_line(cwd, capsys, after):
    """A run that began with deterministic kernels on a GPU goes on with them on a CPU, until an operator has none."""
    Path("mine.py").write_text(WITHOUT_ORDER.replace("AFTER", str(after)))
    words = ["--plugin", "mine.py", "+recipe=quickstart", "objective=mine", "data.questions.path=null", "run.dir=run"]
    words += ["train.max_steps=6", "train.epochs=null", "train.micro_batch_size=1", "train.global_batch_size=1"]
    assert main([*words, "tracking.display=plain", "train.pause_after=1"]) == 0
    setting = json.loads(Path("run/setting.json").read_text())
    assert setting["kernels"] == {"deterministic": False}, "a CPU has no other kernels"
    Path("run/setting.json").write_text(json.dumps({**setting, "kernels": {"deterministic": True}}))
    capsys.readouterr()
    assert main([*words, "tracking.display=plain"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "deterministic: off" in line]
    assert len(lines) == 1
    assert "put_" in lines[0]
    assert not torch.are_deterministic_algorithms_enabled()
    assert history(Path("run"))[0]["train/step"] == 6
