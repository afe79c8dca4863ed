"""Rewards in worker processes, with TRL's signature."""

from __future__ import annotations

import math

import pytest

from fxtune.objectives.policy import RewardConfig
from fxtune.plugins import files_used
from fxtune.training.rollouts import reward_functions
from fxtune.training.rollouts.scoring import Call, Group, RewardWorkers

PLUGIN = """
import os, time
import fxtune

@fxtune.reward("words")
def words(prompts, completions, completion_ids, answer, log_extra=None, log_metric=None, **kwargs):
    assert len(prompts) == len(completion_ids) == len(answer) == len(kwargs["level"])
    log_extra("first", [text[:1] for text in completions])
    log_metric("longest", max(map(len, completions)))
    return [float(len(text.split())) if text else None for text in completions]

@fxtune.reward("later")
async def later(completions, **kwargs):
    return [1.0] * len(completions)

@fxtune.reward("plain")
def plain(completions):
    return [2.0] * len(completions)

@fxtune.reward("bad")
def bad(completions, **kwargs):
    kind = completions[0]
    if kind == "hang":
        time.sleep(600)
    if kind == "die":
        os._exit(3)
    if kind == "raise":
        raise RuntimeError("no such tool")
    return {"nan": [float("nan")] * 2, "few": [1.0], "text": ["a", "b"], "good": [0.5, 1.5]}[kind]
"""

SLOW = """
import multiprocessing, time
import fxtune

if multiprocessing.parent_process():
    time.sleep(1.2)

@fxtune.reward("slow")
def slow(completions):
    return [1.0] * len(completions)
"""


@pytest.fixture
def score(tmp_path):
    """A function (rewards, groups of texts) -> their scores, with the rewards of PLUGIN."""
    (tmp_path / "rewards.py").write_text(PLUGIN)
    with files_used([tmp_path / "rewards.py"]):

        def of(names: list[str], *groups: list[str], seconds: float = 20.0):
            workers = RewardWorkers([Call(name, {}) for name in names], seconds, 2)
            columns = {"answer": "4", "level": 1}
            made = [
                Group(f"rows.jsonl:{at}", "2 + 2?", texts, [[1]] * len(texts), columns)
                for at, texts in enumerate(groups, 1)
            ]
            try:
                return workers.score(made)
            finally:
                workers.close()

        yield of


def test_rewards_get_columns_and_log_beside_their_values(score):
    one, two = score(["words", "later", "plain"], ["a b c", ""], ["x", "y z"])
    assert one.rewards == {"words": [3.0, None], "later": [1.0, 1.0], "plain": [2.0, 2.0]}
    assert two.rewards["words"] == [1.0, 2.0]
    assert one.extra == {"first": ["a", ""]}
    assert two.metrics == {"longest": [3.0]}


def test_a_reward_that_fails_is_named_and_the_others_go_on(score):
    kinds = ["raise", "nan", "few", "text", "die", "good", "good"]
    found = dict(zip(kinds, score(["bad"], *([kind, "b"] for kind in kinds)), strict=True))
    assert found["good"].rewards == {"bad": [0.5, 1.5]}
    assert not found["good"].problem
    assert "RuntimeError: no such tool" in found["raise"].problem
    assert "rewards.py, line 28" in found["raise"].problem
    assert "nan" in found["nan"].problem
    assert "1 rewards for 2 completions" in found["few"].problem
    assert all("bad" in found[kind].problem for kind in ("raise", "nan", "few", "text"))
    assert "the reward bad ended its process" in found["die"].problem


def test_a_reward_that_hangs_is_ended(score):
    hangs, good = score(["bad"], ["hang", "b"], ["good", "b"], seconds=3.0)
    assert "sampler.reward_seconds=3" in hangs.problem
    assert good.rewards == {"bad": [0.5, 1.5]}


def test_the_start_of_the_second_process_is_no_time_of_the_first_reward(score, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    with files_used([tmp_path / "slow.py"]):
        found = score(["slow"], ["a"], ["b"], seconds=1.0)
    assert [scores.problem for scores in found] == ["", ""]


@pytest.mark.parametrize(
    ("name", "options", "completions", "columns", "expected"),
    [
        ("exact", {}, [" 5\n", "6"], {"answer": 5}, [1.0, 0.0]),
        ("exact", {"column": "gold"}, [[{"role": "assistant", "content": "a"}], "b"], {"gold": "a"}, [1.0, 0.0]),
        ("number", {}, ["so 1,234.50", "1234", "none"], {"answer": "#### 1234.5"}, [1.0, 0.0, 0.0]),
        ("number", {}, ["5"], {"answer": "unknown"}, [None]),
        ("number", {"tolerance": 0.1}, ["-9.5 apples"], {"answer": -10}, [1.0]),
        ("regex", {"pattern": "^a.b$"}, ["a\nb", "ab"], {}, [1.0, 0.0]),
        ("tags", {}, ["<think>x</think>\n<answer>y</answer>", "<answer>y</answer><think>x</think>"], {}, [1.0, 0.0]),
        ("tags", {"names": ["a"]}, ["<a>x</a><a>y</a>", "<a>x</a> end", " <a></a> "], {}, [0.0, 0.0, 1.0]),
        ("length", {"most": 4}, ["a", "b"], {}, [0.25, 0.25]),
    ],
)
def test_rewards_of_fxtune(name, options, completions, columns, expected):
    every = {key: [value] * len(completions) for key, value in columns.items()}
    function = getattr(reward_functions, name)
    given = function(completions=completions, completion_ids=[[1]] * len(completions), prompts=[], **every, **options)
    assert given == expected


def test_a_column_that_the_rows_lack_is_named():
    with pytest.raises(ValueError, match=r"`answer`.*`answers`"):
        reward_functions.exact(["a"], answers=["a"])


def test_unknown_and_missing_options_are_refused(score):
    for name, options in (("exact", {"colum": "a"}), ("regex", {}), ("nothing", {}), ("plain", {"scale": 2})):
        assert name in RewardConfig(name, options=options).refusal()
    assert not RewardConfig("regex", options={"pattern": "a"}).refusal()
    assert not RewardConfig("words", options={"anything": 1}).refusal()
    assert math.isfinite(score(["plain"], ["a"])[0].rewards["plain"][0])
