"""Runs that learn from their own answers, by the public command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.harness import kill, start
from support.killing import tail
from support.processors import write_model, write_picture_rows
from support.rows import write_jsonl
from support.runs import history, losses, same_export
from support.stopping import stopped_below, stops_before

from fxtune.cli.main import main
from fxtune.objectives.policy import Policy

WORDS = [
    *("model=tiny", "objective=policy", "techniques.lora.enabled=true", "data.sources=[{path: rows.jsonl}]"),
    *(
        "objective.rewards=[{name: regex, options: {pattern: o}}, {name: length, weight: -0.1}]",
        "data.cache_dir=cache",
    ),
    *("sampler.max_tokens=12", "sampler.answers=4", "sampler.batch=8", "data.sequence_length=64", "run.dir=run"),
    *("train.micro_batch_size=1", "train.global_batch_size=4", "train.max_steps=3", "optimizer.lr=1e-3"),
    *("run.device=cpu", "run.report=false", "tracking.display=plain", "checkpoint.every=1"),
]
FAILING = """
import fxtune

@fxtune.reward("picky")
def picky(completions, answer, **kwargs):
    if answer[0] == "bad":
        raise KeyError("no judge")
    return [float(len(text)) for text in completions]
"""

RANK = """
import fxtune

@fxtune.reward("rank")
def rank(completions, **kwargs):
    return [float(at) for at in range(len(completions))]
"""
COUNTING = """
import fxtune

@fxtune.reward("counting")
def counting(completions, **kwargs):
    with open("asked", "a") as file:
        file.write("a prompt\\n")
    raise KeyError("no judge")
