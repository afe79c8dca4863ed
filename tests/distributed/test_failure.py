"""An error or a signal at one rank of a run: no rank hangs, and all end with one outcome, exit code and message."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.harness import command, write_chats
from support.killing import tail
from support.ranks import messages
from support.runs import history, losses

pytestmark = pytest.mark.slow
FEWER = ("train.max_steps=10", "data.eval_fraction=0")
QUESTIONS = "data.questions={path: questions.jsonl, limit: 12, max_new_tokens: 8}"


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ranks.run(command(folder, *FEWER), folder) == [0, 0], tail(folder)
    return folder / "run"


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_memory_that_runs_out_at_one_rank_halves_the_micro_batches_of_all(ranks, undisturbed, tmp_path, fault):
    assert ranks.run(command(tmp_path, *FEWER), tmp_path, faults={1: fault}) == [0, 0], tail(tmp_path)
    assert tail(tmp_path, 10**6).count("From here on 1 at a time. Step 5 is repeated") == 1
    assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), abs=1e-5)


@pytest.mark.parametrize(
    ("rank", "fault", "code", "message"),
    [
        (1, "update", 4, "The update of step 5 ran out of memory: CUDA out of memory"),
        (1, "bad row", 3, "cache/tokens.bin cannot be read: Input/output error"),
        (1, "missing file", 6, "/models/base/model.safetensors does not exist on this host"),
        (0, "full disk", 6, "No space left on device"),
        (1, "packages", 2, "have different packages: peft"),
    ],
)
def test_error_of_one_rank_ends_all_with_its_code_and_message(ranks, tmp_path, rank, fault, code, message):
    assert ranks.run(command(tmp_path, *FEWER), tmp_path, faults={rank: fault}) == [code, code], tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert message in messages(tmp_path)[0]


def test_memory_that_runs_out_at_one_rank_ends_ranks_that_share_rows(ranks, tmp_path):
    """The other rank waits for its part of the row, in the middle of a layer."""
    words = command(tmp_path, *FEWER, "parallel.context=2", "techniques.attention.enabled=true")
    assert ranks.run(words, tmp_path, faults={1: "forward"}) == [4, 4], tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert "Rank 1 ran out of memory: CUDA out of memory" in messages(tmp_path)[0]


def test_bug_of_one_rank_is_one_traceback(ranks, tmp_path):
    assert ranks.run(command(tmp_path, *FEWER), tmp_path, faults={1: "bug"}) == [1, 1], tail(tmp_path)
    assert messages(tmp_path) == []
    assert tail(tmp_path, 10**6).count("Traceback (most recent call last)") == 1


def test_loss_that_is_not_finite_at_one_rank_is_skipped_by_all(ranks, undisturbed, tmp_path):
    assert ranks.run(command(tmp_path, *FEWER), tmp_path, faults={1: "not finite"}) == [0, 0], tail(tmp_path)
    assert "1 of 10 steps were skipped" in tail(tmp_path, 10**6)
    assert losses(tmp_path / "run")[:4] == losses(undisturbed)[:4]
    assert losses(tmp_path / "run")[5] != losses(undisturbed)[5]


def test_spike_at_one_rank_is_skipped_by_all(ranks, tmp_path):
    words = command(tmp_path, *FEWER, "train.spikes=skip", "train.max_steps=20")
    assert ranks.run(words, tmp_path, faults={1: "spike@18"}) == [0, 0], tail(tmp_path)
    assert "step 18: a loss spike, skipped" in tail(tmp_path, 10**6)
    assert "1 of 20 steps were skipped" in tail(tmp_path, 10**6)


def test_killed_data_worker_of_one_rank_is_replaced(ranks, undisturbed, tmp_path):
    words = command(tmp_path, *FEWER, "loader.num_workers=1")
    assert ranks.run(words, tmp_path, faults={1: "dead worker"}) == [0, 0], tail(tmp_path)
    assert "It is started again" in tail(tmp_path, 10**6)
    assert losses(tmp_path / "run") == losses(undisturbed)


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("building", signal.SIGTERM),
        ("training", signal.SIGINT),
        ("training", signal.SIGUSR1),
        ("evaluating", signal.SIGTERM),
        ("asking", signal.SIGUSR1),
    ],
)
def test_signal_at_rank_1_in_any_phase_ends_both(ranks, tmp_path, phase, how):
    write_chats(tmp_path / "questions.jsonl", 12, seed=1)
    words = command(tmp_path, "data.eval_fraction=0.5", "train.eval_every=2", "train.micro_batch_size=1", QUESTIONS)
    words = [word for word in words if "global_batch" not in word] + ["train.global_batch_size=2"]
    both = ranks.start(words, tmp_path, stops={1: (phase, 1)})
    assert both[1].stopped(), tail(tmp_path)
    both[1].send(how)
    code = 130 if how is signal.SIGINT else 75
    assert [forked.wait() for forked in both] == [code, code], tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert messages(tmp_path)[0].startswith("fxtune: Ctrl-C:" if how is signal.SIGINT else f"fxtune: {how.name}:")
    if phase == "evaluating":
        assert not any("eval/loss" in line for line in history(tmp_path / "run"))


def test_signal_at_rank_1_while_rank_0_tokenizes(ranks, tmp_path):
    """Without an agent that ends the others, rank 0 notices it when it is done."""
    both = ranks.start(command(tmp_path, *FEWER), tmp_path, stops={0: ("tokenising", 1)})
    assert both[0].stopped(), tail(tmp_path)
    both[1].send(signal.SIGTERM)
    both[0].send(signal.SIGCONT)
    assert [forked.wait() for forked in both] == [75, 75], tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)


def test_different_recipes_are_refused_with_their_differences(ranks, tmp_path):
    codes = ranks.run(command(tmp_path, *FEWER), tmp_path, own={1: ["optimizer.betas=[0.9,0.95]"]})
    assert codes == [2, 2], tail(tmp_path)
    assert len(messages(tmp_path)) == 1, messages(tmp_path)
    assert "The recipe of rank" in messages(tmp_path)[0]
    assert "optimizer.betas" in tail(tmp_path, 10**6)


def test_ranks_that_do_not_divide_a_step_are_refused(ranks, tmp_path):
    words = [word for word in command(tmp_path, *FEWER) if "batch_size" not in word]
    codes = ranks.run([*words, "train.global_batch_size=6", "train.micro_batch_size=2"], tmp_path)
    assert codes == [2, 2], tail(tmp_path)
    assert len(messages(tmp_path)) == 1
    assert "A step has 3 micro-batches" in messages(tmp_path)[0]


def test_mistake_before_the_ranks_meet_is_one_message(ranks, tmp_path):
    """At rank 1 alone, and at both."""
    for own in ({1: ["optimizer.lr=much"]}, {0: ["optimizer.lr=much"], 1: ["optimizer.lr=much"]}):
        (tmp_path / "log.txt").unlink(missing_ok=True)
        assert ranks.run(command(tmp_path, *FEWER), tmp_path, own=own) == [2, 2], tail(tmp_path)
        assert len(messages(tmp_path)) == 1, messages(tmp_path)
        assert "optimizer.lr" in tail(tmp_path, 10**6)


def test_sweep_of_two_ranks_reports_each_failure_once_and_continues(ranks, tmp_path):
    """The first run cannot start, the second does."""
    words = [word for word in command(tmp_path, *FEWER) if "batch_size" not in word and "max_steps" not in word]
    sweep = ["-m", *words, "train.max_steps=3", "train.micro_batch_size=1", "train.global_batch_size=3,2"]
    assert ranks.run(sweep, tmp_path) == [2, 2], tail(tmp_path)
    said = messages(tmp_path)
    assert len(said) == 2, said
    assert "a number that 2 divides" in said[0]
    assert said[1] == "fxtune: 1 of 2 runs failed, for the reasons above"
    log = tail(tmp_path, 10**6)
    assert log.count("run 1: ") == log.count("run 2: ") == 1
    failed, done = sorted(
        json.loads((tmp_path / "run" / "sweep.json").read_text())["runs"], key=lambda one: one["changes"]
    )[::-1]
    assert failed["error"]
    assert done["error"] is None
    assert len(losses(Path(tmp_path / done["folder"]))) == 3
