"""Runs of two ranks: what they learn, and an error, a signal or a kill at one of them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.harness import command, write_chats
from support.killing import MODES, Reference, tail
from support.ranks import ONE_THREAD, Ranks, messages
from support.runs import losses

pytestmark = pytest.mark.slow
QUESTIONS = "data.questions={path: questions.jsonl, limit: 11, max_new_tokens: 6}"
UNDROPPED = ("data.eval_fraction=0.1", "train.eval_every=6")
PACKED = (*UNDROPPED, "data.packing=true", "train.micro_batch_size=1", "train.global_batch_size=2")


def made(folder: Path, *words: str) -> list[str]:
    folder.mkdir(parents=True)
    write_chats(folder / "questions.jsonl", 12, seed=1)
    return command(folder, *UNDROPPED, *words)


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("words", "tolerance"),
    [
        ((), 0.0),
        pytest.param(
            ("data.packing=true", "train.micro_batch_size=1", "train.global_batch_size=2"),
            0.0,
            marks=pytest.mark.vital,
        ),
        (("techniques.lora.dropout=0.1", QUESTIONS), 0.0),
        (("data.buckets=[32,64,128]", "optimizer.name=muon"), 0.0),
        (("train.micro_batch_size=1", "train.global_batch_size=6"), 1e-5),
    ],
    ids=("padded", "packed", "dropout and questions", "bucketed", "three micro-batches a rank"),
)
def test_two_ranks_learn_what_one_process_learns(ranks, forks, tmp_path, words, tolerance):
    """Bit for bit with one micro-batch and one thread a rank, where the order of the sums is the same."""
    alone = made(tmp_path / "alone", *words)
    Reference.of(forks, alone, tmp_path / "alone", **ONE_THREAD)
    codes = ranks.run(made(tmp_path / "two", *words), tmp_path / "two", **ONE_THREAD)
    assert codes == [0, 0], tail(tmp_path / "two")
    one, two = (losses(tmp_path / name / "run") for name in ("alone", "two"))
    assert len(one) == len(two) > 5
    assert one == pytest.approx(two, abs=tolerance, rel=0)
    result = json.loads((tmp_path / "two" / "run" / "result.json").read_text())
    assert result["train/ranks"] == 2
    assert result["train/tokens_per_second_per_rank"] == result["train/tokens_per_second"] / 2
    assert result["train/slowest_rank"] in (0, 1)
    ours, theirs = adapter(tmp_path / "two"), adapter(tmp_path / "alone")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, rtol=0, atol=tolerance), name
    for when in ("before", "after") if QUESTIONS in words else ():
        answers = [(tmp_path / name / "run" / f"answers_{when}.jsonl").read_text() for name in ("alone", "two")]
        assert answers[0] == answers[1]


def test_three_ranks_learn_what_one_process_learns(forks, tmp_path):
    """48 chats in steps of 18 rows, dropout and questions: the last step has 12 rows, the last round of questions two
    batches for three ranks. Three gradients are added in another order than in one process."""
    words = ("train.micro_batch_size=6", "train.global_batch_size=18", "data.eval_fraction=0", "train.eval_every=0")
    words = (*words, "techniques.lora.dropout=0.1", QUESTIONS)
    Reference.of(forks, made(tmp_path / "alone", *words), tmp_path / "alone")
    three = Ranks(forks, 3)
    assert three.run(made(tmp_path / "three", *words), tmp_path / "three") == [0, 0, 0], tail(tmp_path / "three")
    one, many = (losses(tmp_path / name / "run") for name in ("alone", "three"))
    assert len(one) == len(many) == 6
    assert one == pytest.approx(many, abs=1e-6, rel=0)
    for name, weight in adapter(tmp_path / "alone").items():
        assert torch.allclose(adapter(tmp_path / "three")[name], weight, rtol=0, atol=1e-6), name
    answers = [(tmp_path / name / "run" / "answers_after.jsonl").read_text() for name in ("alone", "three")]
    assert answers[0] == answers[1]


def test_two_ranks_stop_early_and_finish_like_one_process(ranks, forks, tmp_path):
    """Early stopping, the checkpoint to go back to, and the file of `fxtune finish`, which rank 0 alone looks for."""
    words = MODES["early"]
    Reference.of(forks, made(tmp_path / "alone", *words), tmp_path / "alone", **ONE_THREAD)
    codes = ranks.run(made(tmp_path / "two", *words), tmp_path / "two", **ONE_THREAD)
    assert codes == [0, 0], tail(tmp_path / "two")
    results = [json.loads((tmp_path / name / "run" / "result.json").read_text()) for name in ("alone", "two")]
    for name in ("train/step", "train/dropped_steps", "train/ended_early", "eval/best_step"):
        assert results[0][name] == results[1][name]
    for name, weight in adapter(tmp_path / "alone").items():
        assert torch.equal(adapter(tmp_path / "two")[name], weight), name
    words = made(tmp_path / "told", "schedule.name=wsd", "train.epochs=400", "train.max_minutes=600")
    first, _ = both = ranks.start(words, tmp_path / "told", "trace", stops={0: ("training", 8)})
    assert first.stopped(), tail(tmp_path / "told")
    (tmp_path / "told" / "run" / "finish").touch()
    first.send(signal.SIGCONT)
    assert [forked.wait() for forked in both] == [0, 0], tail(tmp_path / "told")
    result = json.loads((tmp_path / "told" / "run" / "result.json").read_text())
    assert result["train/ended_early"] == "finish"
    assert 8 <= result["train/step"] < 1000


def test_last_step_that_ranks_do_not_divide_counts_each_row_once(ranks, forks, tmp_path):
    """48 chats in steps of 20 rows: the last step of an epoch and a half has 12 rows, in three micro-batches."""
    words = ("train.micro_batch_size=4", "train.global_batch_size=20", "train.epochs=1.5", "data.eval_fraction=0")
    words = (*words, "train.eval_every=0")
    Reference.of(forks, made(tmp_path / "alone", *words), tmp_path / "alone")
    words = (*words, "train.micro_batch_size=2", "train.global_batch_size=20")
    assert ranks.run(made(tmp_path / "two", *words), tmp_path / "two") == [0, 0], tail(tmp_path / "two")
    one, two = (losses(tmp_path / name / "run") for name in ("alone", "two"))
    assert one == pytest.approx(two, abs=1e-5)


@pytest.mark.vital
def test_killed_rank_ends_the_other_and_the_same_command_resumes_bit_for_bit(ranks, tmp_path):
    words = made(tmp_path / "whole")
    assert ranks.run(words, tmp_path / "whole") == [0, 0]
    words = made(tmp_path / "killed")
    codes = ranks.run(words, tmp_path / "killed", "before", faults={1: "SIGKILL@9"})
    assert codes == [7, -signal.SIGKILL], tail(tmp_path / "killed")
    said = messages(tmp_path / "killed")
    assert len(said) == 1
    assert "lost another rank while" in said[0]
    assert ranks.run(words, tmp_path / "killed") == [0, 0], tail(tmp_path / "killed")
    assert "Resuming" in tail(tmp_path / "killed", 10**6)
    assert adapter(tmp_path / "killed").keys() == adapter(tmp_path / "whole").keys()
    for name, weight in adapter(tmp_path / "whole").items():
        assert torch.equal(adapter(tmp_path / "killed")[name], weight), name


@pytest.mark.parametrize("which", [0, 1])
def test_signal_at_one_rank_saves_and_ends_both(ranks, forks, tmp_path, which):
    """The run goes on in one process: the same documents, losses within rounding."""
    whole = made(tmp_path / "whole")
    assert ranks.run(whole, tmp_path / "whole") == [0, 0]
    folder = tmp_path / "stopped"
    words = made(folder)
    assert ranks.run(words, folder, "before", faults={which: "SIGTERM@7"}) == [75, 75], tail(folder)
    said = messages(folder)
    assert len(said) == 1
    assert "SIGTERM: saved after step" in said[0]
    newest = max(folder.glob("run/checkpoints/step-*"))
    logged = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])["train/step"]
    assert int(newest.name.removeprefix("step-")) == logged
    assert forks.start(words, folder, "after.jsonl").wait() == 0, tail(folder)
    assert losses(folder / "run") == pytest.approx(losses(tmp_path / "whole" / "run"), abs=1e-5)


def test_mistake_is_reported_once(ranks, tmp_path):
    words = made(tmp_path / "run", "model.path=/nowhere", "model.init=pretrained")
    first, second = ranks.run(words, tmp_path / "run")
    assert first == second > 0
    said = messages(tmp_path / "run")
    assert len(said) == 1, said


def test_run_in_use_is_refused_by_all_ranks(ranks, forks, tmp_path):
    folder = tmp_path / "busy"
    words = made(folder, "train.epochs=400")
    holder = forks.start(words, folder, "holder.jsonl", stops=("training", 2))
    try:
        assert holder.stopped(), tail(folder)
        codes = ranks.run(words, folder)
    finally:
        holder.kill()
        holder.wait()
    said = messages(folder)
    assert codes == [6, 6], said
    assert len(said) == 1, said
    assert "is in use by a run that is alive" in said[0]
