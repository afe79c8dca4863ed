"""Runs whose weights are divided over two ranks: killed, resumed by other numbers of ranks, merged and evaluated."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command, write_preferences
from support.killing import MODES, tail
from support.mixtures import ON_EXPERTS, QWEN3_MOE
from support.ranks import Ranks
from support.runs import losses

pytestmark = pytest.mark.slow
FULL = ("techniques.lora.enabled=false", "parallel.shard=2", "data.eval_fraction=0.1", "train.eval_every=6")
MODEL, ADAPTER = "model/model.safetensors", "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory) -> Path:
    """A run of full fine-tuning over two ranks that nothing disturbed."""
    return ended(ranks, tmp_path_factory.mktemp("whole"), FULL)


def ended(ranks: Ranks, folder: Path, words: tuple[str, ...]) -> Path:
    assert ranks.run(command(folder, *words), folder) == [0, 0], tail(folder)
    return folder


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def killed(ranks: Ranks, folder: Path, words: tuple[str, ...], phase: str, occurrence: int) -> None:
    """Start a run, and kill rank 1 when it enters `phase` for the n-th time."""
    first, second = ranks.start(command(folder, *words), folder, "before", stops={1: (phase, occurrence)})
    assert second.stopped(), tail(folder)
    second.kill()
    assert second.wait() == -signal.SIGKILL
    assert first.wait() != 0, tail(folder)


def newest(folder: Path) -> Path:
    return max(folder.glob("run/checkpoints/step-*"))


def test_checkpoint_of_each_rank_is_a_part(whole):
    files = sorted(path.name for path in newest(whole).glob("*.safetensors"))
    assert files == [f"{kind}-{rank}-of-2.safetensors" for kind in ("optimizer", "weights") for rank in (1, 2)]


@pytest.mark.parametrize(("phase", "occurrence"), [("saving", 3), ("training", 15)])
def test_killed_rank_of_a_divided_run_resumes_bit_for_bit(ranks, whole, tmp_path, phase, occurrence):
    killed(ranks, tmp_path, FULL, phase, occurrence)
    ended(ranks, tmp_path, FULL)
    assert "Resuming run after step" in tail(tmp_path, 10**6)
    assert sha256(tmp_path / "run" / MODEL) == sha256(whole / "run" / MODEL)
    for name in ("weights-1-of-2", "weights-2-of-2", "optimizer-1-of-2", "optimizer-2-of-2"):
        assert sha256(newest(tmp_path) / f"{name}.safetensors") == sha256(newest(whole) / f"{name}.safetensors"), name


def test_adapters_on_divided_weights_resume_bit_for_bit(ranks, tmp_path):
    words = ("parallel.shard=2",)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    ended(ranks, undisturbed, words)
    (tmp_path / "killed").mkdir()
    killed(ranks, tmp_path / "killed", words, "training", 9)
    ended(ranks, tmp_path / "killed", words)
    assert sha256(tmp_path / "killed" / "run" / ADAPTER) == sha256(undisturbed / "run" / ADAPTER)


@pytest.mark.parametrize("adapters", [True, False])
def test_experts_on_divided_ranks_resume_bit_for_bit_and_in_one_process(adapters, ranks, forks, tmp_path):
    words = (QWEN3_MOE, "train.epochs=1", *(ON_EXPERTS if adapters else FULL[:1]))
    undisturbed, again, alone = (tmp_path / name for name in ("undisturbed", "again", "alone"))
    for folder in (undisturbed, again, alone):
        folder.mkdir()
    ended(ranks, undisturbed, (*words, "parallel.shard=2"))
    killed(ranks, again, (*words, "parallel.shard=2"), "training", 9)
    shutil.copytree(again, alone, dirs_exist_ok=True)
    ended(ranks, again, (*words, "parallel.shard=2"))
    file = ADAPTER if adapters else MODEL
    assert sha256(again / "run" / file) == sha256(undisturbed / "run" / file)
    assert forks.start(command(alone, *words), alone, "after.jsonl").wait() == 0, tail(alone)
    assert "Resuming run after step" in tail(alone, 10**6)
    assert losses(alone / "run") == pytest.approx(losses(undisturbed / "run"), abs=1e-5)
    one, divided = load_file(alone / "run" / file), load_file(undisturbed / "run" / file)
    assert one.keys() == divided.keys()
    for name, weight in one.items():
        torch.testing.assert_close(divided[name], weight, atol=1e-5, rtol=0)


def test_one_process_goes_on_with_a_divided_run(ranks, forks, whole, tmp_path):
    """The same documents, and losses within rounding."""
    killed(ranks, tmp_path, FULL, "training", 15)
    alone = tuple(word for word in FULL if not word.startswith("parallel"))
    assert forks.start(command(tmp_path, *alone), tmp_path, "after.jsonl").wait() == 0, tail(tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole / "run"), abs=1e-5)
    assert not list(newest(tmp_path).glob("*-of-*")), "its own checkpoints are whole"


def test_divided_run_goes_on_with_one_of_one_process(ranks, forks, whole, tmp_path):
    alone = tuple(word for word in FULL if not word.startswith("parallel"))
    one = forks.start(command(tmp_path, *alone), tmp_path, "before.jsonl", stops=("training", 15))
    assert one.stopped(), tail(tmp_path)
    one.kill()
    assert one.wait() == -signal.SIGKILL
    ended(ranks, tmp_path, FULL)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole / "run"), abs=1e-5)


def test_divided_checkpoint_is_merged_and_evaluated_in_one_process(forks, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    shutil.copy(whole / "chats.jsonl", tmp_path)
    result = json.loads((run / "result.json").read_text())
    step = f"step-{result['export/step']}"
    assert forks.start(["merge", f"run/checkpoints/{step}", "merged"], tmp_path, "merge").wait() == 0, tail(tmp_path)
    assert sha256(tmp_path / "merged" / "model.safetensors") == sha256(run / MODEL)
    assert forks.start(["eval", f"run/checkpoints/{step}"], tmp_path, "eval").wait() == 0, tail(tmp_path)
    assert f"{result['eval/best_loss']:.4f}" in tail(tmp_path, 10**6)


@pytest.mark.parametrize("adapters", [True, False])
def test_reward_model_over_divided_weights_learns_as_in_one_process(adapters, ranks, forks, tmp_path):
    """Its head is drawn, small and whole on each rank. A killed rank changes no bit."""
    own = () if adapters else ("techniques.lora.enabled=false",)
    words = (*MODES["reward"], *own, "train.epochs=1")
    alone, two, again = (tmp_path / name for name in ("alone", "two", "again"))
    for folder in (alone, two, again):
        folder.mkdir()
        write_preferences(folder / "pairs.jsonl", folder / "judged.jsonl")
    assert forks.start(command(alone, *words), alone).wait() == 0, tail(alone)
    ended(ranks, two, (*words, "parallel.shard=2"))
    killed(ranks, again, (*words, "parallel.shard=2"), "training", 9)
    ended(ranks, again, (*words, "parallel.shard=2"))
    assert losses(two / "run") == pytest.approx(losses(alone / "run"), abs=1e-5)
    file = ADAPTER if adapters else MODEL
    one, divided = load_file(alone / "run" / file), load_file(two / "run" / file)
    assert one.keys() == divided.keys()
    head = next(name for name in one if name.endswith("score.weight"))
    assert float(one[head].std()) > 0
    for name, weight in one.items():
        torch.testing.assert_close(divided[name], weight, atol=2e-4, rtol=0)
    assert sha256(again / "run" / file) == sha256(two / "run" / file)
