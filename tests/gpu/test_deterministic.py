"""run.deterministic by default: another process that compiles everything again and is killed midway gives the same bits.

A kernel chosen by timing, an atomic addition or a split that depends on other work would change the last digits of
some step. Both runs start with empty caches, so no equality comes from a cache on disk.
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
    """The environment of a run of `mode` with its own caches."""
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
        assert not (folder / "run" / "result.json").exists(), "the run ended before the kill"
    done = run(words, folder, timeout=280, **caches)
    assert done.code == 0, done.text[-3000:]
    assert ("Resuming" in done.text) == killed
    assert killed or "deterministic: on" in done.text
    return Ending.of(folder / "run", [])


@pytest.mark.parametrize("mode", MODES)
def test_killed_process_with_empty_caches_gives_equal_bits(mode, tmp_path):
    whole = ending(tmp_path / "whole", mode, killed=False)
    assert whole.differences(ending(tmp_path / "killed", mode, killed=True)) == []
    losses = [line["train/loss"] for line in whole.lines if "train/loss" in line]
    assert len(losses) == 16
    assert losses[-1] < losses[0]


def test_memory_decisions_do_not_depend_on_currently_free_memory():
    import torch

    from fxtune.distributed.world import World

    world = World.create()
    before = world.facts(strict=True).free_memory
    held = torch.empty(2**30, dtype=torch.uint8, device=world.device)
    assert world.facts(strict=True).free_memory == before > held.nbytes
    assert world.facts().free_memory < before
