"""`fxtune bench` on a GPU: the figures are consistent, and the GPU-only figures exist."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fxtune.estimate.cards import peak_flops

SHAPE = (
    "+recipe=quickstart",
    "model.init=random",
    "model.architecture={hidden_size: 2048, intermediate_size: 5632, "
    "num_hidden_layers: 4, num_attention_heads: 16, num_key_value_heads: 4, head_dim: 128, "
    "max_position_embeddings: 8192}",
    "model.dtype=bfloat16",
    "data.sequence_length=2048",
    "train.micro_batch_size=4",
    "train.global_batch_size=8",
    "techniques=[lora,fast]",
)
"""The quickstart's data with a Llama whose steps keep the GPU busy."""


def bench(folder: Path, *words: str) -> tuple[str, Any]:
    file = folder / "bench.json"
    done = subprocess.run(
        [sys.executable, "-m", "fxtune", "bench", *SHAPE, *words, "--json", str(file)],
        capture_output=True,
        cwd=Path(__file__).resolve().parents[2],
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, json.loads(file.read_text())


@pytest.mark.timed
def test_figures_are_consistent(tmp_path):
    out, found = bench(tmp_path, "--steps", "12", "--price", "4")
    assert found["step_seconds_p5"] <= found["step_seconds"] <= found["step_seconds_p95"] < 2 * found["step_seconds"]
    tokens_a_step = found["tokens_per_second"] * found["step_seconds"]
    assert 4096 < tokens_a_step < 8 * 2048 * 1.1, "GPU events and the host's clock must agree"
    assert found["first_step_seconds"] < found["second_step_seconds"]
    assert 0 < found["compile_seconds"] < found["first_step_seconds"]
    assert 0 < found["step_memory_gib"] <= found["memory_gib"] <= found["memory_reserved_gib"]
    assert 0 <= found["data_wait"] < 0.2
    assert found["device"] == torch.cuda.get_device_name()
    if peak_flops(found["device"], "bfloat16"):
        assert 0.02 < found["mfu"] < 1
    if found["joules_per_token"] is not None:  # if the driver does not report it, `energy` says why
        assert 30 < found["watts"] < 2000
        assert found["joules_per_token"] * found["tokens_per_second"] == pytest.approx(found["watts"], rel=0.01)
    else:
        assert found["energy"].startswith("not measured: ")
    assert f"{found['tokens_per_second']:,.0f} of documents" in out


def test_bench_disables_each_technique_in_turn(tmp_path):
    """With two layers and few techniques, because each technique needs a process."""
    few = [
        "techniques.liger.kernels=[fused_linear_cross_entropy]",
    ]
    out, found = bench(
        tmp_path,
        "--steps",
        "4",
        "--ablate",
        "model.architecture.num_hidden_layers=2",
        "techniques.attention.backend=sdpa",
        "techniques.lora.fused='off'",
        "techniques.compile.cuda_graphs='off'",
        *few,
    )
    rows = found["without"]
    assert {"liger", "lora", "compile", "checkpointing"} <= rows.keys()
    measured = {name: row for name, row in rows.items() if "error" not in row}
    assert {"liger", "compile"} <= measured.keys(), rows
    for name in ("liger", "compile", "checkpointing"):
        if name in measured:
            assert measured[name]["losses"][0] == pytest.approx(found["losses"][0], rel=5e-3), name
    assert out.count("without ") >= 2 * len(rows)
