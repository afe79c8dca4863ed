"""Runs of two ranks that hold halves of the weights, compared with one process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.architectures import on_disk
from support.harness import command
from support.killing import Reference, tail
from support.mixtures import GPT_OSS, ON_EXPERTS, QWEN3_MOE, mixture
from support.mxfp4 import in_mxfp4
from support.ranks import ONE_THREAD, Ranks
from support.runs import losses

pytestmark = pytest.mark.slow
HELD_OUT = ("data.eval_fraction=0.1", "train.eval_every=6")
READ = ("model.path=builtin:tiny", "model.init=pretrained", "model.architecture={}", "train.max_steps=8")
FULL = ("techniques.lora.enabled=false",)
UNEVEN = ("train.micro_batch_size=1", "train.global_batch_size=6", "train.epochs=1.5")
"""43 chats in steps of 6: the last step has less."""
FUSED = ("techniques.lora.fused=on", "techniques.liger.enabled=true", "techniques.checkpointing.enabled=true")


def made(folder: Path, *words: str) -> list[str]:
    folder.mkdir(parents=True)
    return command(folder, *HELD_OUT, *words)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "run").glob("[am]*/*model.safetensors")))


def assert_same_learning(alone: Path, shared: Path, tolerance: float) -> None:
    one, other = (losses(folder / "run") for folder in (alone, shared))
    assert len(one) == len(other) > 5
    assert one == pytest.approx(other, abs=tolerance, rel=0)
    ours, theirs = exported(shared), exported(alone)
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=0, atol=tolerance), name


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        (("data.packing=true", "train.micro_batch_size=1", "train.global_batch_size=2"), 0.0),
        ((*READ, *FUSED, "data.buckets=[32,64,128]"), 0.0),
        ((*FULL, "train.max_grad_norm=0"), 0.0),
        ((*FULL, "train.max_grad_norm=0", "optimizer.name=muon", "optimizer.lr=1e-3"), 0.0),
        ((*FULL, *UNEVEN, "techniques.liger.enabled=true"), 1e-6),
        ((QWEN3_MOE, *ON_EXPERTS, "data.packing=true", "train.micro_batch_size=1", "train.global_batch_size=2"), 1e-5),
        ((GPT_OSS, *ON_EXPERTS, *UNEVEN), 1e-5),
        ((QWEN3_MOE, *FULL, *UNEVEN, "techniques.checkpointing.enabled=true"), 1e-5),
        ((GPT_OSS, *FULL, "optimizer.name=lion", "optimizer.lr=1e-4"), 1e-5),
    ],
    ids=(
        "drawn, packed",
        "read, fused, recomputed, bucketed",
        "full",
        "full, muon",
        "full, three micro-batches a rank, clipped",
        "adapters of experts, packed, recomputed",
        "adapters of experts with biases, three micro-batches a rank",
        "full, experts, three micro-batches a rank, recomputed",
        "full, experts with biases, lion",
    ),
)
def test_halves_of_the_weights_learn_what_one_process_learns(ranks, forks, tmp_path, words, tolerance):
    """Bit for bit with one micro-batch a rank and no norm of the gradient, where the order of the sums is the same."""
    alone, folder = tmp_path / "alone", tmp_path / "two"
    Reference.of(forks, made(alone, *words), alone, **ONE_THREAD)
    assert ranks.run(made(folder, *words, "parallel.shard=2"), folder, **ONE_THREAD) == [0, 0], tail(folder)
    assert_same_learning(alone, folder, tolerance)
    evidence = json.loads((folder / "run" / "evidence.json").read_text())
    seen = [observation["observed"] for observation in evidence if observation["technique"] == "parallel"]
    held, total = (int(word.replace(",", "")) for word in re.findall(r"[\d,]+", seen[0])[:2])
    assert total / 2 <= held < 0.51 * total
    if {QWEN3_MOE, GPT_OSS}.intersection(words):
        assert "4 exchanges to the experts of 2 layers and 2 back" in seen[1]


@pytest.mark.parametrize(
    ("words", "count"),
    [((*FULL, "train.max_grad_norm=0"), 2), (("techniques.lora.exclude_modules=[experts]",), 3)],
    ids=("full", "adapters, three ranks of four experts"),
)
def test_mixture_whose_files_store_each_expert_apart_learns_what_one_process_learns(forks, tmp_path, words, count):
    """Exports have the names and shapes of such files, too."""
    base = on_disk(tmp_path / "base", model=mixture("qwen3_moe", vocab_size=1024, max_position_embeddings=256))
    words = (
        *words,
        f"model.path={base}",
        "model.tokenizer=builtin:tiny",
        "model.init=pretrained",
        "model.architecture={}",
        "train.micro_batch_size=1",
        f"train.global_batch_size={count}",
        "train.max_steps=8",
    )
    alone, folder = tmp_path / "alone", tmp_path / "divided"
    Reference.of(forks, made(alone, *words), alone, **ONE_THREAD)
    argv = made(folder, *words, f"parallel.shard={count}")
    assert Ranks(forks, count).run(argv, folder, **ONE_THREAD) == [0] * count, tail(folder)
    assert_same_learning(alone, folder, 1e-5)
    if FULL[0] in words:
        assert exported(folder).keys() == load_file(base / "model.safetensors").keys()


def test_experts_that_a_checkpoint_ships_in_mxfp4_are_divided_and_learn_what_one_process_learns(
    ranks, forks, tmp_path
):
    """A rank reads the codes and exponents of its experts."""
    sizes = {"vocab_size": 1024, "max_position_embeddings": 256, "hidden_size": 64, "intermediate_size": 64}
    base = on_disk(tmp_path / "base", model=mixture("gpt_oss", **sizes))
    in_mxfp4(base)
    words = (
        *ON_EXPERTS,
        f"model.path={base}",
        "model.tokenizer=builtin:tiny",
        "model.init=pretrained",
        "model.architecture={}",
        "techniques.quantize.enabled=true",
        "techniques.quantize.type=mxfp4",
        "train.max_steps=8",
    )
    alone, folder = tmp_path / "alone", tmp_path / "two"
    Reference.of(forks, made(alone, *words), alone, **ONE_THREAD)
    assert ranks.run(made(folder, *words, "parallel.shard=2"), folder, **ONE_THREAD) == [0, 0], tail(folder)
    assert_same_learning(alone, folder, 1e-5)
    evidence = (folder / "run" / "evidence.json").read_text()
    assert "4 tensors read as they are" in evidence


@pytest.mark.parametrize(
    "words",
    [
        (*FULL, "train.max_steps=20"),
        (QWEN3_MOE, *FULL, "train.max_steps=8"),
        (QWEN3_MOE, *ON_EXPERTS, "train.max_steps=8"),
    ],
    ids=("full", "full, experts", "adapters of experts"),
)
def test_two_copies_of_two_halves_learn_what_one_process_learns(forks, tmp_path, words):
    words = (*words, "train.micro_batch_size=1")
    alone, folder = tmp_path / "alone", tmp_path / "four"
    Reference.of(forks, made(alone, *words), alone, **ONE_THREAD)
    four = Ranks(forks, 4)
    argv = made(folder, *words, "parallel.shard=2", "parallel.replicate=2")
    assert four.run(argv, folder, **ONE_THREAD) == [0, 0, 0, 0], tail(folder)
    assert_same_learning(alone, folder, 1e-5 if QWEN3_MOE in words else 1e-6)


def test_three_ranks_hold_rows_that_they_do_not_divide(forks, tmp_path):
    words = (*FULL, "train.micro_batch_size=2", "train.global_batch_size=6")
    alone, folder = tmp_path / "alone", tmp_path / "three"
    Reference.of(forks, made(alone, *words), alone, **ONE_THREAD)
    three = Ranks(forks, 3)
    assert three.run(made(folder, *words, "parallel.shard=3"), folder, **ONE_THREAD) == [0, 0, 0], tail(folder)
    assert_same_learning(alone, folder, 1e-6)
