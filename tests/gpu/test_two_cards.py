"""Runs of two ranks on two GPUs, each through the public command: what they save, stop, resume, export and learn.

tests/distributed has the same on CPUs, in more detail.
"""

from __future__ import annotations

import hashlib
import shutil
import signal
from pathlib import Path

import pytest
from support.harness import command, run, start, wait_for, write_preferences
from support.killing import MODES, tail
from support.rank_kills import steps_logged
from support.runs import losses

FULL = ("techniques.lora.enabled=false",)
TWO = ("run.gpus=2", "run.device=cuda")
EXACT = (
    *("run.deterministic=true", "model.dtype=float32", "techniques.precision.tf32=false", "train.epochs=null"),
    *("train.max_steps=300", "checkpoint.every=100"),
)
"""Steps enough that a signal after the tenth comes before the end."""
LARGER = (
    "model.architecture={hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 64}"
)
"""Heads that FlashAttention takes."""
IN_BFLOAT16 = ("model.dtype=bfloat16", "techniques.attention.enabled=true", LARGER, "optimizer.lr=2e-4")
MODEL = "run/model/model.safetensors"


def ended(folder: Path, words: list[str], cards: dict[str, str]) -> Path:
    done = run(words, folder, **cards)
    assert done.code == 0, done.text[-3000:]
    return folder


def made(folder: Path, *words: str) -> list[str]:
    folder.mkdir()
    write_preferences(folder / "pairs.jsonl", folder / "judged.jsonl")
    return command(folder, *words)


def stopped(folder: Path, words: list[str], cards: dict[str, str]) -> Path:
    """Start a run and send it SIGTERM after ten steps. It saves and ends."""
    process = start(words, folder, **cards)
    wait_for(lambda: steps_logged(folder) >= 10, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 75, tail(folder)
    assert steps_logged(folder) < 300
    return folder


def newest(folder: Path) -> Path:
    return max(folder.glob("run/checkpoints/step-*"))


def sums(folder: Path) -> dict[str, str]:
    """The digests of the export and of the last checkpoint's tensors."""
    files = [*newest(folder).glob("*.safetensors"), folder / MODEL]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_copy_engines_gather_the_bits_that_kernels_gather(two_cards, tmp_path):
    words = [*FULL, *TWO, *EXACT, "train.max_steps=20", "checkpoint.every=20", "parallel.shard=2"]
    copied = ended(tmp_path / "copied", made(tmp_path / "copied", *words), two_cards)
    gathered = made(tmp_path / "gathered", *words)
    ended(tmp_path / "gathered", gathered, {**two_cards, "NCCL_CTA_POLICY": "0"})
    assert sums(copied) == sums(tmp_path / "gathered")
    for name, gather in (("copied", "copy engines"), ("gathered", "NCCL's kernels, because NCCL_CTA_POLICY is 0")):
        assert f"gathered by {gather}" in (tmp_path / name / "run" / "evidence.json").read_text()


def test_divided_run_is_stopped_resumed_by_two_cards_and_by_one_and_merged(two_cards, tmp_path):
    words = made(tmp_path / "whole", *FULL, *TWO, *EXACT, "parallel.shard=2")
    whole = ended(tmp_path / "whole", words, two_cards)
    parts = {f"{kind}-{rank}-of-2.safetensors" for kind in ("optimizer", "weights") for rank in (1, 2)}
    assert parts == {file.name for file in newest(whole).glob("*.safetensors")}
    left = stopped(tmp_path / "left", made(tmp_path / "left", *words), two_cards)
    two, one = (Path(shutil.copytree(left, tmp_path / name)) for name in ("two", "one"))

    ended(two, words, two_cards)
    assert sums(two) == sums(whole)

    alone = [word for word in words if word not in (*TWO, "parallel.shard=2")]
    ended(one, [*alone, "run.gpus=1"], two_cards)
    assert losses(one / "run") == pytest.approx(losses(whole / "run"), abs=1e-3)
    assert not list(newest(one).glob("*-of-*")), "its own checkpoints are whole"

    step = newest(whole).name
    ended(whole, ["merge", f"run/checkpoints/{step}", "merged"], two_cards)
    merged, exported = whole / "merged" / "model.safetensors", whole / MODEL
    assert merged.read_bytes() == exported.read_bytes()


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.compression=powersgd",),
        ("parallel.average_every=3",),
        ("parallel.compression=bfloat16",),
    ],
    ids=("powersgd", "local steps", "bfloat16"),
)
def test_run_that_sends_less_resumes_bit_for_bit(two_cards, tmp_path, words):
    line = made(tmp_path / "whole", *FULL, *TWO, *EXACT, *words)
    whole = ended(tmp_path / "whole", line, two_cards)
    assert losses(whole / "run")[-1] < losses(whole / "run")[0] - 0.5
    left = stopped(tmp_path / "left", made(tmp_path / "left", *line), two_cards)
    assert sums(ended(left, line, two_cards)) == sums(whole)


@pytest.mark.parametrize(
    ("words", "degree", "seen"),
    [
        ((*MODES["reward"], *FULL, "train.epochs=1"), "shard", "matrices on a rank"),
        (("data.packing=true", "train.epochs=null", "train.max_steps=20"), "context", "rows in 2 pieces"),
    ],
    ids=("reward model over divided weights", "divided rows"),
)
def test_two_cards_learn_in_bfloat16_what_one_learns(two_cards, tmp_path, words, degree, seen):
    one = ended(tmp_path / "one", [*made(tmp_path / "one", *words, *IN_BFLOAT16), "run.gpus=1"], two_cards)
    line = [*made(tmp_path / "two", *words, *IN_BFLOAT16), *TWO, f"parallel.{degree}=2"]
    two = ended(tmp_path / "two", line, two_cards)
    assert losses(two / "run") == pytest.approx(losses(one / "run"), rel=0.01, abs=0.02)
    assert losses(one / "run")[-1] < losses(one / "run")[0]
    assert seen in (two / "run" / "evidence.json").read_text()
