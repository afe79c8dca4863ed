"""examples/loop.py learns the quickstart, and its weights are those of `fxtune +recipe=quickstart`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.documents import ROOT

from fxtune.cli.main import main

LOOP = ROOT / "examples" / "loop.py"
ADAPTER = Path("runs/loop/adapter")


def run_loop(*overrides: str) -> str:
    done = subprocess.run([sys.executable, LOOP, *overrides], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_loop_is_short_and_uses_no_private_name():
    text = LOOP.read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"(import|\.) ?_[a-z]", text)


@pytest.mark.vital
def test_the_loop_takes_the_steps_of_the_command(cwd):
    short = ["train.max_steps=3", "data.questions.limit=1"]
    run_loop(*short)
    assert main(["+recipe=quickstart", *short]) == 0
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (ADAPTER, Path("runs/quickstart/adapter"))
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


@pytest.mark.slow
def test_the_loop_learns_and_plain_peft_loads_its_adapter(cwd):
    from peft import AutoPeftModelForCausalLM

    before, after = map(int, re.findall(r"(\d+)% right", run_loop("train.max_steps=36", "data.questions.limit=20")))
    assert before <= 10
    assert after >= 90
    assert AutoPeftModelForCausalLM.from_pretrained(ADAPTER).peft_config
