"""Runs of two ranks on rows with and without images: one rank's micro-batch often has an image when the other's has
none."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command
from support.killing import Reference, tail
from support.processors import write_model, write_picture_rows
from support.ranks import ONE_THREAD
from support.runs import losses
from transformers import AutoConfig, AutoModelForImageTextToText

pytestmark = pytest.mark.slow
ROWS = (
    *("model.init=pretrained", "model.path=model", "model.architecture={}"),
    *("data.sources=[{path: pictures/rows.jsonl}]", "data.packing=false", "train.epochs=null", "train.max_steps=5"),
    *("train.micro_batch_size=1", "train.global_batch_size=2", "checkpoint.every=2"),
)
"""36 rows, of which each third has no image. In some steps no rank has an image."""
TOWER = ("techniques.lora.vision=on", "techniques.lora.projector=on")
FULL = ("techniques.lora.enabled=false", "optimizer.lr_vision=1e-3")
LOWER = "techniques.lora.exclude_modules=[language_model.layers.0,language_model.layers.1,language_model.layers.2]"
ADAPTER, MODEL = "adapter/adapter_model.safetensors", "model/model.safetensors"


def made(folder: Path, family: str, *words: str) -> list[str]:
    folder.mkdir()
    write_model(family, folder / "model")
    write_picture_rows(folder / "pictures")
    return command(folder, *ROWS, *words)


def deepened(folder: Path) -> None:
    """Give the text model in `folder` four layers."""
    config = AutoConfig.from_pretrained(folder)
    config.text_config.num_hidden_layers = 4
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)


def assert_alike(one: Path, other: Path, tolerance: float) -> None:
    assert losses(one / "run") == pytest.approx(losses(other / "run"), abs=tolerance)
    file = next(file for file in (ADAPTER, MODEL) if (one / "run" / file).exists())
    ours, theirs = load_file(one / "run" / file), load_file(other / "run" / file)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen2_5_vl", TOWER),
        ("qwen3_5", TOWER),
        ("qwen3_vl", ("data.image_features=stored",)),
        ("llava", FULL),
        ("gemma3", (*TOWER, "train.global_batch_size=6")),
        ("idefics3", (*FULL, "train.global_batch_size=6")),
    ],
)
def test_two_ranks_learn_what_one_process_learns(family, words, ranks, forks, tmp_path):
    alone, two = tmp_path / "alone", tmp_path / "two"
    Reference.of(forks, made(alone, family, *words), alone, **ONE_THREAD)
    assert ranks.run(made(two, family, *words), two, **ONE_THREAD) == [0, 0], tail(two)
    assert_alike(alone, two, 1e-5 if "train.global_batch_size=6" in words else 0.0)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen2_5_vl", ()),
        ("qwen3_vl", ("data.image_features=stored",)),
        ("llava", TOWER),
        ("gemma3", FULL),
        ("internvl", (*FULL, "optimizer.name=muon", "train.global_batch_size=6")),
    ],
)
def test_two_ranks_with_parts_of_the_weights_learn_what_one_process_learns(family, words, ranks, forks, tmp_path):
    alone, two = tmp_path / "alone", tmp_path / "two"
    Reference.of(forks, made(alone, family, *words), alone, **ONE_THREAD)
    assert ranks.run(made(two, family, *words, "parallel.shard=2"), two, **ONE_THREAD) == [0, 0], tail(two)
    assert_alike(alone, two, 1e-4)


def test_ranks_gather_lower_layers_together_where_only_images_have_a_gradient_there(ranks, tmp_path):
    """The adapters of the vision encoder are below layers without adapters."""
    words = made(tmp_path / "run", "llava", *TOWER, LOWER, "parallel.shard=2")
    deepened(tmp_path / "run" / "model")
    assert ranks.run(words, tmp_path / "run") == [0, 0], tail(tmp_path / "run")


def test_killed_rank_resumes_bit_for_bit_and_one_process_goes_on(ranks, forks, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = made(whole, "qwen2_5_vl", *TOWER)
    assert ranks.run(words, whole, **ONE_THREAD) == [0, 0], tail(whole)
    line = made(killed, "qwen2_5_vl", *TOWER)
    codes = ranks.run(line, killed, "before", faults={1: "SIGKILL@4"}, **ONE_THREAD)
    assert codes == [7, -signal.SIGKILL], tail(killed)
    shutil.copytree(killed, tmp_path / "alone")
    assert ranks.run(words, killed, **ONE_THREAD) == [0, 0], tail(killed)
    assert "Resuming run after step" in tail(killed, 10**6)
    assert_alike(whole, killed, 0.0)
    alone = forks.start(words, tmp_path / "alone", "alone.jsonl", **ONE_THREAD)
    assert alone.wait() == 0, tail(tmp_path / "alone")
    assert_alike(whole, tmp_path / "alone", 1e-5)


@pytest.mark.parametrize(
    "words",
    [
        (*TOWER, "parallel.average_every=2"),
        (*FULL, "parallel.compression=powersgd", "train.max_steps=14", "checkpoint.every=0"),
    ],
)
def test_ranks_that_send_less_train_the_tower(words, ranks, tmp_path):
    two = tmp_path / "two"
    assert ranks.run(made(two, "qwen2_5_vl", *words), two) == [0, 0], tail(two)
    if "parallel.average_every=2" in words:
        weights = load_file(two / "run" / ADAPTER)
        moved = [weight.norm() for name, weight in weights.items() if ".visual." in name and "lora_B" in name]
    else:
        before, after = load_file(two / "model" / "model.safetensors"), load_file(two / "run" / MODEL)
        assert before.keys() == after.keys()
        moved = [(after[name] - weight).norm() for name, weight in before.items() if "visual." in name]
    assert moved
    assert all(norm > 0 for norm in moved)


def test_images_that_go_stop_all_ranks_with_a_checkpoint(ranks, tmp_path):
    words = made(tmp_path / "two", "qwen2_5_vl", "train.max_steps=60", "checkpoint.every=0")
    two, pictures = tmp_path / "two", tmp_path / "two" / "pictures"
    started = ranks.start(words, two, "before", stops={0: ("training", 2)})
    assert started[0].stopped(), tail(two)
    pictures.rename(two / "moved")
    started[0].send(signal.SIGCONT)
    assert [forked.wait() for forked in started] == [3, 3], tail(two)
    assert "there is no such file. It was read when the data was tokenized" in tail(two, 2000)
    (two / "moved").rename(pictures)
    assert ranks.run(words, two) == [0, 0], tail(two)
    assert "Resuming run after step" in tail(two, 10**6)
