"""Runs of several ranks that share their rows: they learn what one process learns."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command
from support.killing import ForkServer, Reference, tail
from support.ranks import ONE_THREAD, Ranks, messages
from support.runs import losses

pytestmark = pytest.mark.slow
BASE = (
    *("run.device=cpu", "data.eval_fraction=0.1", "data.packing=true", "train.micro_batch_size=1"),
    *("train.global_batch_size=2", "train.epochs=null", "train.max_steps=20", "train.eval_every=8"),
)
YARN = (
    "techniques.rope.enabled=true",
    "techniques.rope.factor=4",
    "techniques.rope.original_max_position_embeddings=64",
)
ONE_KEY_HEAD = (
    "model.architecture={hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 1, head_dim: 16}"
)
CHECKPOINTS = ("techniques.checkpointing.enabled=true", "techniques.checkpointing.policy=selective")
WEIGHTS = 5e-6
"""The most that a weight may differ: Adam divides the rounding of small gradients by their own size."""
FUSED_LOSS = ("techniques.liger.enabled=true", "techniques.liger.kernels=[fused_linear_cross_entropy]")


def made(folder: Path, *words: str) -> list[str]:
    folder.mkdir(parents=True)
    given = {word.partition("=")[0] for word in words}
    return command(folder, *(word for word in BASE if word.partition("=")[0] not in given), *words)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "run").glob("*/*model.safetensors")))


def compare(forks: ForkServer, ranks: Ranks, folder: Path, words: tuple[str, ...], *more: str) -> None:
    Reference.of(forks, made(folder / "alone", *words), folder / "alone", **ONE_THREAD)
    codes = ranks.run(made(folder / "cut", *words, *more), folder / "cut", **ONE_THREAD)
    assert codes == [0] * len(codes), tail(folder / "cut")
    one, several = (losses(folder / name / "run") for name in ("alone", "cut"))
    assert len(one) == len(several) == 20
    assert one == pytest.approx(several, rel=1e-6)
    ours, theirs = weights(folder / "cut"), weights(folder / "alone")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=0, atol=WEIGHTS), name


@pytest.mark.parametrize(
    "words",
    [
        (*YARN, ONE_KEY_HEAD),
        ("data.sequence_length=127", *CHECKPOINTS, "techniques.checkpointing.mlp_tiles=2", *FUSED_LOSS),
        ("data.packing=false", "train.micro_batch_size=2", "train.global_batch_size=4", "techniques.lora.fused=on"),
        ("techniques.lora.enabled=false", "techniques.attention.backend=eager"),
        (ONE_KEY_HEAD, *CHECKPOINTS, "techniques.compile.enabled=true"),
    ],
    ids=("yarn and one key head", "odd length and tiles", "padded and fused", "full and eager", "compiled"),
)
def test_two_ranks_with_half_of_each_row_learn_what_one_process_learns(ranks, forks, tmp_path, words):
    compare(forks, ranks, tmp_path, words, "parallel.context=2")
    assert "rows in 2 pieces" in (tmp_path / "cut" / "run" / "evidence.json").read_text()


def test_a_killed_rank_ends_the_one_that_waits_for_its_tokens(ranks, tmp_path):
    words = made(tmp_path / "run", "train.max_steps=2000", "parallel.context=2")
    first, second = ranks.start(words, tmp_path / "run", stops={1: ("training", 5)})
    assert second.stopped(), tail(tmp_path / "run")
    second.kill()
    assert second.wait() == -signal.SIGKILL
    assert first.wait() == 7, tail(tmp_path / "run")
    said = messages(tmp_path / "run")
    assert len(said) == 1, said


@pytest.mark.parametrize(
    ("words", "other"), [((), "replicate"), (("techniques.lora.enabled=false",), "shard")], ids=("replicas", "shards")
)
def test_two_pairs_of_ranks_that_share_rows_learn_what_one_process_learns(forks, tmp_path, words, other):
    four = Ranks(forks, 4)
    compare(forks, four, tmp_path, words, "parallel.context=2", f"parallel.{other}=2")
