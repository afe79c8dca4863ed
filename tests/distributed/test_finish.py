"""Runs of two ranks that end early: `fxtune finish`, and a decay that goes back to the best checkpoint."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command, kill, run, start, wait_for
from support.killing import MODES, Reference, tail
from support.ranks import Ranks, messages
from support.runs import losses

pytestmark = pytest.mark.slow
LONG = ("schedule.name=wsd", "schedule.decay_steps=4", "train.epochs=40", "checkpoint.every=2")
FULL = ("techniques.lora.enabled=false",)


def result(folder: Path) -> dict:
    return json.loads((folder / "run" / "result.json").read_text())


def stop(ranks: Ranks, folder: Path, *words: str) -> None:
    """Start a run of two ranks, and stop it after some steps."""
    both = ranks.start(command(folder, *LONG, *words), folder, stops={0: ("training", 7)})
    assert both[0].stopped(), tail(folder)
    for forked in both:
        forked.send(signal.SIGTERM)
    assert [forked.wait() for forked in both] == [75, 75], tail(folder)


@pytest.mark.parametrize("words", [(), (*FULL, "parallel.shard=2")], ids=("replicas", "divided weights"))
def test_stopped_run_of_two_ranks_is_finished_by_two_ranks(ranks, tmp_path, words):
    stop(ranks, tmp_path, *words)
    assert ranks.run(["finish", "run"], tmp_path) == [0, 0], tail(tmp_path)
    found = result(tmp_path)
    assert (found["train/ended_early"], found["train/ranks"]) == ("finish", 2)
    assert 6 < found["train/step"] < 60
    before = len(losses(tmp_path / "run"))
    assert ranks.run(["finish", "run"], tmp_path) == [0, 0], tail(tmp_path)
    assert tail(tmp_path, 10**6).count("is finished already") == 1
    assert len(losses(tmp_path / "run")) == before


def test_mistake_in_finish_under_torchrun_is_one_message(ranks, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {path: 'builtin:tiny'}\n")
    assert ranks.run(["finish", "run"], tmp_path) == [2, 2], tail(tmp_path)
    assert [line for line in messages(tmp_path) if "has no checkpoint yet" in line] == messages(tmp_path)


def test_finish_starts_the_ranks_of_the_recipe(tmp_path):
    endless = ("train.epochs=10000", "run.gpus=2", "run.device=cpu")  # only the signal ends it
    process = start(command(tmp_path, *LONG[:2], *LONG[3:], *endless), tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("train/loss") > 5, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 75, tail(tmp_path)
    finally:
        kill(process)
    done = run(["finish", "run"], tmp_path)
    assert done.code == 0, done.text
    assert (result(tmp_path)["train/ended_early"], result(tmp_path)["train/ranks"]) == ("finish", 2)


def test_divided_weights_go_back_to_the_best_checkpoint_like_one_process(ranks, forks, tmp_path):
    """The held-out loss grows after the first evaluation, and the decay begins from the weights of then."""
    grows = ("optimizer.lr=5.0", "schedule.warmup_steps=9", "train.max_grad_norm=0")
    keys = {word.partition("=")[0] for word in grows}
    words = (*(word for word in MODES["early"] if word.partition("=")[0] not in keys), *grows, *FULL)
    folders = {name: tmp_path / name for name in ("alone", "two")}
    for folder in folders.values():
        folder.mkdir()
    Reference.of(forks, command(folders["alone"], *words), folders["alone"])
    argv = command(folders["two"], *words, "parallel.shard=2")
    assert ranks.run(argv, folders["two"]) == [0, 0], tail(folders["two"])
    one, two = (result(folder) for folder in folders.values())
    assert one["train/dropped_steps"] > 0
    for name in ("train/step", "train/dropped_steps", "train/ended_early", "eval/best_step"):
        assert one[name] == two[name]
    ours, theirs = (load_file(folder / "run" / "model" / "model.safetensors") for folder in folders.values())
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
