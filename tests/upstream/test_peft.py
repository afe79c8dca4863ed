"""Names that peft reads as experts, and what it imports beside itself."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import peft
import pytest
from torch import nn

from fxtune.upstream import peft as upstream

PROGRAM = """
import json, sys
import torch
from fxtune.upstream.peft import alone

def adapted(linear):
    with alone() as peft:
        model = torch.nn.Sequential(linear)
        model.is_loaded_in_4bit = True
        return type(peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"])).base_model.model[0]).__name__

found = [adapted(torch.nn.Linear(64, 64)), "bitsandbytes" in sys.modules]
import bitsandbytes
found += [adapted(bitsandbytes.nn.Linear4bit(64, 64)), "bitsandbytes" in sys.modules]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_peft_imports_bitsandbytes_for_its_own_linears_only():
    """Also in a process in which peft has found none before."""
    pytest.importorskip("bitsandbytes")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["Linear", False, "Linear4bit", True]


def mixtral() -> nn.Module:
    model = nn.Module()
    model.config = SimpleNamespace(model_type="mixtral")
    return model


def test_names_of_linears_are_read_as_tensors_of_experts():
    config = peft.LoraConfig(r=1, target_modules=["down_proj", "w1", "w2", "w3"])
    upstream.read_as_experts(config, mixtral())
    assert config.target_parameters
    assert "w2" not in config.target_modules


def test_no_name_is_read_as_an_expert_while_adapters_are_added():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.w2, self.config = nn.Linear(2, 2), {"model_type": "mixtral"}

    config = peft.LoraConfig(r=1, target_modules=["w2"])
    with upstream.targets_as_they_are():
        adapted = peft.get_peft_model(Layer(), config)
    assert hasattr(adapted.base_model.model.w2, "lora_A")
    assert not config.target_parameters
