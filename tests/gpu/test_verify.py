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
from support.rows import write_pairs

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
    found = {row["what"]: row for row in seen}
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
    assert any(row["technique"] == "memory" and row["observed"].startswith("peak ") for row in seen["evidence"])
    assert len([variant for variant in seen["loss"] if variant["name"].startswith("fxtune")]) == 3


FLOAT32 = ("model.dtype=float32", "techniques.precision.autocast=none", "techniques.precision.tf32=false")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(FLOAT32, id="float32"),
        pytest.param(("data.packing=false", "objective.reference=stored"), id="padded stored"),
        pytest.param(("techniques=[fast]", "objective=ipo", "objective.reference=stored"), id="full"),
        pytest.param(("data.share_prompts=true",), id="shared prompts"),
        pytest.param(("data.share_prompts=true", "techniques.attention.backend=sdpa"), id="shared prompts, sdpa"),
        pytest.param(("techniques.quantize.enabled=true",), id="nf4"),
        pytest.param(("techniques.quantize.enabled=true", "techniques.quantize.type=fp8"), id="fp8"),
        pytest.param(
            (
                *FLOAT32,
                "model.architecture={model_type: qwen3_moe, hidden_size: 512, num_hidden_layers: 2, "
                "num_attention_heads: 8, num_key_value_heads: 2, head_dim: 64, num_experts: 8, "
                "num_experts_per_tok: 2, moe_intermediate_size: 256}",
                "techniques.router.aux_loss_coef=0.1",
            ),
            id="experts",
        ),
    ],
)
def test_preferences_equal_plain_transformers(cwd, words):
    """With all of [lora,fast]: compiled, fused, recomputed where that helps."""
    compare_pairs(cwd, ["objective=dpo", "objective.reference=base"], words)


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(FLOAT32, id="float32"),
        pytest.param((), id="bfloat16"),
        pytest.param(("data.packing=false", "techniques=[fast]"), id="padded full"),
        pytest.param(("techniques.quantize.enabled=true",), id="nf4"),
    ],
)
def test_reward_models_equal_plain_transformers(cwd, words):
    compare_pairs(cwd, ["objective=reward"], words)


def compare_pairs(cwd: Path, objective: list[str], words: tuple[str, ...]) -> None:
    write_pairs()
    chosen = [*objective, "techniques=[lora,fast]", "model.dtype=bfloat16", *SHAPE]
    changed = {word.partition("=")[0] for word in words}
    kept = [word for word in chosen if word.partition("=")[0] not in changed]
    kept += ["train.micro_batch_size=2", "train.global_batch_size=4", f"data.cache_dir={cwd / 'cache'}"]
    kept += [f"data.sources=[{{path: {cwd / 'pairs.jsonl'}}}]"]
    done, seen = fxtune(cwd, "verify", *kept, *words, "--loss")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([variant for variant in seen["loss"] if variant["name"].startswith("fxtune")]) >= 2


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
        *("attention", "precision", "liger", "lora", "checkpointing", "compile", "data", "parameters", "loss"),
        *("optimizer", "memory"),
    } <= {row["technique"] for row in seen["evidence"]}
    for name in ("liger", "attention", "checkpointing", "compile"):
        assert any(f"without {name}," in variant["name"] for variant in seen["loss"])
