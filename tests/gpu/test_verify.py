"""`fxtune verify` and `fxtune doctor` on a GPU: every technique acts, every installed package works.

Each runs in a process of its own, because many techniques leave compiled code and process-wide settings behind.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHAPE = (
    "model.init=random",
    "model.architecture={hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 2, "
    "num_attention_heads: 8, num_key_value_heads: 2, head_dim: 128, max_position_embeddings: 8192}",
    "data.sequence_length=1024",
    "train.max_steps=8",
)
"""The quickstart's data with a Llama whose head size every kernel supports."""


def fxtune(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The finished command, and the content of --json."""
    file = folder / "seen.json"
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", *words, "--json", str(file)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert file.exists(), done.stdout[-2000:] + done.stderr[-4000:]
    return done, json.loads(file.read_text())


def test_every_installed_package_works(tmp_path):
    done, seen = fxtune(tmp_path, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["what"]: one for one in seen}
    assert found["GPU 0"]["state"] == found["torch"]["state"] == found["torch.compile"]["state"] == "works"
    assert found["triton"]["state"] == "works", "triton comes with torch's CUDA build"
    for name in ("liger-kernel", "flash-attn-4", "bitsandbytes", "torchao"):
        assert found[name]["state"] in ("works", "missing"), found[name]
        if found[name]["state"] == "works":
            assert "forward and backward" in found[name]["seen"]
    assert "bfloat16 yes" in found["precision"]["seen"] or found["precision"]["seen"].startswith("bfloat16 no")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("model.dtype=float32", "techniques.precision.tf32=false"), id="float32"),
        pytest.param(
            ("model.dtype=float32", "techniques.precision.tf32=true", "techniques.lora.enabled=false"), id="tf32 full"
        ),
        pytest.param(("model.dtype=bfloat16",), id="bfloat16 lora"),
        pytest.param(("model.dtype=float16",), id="float16 lora"),
        pytest.param(("model.dtype=bfloat16", "techniques.quantize.enabled=true"), id="nf4"),
    ],
)
def test_loss_equals_plain_transformers(tmp_path, words):
    done, seen = fxtune(tmp_path, "verify", "+recipe=quickstart", *SHAPE, *words, "--loss")
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(one["technique"] == "memory" and one["observed"].startswith("peak ") for one in seen["evidence"])
    assert len([one for one in seen["loss"] if one["name"].startswith("fxtune")]) == 3


def test_all_techniques_together_and_each_disabled_in_turn(tmp_path):
    done, seen = fxtune(
        tmp_path,
        "verify",
        "+recipe=quickstart",
        *SHAPE,
        "model.dtype=bfloat16",
        "--each",
        "techniques.liger.enabled=true",
        "techniques.checkpointing.enabled=true",
        "techniques.compile.enabled=true",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert seen["acted"]
    assert {
        "attention",
        "precision",
        "liger",
        "lora",
        "checkpointing",
        "compile",
        "data",
        "parameters",
        "loss",
        "optimizer",
        "memory",
    } <= {one["technique"] for one in seen["evidence"]}
    for name in ("liger", "attention", "checkpointing", "compile"):
        assert any(f"without {name}," in one["name"] for one in seen["loss"])
