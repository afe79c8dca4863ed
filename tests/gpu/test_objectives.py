"""Objectives over groups of documents on a GPU: recorded passes give the losses of plain ones, also where answers
share their prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.rows import write_pairs, write_ranked
from support.runs import history

from fxtune.cli.main import main


def losses(run: str, *words: str) -> list[float]:
    options = ["objective=listwise", "data.sources=[{path: rows.jsonl, format: ranked}]", "data.sequence_length=256"]
    options += ["techniques=[lora]", "train.micro_batch_size=2", "train.global_batch_size=4", "train.max_steps=12"]
    options += ["data.packing=true", "data.cache_dir=cache", "run.report=false", "train.log_every=1"]
    assert main(["--plugin", "ranked.py", "--plugin", "listwise.py", *options, f"run.dir={run}", *words]) == 0
    return [line["train/loss"] for line in history(Path(run)) if "train/loss" in line]


def losses_of_pairs(run: str, *words: str) -> list[float]:
    options = [
        "objective=dpo",
        "data.sources=[{path: pairs.jsonl}]",
        "data.sequence_length=128",
        "data.cache_dir=cache",
    ]
    options += ["techniques=[lora,fast]", "model.dtype=bfloat16", "run.report=false", "train.log_every=1"]
    options += ["train.micro_batch_size=1", "train.global_batch_size=1", "data.on_long=drop"]
    assert main([*options, f"run.dir={run}", *words]) == 0
    return [line["train/loss"] for line in history(Path(run)) if "train/loss" in line]


def test_recorded_passes_over_a_shared_prompt_give_the_losses_of_plain_ones(cwd):
    write_pairs()
    plain, recorded = (
        losses_of_pairs(graphs, "data.share_prompts=true", f"techniques.compile.cuda_graphs='{graphs}'")
        for graphs in ("off", "on")
    )
    assert len(plain) > 4
    assert recorded == pytest.approx(plain, rel=1e-2, abs=5e-3)


@pytest.mark.parametrize("kernels", ["rope", "rope,fused_linear_cross_entropy"])
def test_recorded_passes_over_groups_give_the_losses_of_plain_ones(cwd, kernels):
    write_ranked()
    words = ["techniques.compile.enabled=true", "techniques.liger.enabled=true"]
    words.append(f"techniques.liger.kernels=[{kernels}]")
    plain = losses("plain", *words, "techniques.compile.cuda_graphs='off'")
    recorded = losses("recorded", *words, "techniques.compile.cuda_graphs='on'")
    assert len(plain) == 12
    assert recorded == pytest.approx(plain, rel=1e-2, abs=5e-3)
