"""run.deterministic=true: the same bits from another process that compiles everything anew, and is killed on its way.

A reduction whose kernel was picked by the clock, an atomic addition or a split that depends on what else runs would show in the
last digits of some step. Both runs have empty caches, so nothing is alike because it was kept on the disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.endings import Ending
from support.harness import command, kill, run, start, wait_for, write_chats

SIZES = (
    "{hidden_size: 512, intermediate_size: 1536, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 128, max_position_embeddings: 4096}"
)
COMMON = (
    "run.deterministic=true",
    "run.device=auto",
    f"model.architecture={SIZES}",
    "model.dtype=bfloat16",
    "data.packing=true",
    "data.sequence_length=1024",
    "data.eval_fraction=0.1",
    "train.eval_every=6",
    "train.max_steps=16",
    "train.epochs=100",
)
MODES = {
    "everything": ("techniques=[fast,lora,selective]",),
    "full": ("techniques=[fast,full]", "techniques.lora.enabled=false", "model.dtype=float32"),
    "fp8": ("techniques=[fast,fp8]",),
    "recorded": ("techniques=[lora]", "techniques.compile.enabled=true", "techniques.compile.cuda_graphs=on"),
}


def ending(folder: Path, mode: str, killed: bool) -> Ending:
    """Of a run of `mode` with caches of its own."""
    folder.mkdir()
    write_chats(folder / "chats.jsonl", 600)
    words = command(folder, *COMMON, *MODES[mode])
    caches = {
        name: str(folder / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    }
    if killed:
        process = start(words, folder, **caches)
        wait_for((folder / "run" / "checkpoints" / "step-00000008").exists, process, timeout=280)
        kill(process)
        assert not (folder / "run" / "result.json").exists(), "it was done before it could be killed"
    done = run(words, folder, timeout=280, **caches)
    assert done.code == 0, done.text[-3000:]
    assert ("Resuming" in done.text) == killed
    return Ending.of(folder / "run", [])


@pytest.mark.parametrize("mode", MODES)
def test_the_same_bits_from_a_process_that_compiles_anew_and_is_killed(mode, tmp_path):
    whole = ending(tmp_path / "whole", mode, killed=False)
    assert whole.differences(ending(tmp_path / "killed", mode, killed=True)) == []
    losses = [line["train/loss"] for line in whole.lines if "train/loss" in line]
    assert len(losses) == 16
    assert losses[-1] < losses[0]


def test_what_is_decided_by_memory_does_not_look_at_what_is_free_now():
    import torch

    from fxtune.distributed.world import World

    world = World.create()
    before = world.facts(deterministic=True).free_memory
    held = torch.empty(2**30, dtype=torch.uint8, device=world.device)
    assert world.facts(deterministic=True).free_memory == before > held.nbytes
    assert world.facts().free_memory < before
