"""A hybrid model's checkpoint, trained by the command: float32 states and layers for multi-token prediction stay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from support.harness import command, run
from support.hybrids import hybrid, precise, tensors

from fxtune.export.weights import bits

LAYER = {"layers.0.mlp.gate_proj.weight": (96, 64), "fc.weight": (64, 128), "norm.weight": (64,)}
MTP = {f"mtp.{name}": torch.randn(shape).bfloat16() for name, shape in LAYER.items()}
MTP["mtp.layers.0.linear_attn.A_log"] = torch.randn(4)
NEXT = {f"model.layers.61.{name}": of for name, of in MTP.items()}
NEXT["model.layers.61.mlp.experts.0.down_proj.weight"] = torch.randn(64, 40).bfloat16()
MULTIPLES_OF_64 = {"intermediate_size": 128, "linear_value_head_dim": 16, "head_dim": 16}
MULTIPLES_OF_64 |= {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16}
"""bitsandbytes' code for a CPU is wrong for other widths."""


def words(folder: Path, *more: str) -> list[str]:
    keys = ["model.path=base", "model.init=pretrained", "model.architecture={}", "model.tokenizer=builtin:tiny"]
    keys += ["model.dtype=bfloat16", "train.max_steps=2", "train.epochs=null", "checkpoint.every=2", "run.device=cpu"]
    return command(folder, *keys, *more)


def train(folder: Path, *more: str) -> None:
    done = run(words(folder, *more), folder)
    assert done.code == 0, done.text


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def plain_loads(folder: Path) -> bool:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    logits = model(torch.arange(3, 20)[None]).logits
    return not report["missing_keys"] and not report["unexpected_keys"] and bool(logits.isfinite().all())


@pytest.mark.parametrize(
    ("kind", "extra", "quantized", "shards"),
    [
        ("qwen3_5_text", MTP, "", 3),
        pytest.param("deepseek_v3", NEXT, "", 1, marks=pytest.mark.slow),
        pytest.param("falcon_h1", {}, "nf4", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", MTP, "nf4", 1, marks=pytest.mark.slow),
    ],
)
def test_merged_adapter_changes_only_what_it_adapts(kind, extra, quantized, shards, tmp_path):
    sizes = MULTIPLES_OF_64 if quantized else {}
    base = hybrid(kind, tmp_path / "base", shards, extra, sizes, mtp_num_hidden_layers=1)
    train(
        tmp_path,
        *(["techniques.quantize.enabled=true", f"techniques.quantize.type={quantized}"] if quantized else []),
    )
    done = run(["merge", "run"], tmp_path)
    assert done.code == 0, done.text
    before, after = tensors(base), tensors(tmp_path / "run" / "merged")
    assert before.keys() == after.keys()
    kept = {name for name in before if same(before[name], after[name])}
    assert kept >= extra.keys() | precise(base).keys()
    changed = before.keys() - kept
    assert changed
    assert not {name for name in changed if not re.search(r"_proj\w*\.weight$", name)}
    assert json.loads((tmp_path / "run" / "merged" / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    card = (tmp_path / "run" / "merged" / "README.md").read_text()
    assert (f"multi-token prediction ({len(extra)} tensors" in card) == bool(extra)
    assert plain_loads(tmp_path / "run" / "merged")


@pytest.mark.parametrize("shard", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_full_training_learns_states_in_float32_and_exports_them_so(shard, ranks, tmp_path):
    base = hybrid("qwen3_5_text", tmp_path / "base", 3, MTP)
    more = ["techniques.lora.enabled=false", "optimizer.lr=1e-5", "tracking.display=plain"]
    if shard == 1:
        train(tmp_path, *more)
    else:
        assert ranks.run(words(tmp_path, *more, "parallel.shard=2"), tmp_path) == [0, 0], (
            tmp_path / "log.txt"
        ).read_text()
    before, after = tensors(base), tensors(tmp_path / "run" / "model")
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in MTP)
    for name, start in precise(base).items():
        if name not in MTP:
            moved = (after[name] - start).abs().max()
            # bfloat16 would round such a small step away.
            assert after[name].dtype is torch.float32
            assert 0 < moved < 1e-4
    assert plain_loads(tmp_path / "run" / "model")
