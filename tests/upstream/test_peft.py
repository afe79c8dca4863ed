"""What peft imports beside itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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


def test_peft_imports_bitsandbytes_for_its_own_linears_only():
    """Also in a process in which peft has found none before."""
    pytest.importorskip("bitsandbytes")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["Linear", False, "Linear4bit", True]