"""


@pytest.fixture(autouse=True)
def rows(cwd):
    write_jsonl(Path("rows.jsonl"), [{"prompt": f"Tell me about {thing}.", "answer": thing} for thing in THINGS])


THINGS = ("lamps", "chairs", "tents", "jars", "Oslo", "Rome", "Anna", "Ben")


def rollouts(run: Path, step: int) -> tuple[dict, list[dict]]:
    folder = run / "rollouts" / f"step-{step:08d}"
    lines = (folder / "answers.jsonl").read_text().splitlines()
    return json.loads((folder / "step.json").read_text()), [json.loads(line) for line in lines]


def test_answers_rewards_and_advantages_of_each_step_are_written_and_learned(cwd):
    assert main(WORDS) == 0
    for step in (1, 2, 3):
        about, answers = rollouts(Path("run"), step)
        assert len(answers) == 16
        for group in range(4):
            own = [answer for answer in answers if answer["group"] == group]
            assert len({answer["where"] for answer in own}) == 1
            rewards = np.array([answer["reward"] for answer in own])
            for answer in own:
                found = "o" in answer["text"], min(len(answer["ids"]) / 100, 1)
                assert answer["rewards"] == {"regex": float(found[0]), "length": found[1]}
                assert answer["reward"] == pytest.approx(found[0] - 0.1 * found[1])
                if answer["advantage"] is not None:
                    assert answer["advantage"] == pytest.approx(answer["reward"] - rewards.mean())
        line = history(Path("run"))[step - 1]
        assert line["rollout/reward"] == pytest.approx(np.mean([answer["reward"] for answer in answers]))
        assert line["rollout/gap"] < 1e-4
        learned = [answer for answer in answers if answer["advantage"] is not None]
        assert line["train/supervised_tokens"] > 0
        assert about["figures"]["tokens"] == sum(len(answer["ids"]) for answer in answers)
        assert {answer["seed"] for answer in learned} <= {answer["seed"] for answer in answers}
    seeds = [answer["seed"] for step in (1, 2, 3) for answer in rollouts(Path("run"), step)[1]]
    assert len(set(seeds)) == len(seeds)
    assert {answer["where"] for step in (1, 2) for answer in rollouts(Path("run"), step)[1]} == {
        f"rows.jsonl:{line}" for line in range(1, 9)
    }


def test_a_run_without_its_last_checkpoint_learns_from_the_stored_answers(cwd):
    """The stored answers count, not new ones: their advantages are changed, and the resumed run differs by that."""
    assert main([*WORDS, "run.dir=whole"]) == 0
    assert main([*WORDS, "train.pause_after=2"]) == 0
    stored = Path("run/rollouts/step-00000003")
    assert not stored.exists()
    source = Path("whole/rollouts/step-00000003")
    stored.mkdir()
    for file in source.iterdir():
        (stored / file.name).write_bytes(file.read_bytes())
    numbers = np.load(stored / "numbers.npy")
    numbers["advantages"] = numbers["sampled"] < 0
    np.save(stored / "numbers.npy", numbers)
    assert main(WORDS) == 0
    assert not same_export("run", "whole")
    assert rollouts(Path("run"), 2) != {}


@pytest.mark.vital
def test_a_run_that_is_killed_while_it_samples_and_trains_ends_with_the_same_adapter(cwd):
    broken, whole = cwd / "broken", cwd / "whole"
    for folder in (broken, whole):
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(Path("rows.jsonl").read_bytes())
    undisturbed, process = start(WORDS, whole), start(WORDS, broken, **stops_before(2, cwd))
    stopped_below(process)
    assert (broken / "run" / "rollouts" / "step-00000002" / "step.json").exists()
    assert kill(process) == -9
    assert undisturbed.wait(600) == 0, tail(whole)
    assert start(WORDS, broken).wait(600) == 0, tail(broken)
    assert same_export(broken / "run", whole / "run")
    for step in (1, 2, 3):
        assert rollouts(broken / "run", step)[1] == rollouts(whole / "run", step)[1]


def test_a_reward_that_raises_ends_the_run_with_its_row_or_leaves_the_row_out(cwd, capfd):
    (cwd / "picky.py").write_text(FAILING)
    write_jsonl(
        Path("rows.jsonl"), [{"prompt": "Why?", "answer": answer} for answer in ("good", "bad", "good", "good")]
    )
    words = [*WORDS, "objective.rewards=[{name: picky}]", "--plugin", str(cwd / "picky.py"), "train.max_steps=1"]
    assert main(words) == 2
    said = capfd.readouterr().err
    for part in ("rows.jsonl:2", "picky.py, line 7", "no judge", "objective.on_bad_reward=drop"):
        assert part in said
    assert main([*words, "objective.on_bad_reward=drop", "run.dir=other"]) == 0
    assert "rows.jsonl:2" in capfd.readouterr().out
    _, answers = rollouts(Path("other"), 1)
    assert {answer["where"] for answer in answers if answer["advantage"] is None} >= {"rows.jsonl:2"}
    assert history(Path("other"))[0]["rollout/left_out"] == 0.25


def test_equal_rewards_are_not_learned_and_end_the_run_after_some_steps(cwd, capfd):
    words = [*WORDS, "objective.rewards=[{name: regex, options: {pattern: '~~'}}]", "objective.patience=2"]
    assert main(words) != 0
    said = capfd.readouterr().err
    assert "For 2 steps" in said
    line = history(Path("run"))[0]
    assert line["rollout/equal_groups"] == 1
    assert line["train/grad_norm"] == 0


def test_answers_that_are_all_cut_off_and_not_kept_end_the_run_after_some_steps(cwd, capfd):
    """Their rewards differ, and no advantage is learned all the same."""
    (cwd / "rank.py").write_text(RANK)
    words = [*WORDS, "objective.rewards=[{name: rank}]", "--plugin", str(cwd / "rank.py"), "objective.patience=2"]
    assert main([*words, "objective.keep_truncated=false", "sampler.max_tokens=2"]) != 0
    assert "For 2 steps" in capfd.readouterr().err
    assert history(Path("run"))[0]["rollout/equal_groups"] == 0


def test_steps_in_which_nothing_is_learned_count_in_epochs_and_in_the_schedule(cwd):
    words = ["objective.rewards=[{name: regex, options: {pattern: '~~'}}]", "objective.patience=99"]
    words += ["train.max_steps=null", "train.epochs=1.5", "schedule.name=linear", "schedule.warmup_steps=0"]
    assert main([*WORDS, *words]) == 0
    rates = [line["train/lr"] for line in history(Path("run")) if "train/lr" in line]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3]), "8 prompts, 4 in a step"


def test_a_reward_for_short_answers_makes_them_shorter(cwd):
    """The base answers an order in forms of different lengths."""
    orders = ["Hello! Anna in Oslo asks for three grey lamps.", "I am Ben. Can I get two red jars? I live in Rome."]
    write_jsonl(Path("rows.jsonl"), [{"prompt": [{"role": "user", "content": order}]} for order in orders])
    words = ["objective.rewards=[{name: length, weight: -1, options: {most: 64}}]", "data.sequence_length=128"]
    words += ["sampler.max_tokens=64", "sampler.answers=8", "sampler.batch=16", "train.global_batch_size=2"]
    assert main([*WORDS, *words, "train.max_steps=6", "optimizer.lr=3e-3", "schedule.name=constant"]) == 0
    lengths = [line["rollout/length"] for line in history(Path("run")) if "rollout/length" in line]
    assert lengths[-1] < 0.85 * lengths[0], lengths


def test_a_step_that_does_not_fit_in_memory_is_learned_in_smaller_micro_batches(cwd, monkeypatch, capfd):
    words = [*WORDS, "train.max_steps=2", "data.packing=false", "data.share_prompts=false"]
    assert main([*words, "run.dir=small"]) == 0
    inner = Policy.loss

    def loss(self, model, batch):
        if len(batch.input_ids) > 1:
            raise torch.OutOfMemoryError("no room")
        return inner(self, model, batch)

    monkeypatch.setattr(Policy, "loss", loss)
    assert main([*words, "train.micro_batch_size=4"]) == 0
    assert "ran out of memory" in capfd.readouterr().out
    assert losses(Path("run")) == pytest.approx(losses(Path("small")), rel=1e-5, abs=1e-6)
    for step in (1, 2):
        ids = [[answer["ids"] for answer in rollouts(Path(run), step)[1]] for run in ("run", "small")]
        assert ids[0] == ids[1], "they are not sampled again"


def test_prompts_with_several_images_are_sampled_and_learned_alike(cwd):
    write_model("qwen2_5_vl", cwd / "model")
    pictures = [json.loads(line) for line in write_picture_rows(cwd / "pictures", 9).read_text().splitlines()]
    rows = [{"prompt": row["messages"][:1], "images": row["images"]} for row in pictures if len(row["images"]) == 2]
    write_jsonl(Path("pictures/prompts.jsonl"), rows)
    words = ["model.path=model", "data.sources=[{path: pictures/prompts.jsonl}]", "data.sequence_length=256"]
    words += ["train.global_batch_size=3", "train.max_steps=1", "objective.patience=99"]
    words = [word for word in WORDS if word != "model=tiny"] + words
    assert main(words) == 0
    assert history(Path("run"))[0]["rollout/gap"] < 1e-4
    assert main(["verify", *words, "--loss"]) == 0


def test_a_column_that_rewards_read_and_rows_lack_is_named(cwd, capfd):
    assert main([*WORDS, "objective.rewards=[{name: exact, options: {column: solution}}]"]) == 2
    assert "`solution`" in capfd.readouterr().err


def test_two_ranks_write_the_answers_of_one_and_learn_the_same(cwd):
    assert main(WORDS) == 0
    assert main([*WORDS, "run.dir=two", "run.gpus=2"]) == 0
    for step in (1, 2):
        one, two = (rollouts(Path(name), step)[1] for name in ("run", "two"))
        assert [answer["ids"] for answer in one] == [answer["ids"] for answer in two]
    assert losses(Path("run")) == pytest.approx(losses(Path("two")), rel=1e-4, abs=1e-6)


def test_held_out_prompts_have_a_reward_before_and_after_and_in_eval(cwd, capfd):
    words = [*WORDS, "data.eval_fraction=0.4", "train.max_steps=2", "train.eval_every=1", "objective.patience=99"]
    assert main(words) == 0
    figures = {name: value for line in history(Path("run")) for name, value in line.items()}
    assert {"before/reward", "eval/reward", "eval/reward/regex", "eval/length"} <= figures.keys()
    assert figures["eval/loss"] == -figures["eval/reward"]
    capfd.readouterr()
    assert main(["eval", "run", "--json", "eval.json"]) == 0
    found = json.loads(Path("eval.json").read_text())
    best = max(line["eval/reward"] for line in history(Path("run")) if "eval/reward" in line)
    assert f"{best:.4f}" in json.dumps(found) or str(best) in json.dumps(found)


@pytest.mark.parametrize("share", ["true", "false"])
def test_verify_compares_the_loss_with_plain_transformers_on_made_up_answers(cwd, share):
    assert main(["verify", *WORDS, f"data.share_prompts={share}", "--loss", "--json", "verify.json"]) == 0
    rows = json.loads(Path("verify.json").read_text())
    assert "within" in json.dumps(rows)


def test_evidence_says_what_wrote_the_answers_and_whether_they_come_again(cwd):
    assert main([*WORDS, "train.max_steps=1"]) == 0
    (seen,) = [row for row in json.loads(Path("run/evidence.json").read_text()) if row["technique"] == "sampler"]
    assert seen["acted"]
    assert "the same bits" in seen["observed"]


def test_a_failing_reward_ends_the_run_before_the_other_prompts_are_scored(cwd):
    """Otherwise a reward that hangs would hang once for each prompt."""
    (cwd / "counting.py").write_text(COUNTING)
    words = [*WORDS, "objective.rewards=[{name: counting}]", "--plugin", str(cwd / "counting.py")]
    assert main([*words, "sampler.reward_workers=1"]) == 2
    assert Path("asked").read_text() == "a prompt\n"
