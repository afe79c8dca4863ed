"""Rewards in worker processes, with TRL's signature."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace

import pytest
from support.processes import waits

from fxtune.objectives.policy import RewardConfig
from fxtune.plugins import REWARDS, files_used
from fxtune.training.rollouts import scoring
from fxtune.training.rollouts.scoring import Call, Group, RewardWorkers

PLUGIN = """
import os, pathlib, time
import fxtune

folder = pathlib.Path(__file__).parent

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
    (folder / f"{os.getpid()}.{kind}").touch()
    if kind == "hang":
        time.sleep(600)
    if kind == "die":
        os._exit(3)
    if kind == "raise":
        raise RuntimeError("no such tool")
    return {"nan": [float("nan")] * 2, "few": [1.0], "text": ["1", "2"], "none": None, "good": [0.5, 1.5]}[kind]

@fxtune.reward("misses")
def misses(completions, anwser):
    return [1.0] * len(completions)
"""

SLOW = """
import multiprocessing, os, pathlib, time
import fxtune

folder = pathlib.Path(__file__).parent

def waits(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

if multiprocessing.parent_process():
    (folder / f"{os.getpid()}.started").touch()
    while len(list(folder.glob("*.started"))) > 1:  # the second process: until the first has answered and waits again
        if answered := list(folder.glob("*.answered")):
            if waits(answered[0].stem):
                break
        time.sleep(0.01)

@fxtune.reward("slow")
def slow(completions):
    (folder / f"{os.getpid()}.answered").touch()
    return [1.0] * len(completions)
"""


CHAT = [{"role": "assistant", "content": "{}"}]
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "properties": {"n": {"multipleOf": 0.5, "maximum": 9}, "of": {"items": {"$ref": "#/$defs/node"}}},
            "required": ["n"],
            "type": "object",
        }
    },
}


@pytest.fixture
def score(tmp_path):
    """A function (rewards, groups of texts) -> their scores, with the rewards of PLUGIN."""
    (tmp_path / "rewards.py").write_text(PLUGIN)
    with files_used([tmp_path / "rewards.py"]):

        def of(names: list[str], *groups: list[str], seconds: float = 600.0):
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
    kinds = ["raise", "nan", "few", "text", "none", "die", "good", "good"]
    found = dict(zip(kinds, score(["bad"], *([kind, "b"] for kind in kinds)), strict=True))
    assert found["good"].rewards == {"bad": [0.5, 1.5]}
    assert not found["good"].problem
    assert "RuntimeError: no such tool" in found["raise"].problem
    assert "rewards.py, line 31" in found["raise"].problem
    assert "nan" in found["nan"].problem
    assert "1 rewards for 2 completions" in found["few"].problem
    assert "it returned None; it must return a list" in found["none"].problem
    assert all("bad" in found[kind].problem for kind in ("raise", "nan", "few", "text", "none"))
    assert "the reward bad ended its process" in found["die"].problem


def test_a_reward_that_wants_a_column_which_rows_lack_names_their_columns(score):
    (found,) = score(["misses"], ["a"])
    assert "'anwser'" in found.problem
    assert "columns of the row: answer, level" in found.problem


def test_a_reward_that_hangs_is_ended(score, tmp_path, monkeypatch):
    """By a clock that is beyond the limit once one reward hangs and the other has answered."""

    def over() -> bool:
        return any(tmp_path.glob("*.hang")) and any(waits(file.stem) for file in tmp_path.glob("*.good"))

    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: 10.0 * over()))
    hangs, good = score(["bad"], ["hang", "b"], ["good", "b"], seconds=0.1)
    assert "sampler.reward_seconds=0.1" in hangs.problem
    assert good.rewards == {"bad": [0.5, 1.5]}


def test_the_start_of_the_second_process_is_no_time_of_the_first_reward(score, tmp_path, monkeypatch):
    """By a clock that the start of each process moves far beyond the limit."""
    (tmp_path / "slow.py").write_text(SLOW)
    clock = SimpleNamespace(monotonic=lambda: 100.0 * len(list(tmp_path.glob("*.started"))))
    monkeypatch.setattr(scoring, "time", clock)
    with files_used([tmp_path / "slow.py"]):
        found = score(["slow"], ["a"], ["b"], seconds=30.0)
    assert len(list(tmp_path.glob("*.started"))) == 2
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
        (
            "json",
            {},
            ['{"a": [{}]}', "```json\n[1]\n```", "```\n[1]\n```", " 1 ", CHAT],
            {},
            [1.0, 1.0, 1.0, 1.0, 1.0],
        ),
        ("json", {}, ["", "Here: {}", "{'a': 1}", '{"a": NaN}', '{"a": 1, "a": 1}'], {}, [0.0] * 5),
        ("json", {}, ["```json\n[1]\n```\n```json\n[1]\n```", "[" * 99_999, "1" * 9_999], {}, [0.0] * 3),
        ("json", {}, ["<think>{</think>{}", "<think>{}</think>{"], {}, [1.0, 0.0]),
        ("json", {"schema": TREE}, ['{"n": 1, "of": [{"n": 2}]}', '{"n": 1, "of": [{}]}', "2"], {}, [1.0, 0.0, 0.0]),
        ("json", {"schema": TREE}, ['{"n": 1e999}', '{"n": 1%s}' % ("0" * 400)], {}, [0.0, 0.0]),
        ("json", {"column": "schema"}, ['{"n": 1}', "{}"], {"schema": TREE}, [1.0, 0.0]),
        ("json", {"column": "form"}, ["1", '"a"'], {"form": '{"type": "integer"}'}, [1.0, 0.0]),
        ("json", {"column": "form"}, ["1"], {"form": None}, [None]),
        (
            "math",
            {},
            [r"so \boxed{5}.", "It is 5", "$x = 5$", r"\[ 5 \]", "5.0", "4", ""],
            {"answer": 5},
            [1.0] * 5 + [0.0] * 2,
        ),
        ("math", {}, [r"\boxed{\frac} or 5", r"\boxed{5", r"\boxed{4}, \boxed{5}"], {"answer": "5"}, [0.0] * 3),
        ("math", {}, [r"<think>\boxed{4}</think>\boxed{5}", CHAT], {"answer": "5"}, [1.0, 0.0]),
        ("math", {}, ["0.5", r"$\frac{2}{4}$", r"\boxed{1/2}"], {"answer": r"\frac{1}{2}"}, [1.0] * 3),
        ("math", {}, ["0.5", r"\boxed{0.5}"], {"answer": r"so $x$ is \boxed{\frac12}"}, [1.0] * 2),
        (
            "math",
            {},
            [r"\boxed{\{3, 2, 1\}}", r"\boxed{1} and \boxed{2}, \boxed{3}"],
            {"answer": r"\{1,2,3\}"},
            [1.0] * 2,
        ),
        ("math", {}, [r"\boxed{(1, 2]}", r"\boxed{(1, 2)}", "2"], {"answer": "(1, 2]"}, [1.0, 0.0, 0.0]),
        ("math", {}, [r"\boxed{50\%}", r"\boxed{0.5}", "51%"], {"answer": "50%"}, [1.0, 1.0, 0.0]),
        ("math", {}, [r"\begin{align}x &= 72\end{align}"], {"answer": "48 + 24 = <<48+24=72>>72\n#### 72"}, [1.0]),
        ("math", {"column": "solution"}, ["5"], {"solution": None}, [None]),
        ("math", {}, ["5", r"\frac"], {"answer": r"\frac"}, [None, None]),
    ],
)
def test_rewards_of_fxtune(name, options, completions, columns, expected):
    if name == "math":
        options = {"seconds": 600, **options}  # the clock gives no answer a 0
    every = {key: [value] * len(completions) for key, value in columns.items()}
    ids = [[1]] * len(completions)
    given = REWARDS[name](completions=completions, completion_ids=ids, prompts=[], columns=every, **options)
    assert given == expected


def test_a_column_that_the_rows_lack_is_named():
    for name, options in (("exact", {}), ("math", {}), ("json", {"column": "answer"})):
        with pytest.raises(ValueError, match=r"`answer`.*`answers`"):
            REWARDS[name](completions=["a"], columns={"answers": ["a"]}, **options)


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("json", {"schema": {"properties": {"age": {"type": "whole"}}}}, "properties.age.type"),
        ("json", {"schema": {"items": {"$ref": "#/$defs/item"}}}, "/$defs/item"),
        ("json", {"schema": {"$ref": "https://example.org/form.json"}}, "example.org"),
        ("json", {"schema": {"pattern": "("}}, "pattern"),
        ("json", {"schema": "object"}, "object"),
        ("json", {"schema": {}, "column": "form"}, "`column`"),
        ("math", {"seconds": 0.5}, "`seconds`"),
        ("regex", {"pattern": "("}, "regex"),
    ],
)
def test_options_that_cannot_work_are_refused_and_named(name, options, part):
    assert part in RewardConfig(name, options=options).refusal()


@pytest.mark.parametrize(
    ("package", "name", "options", "command"),
    [
        ("jsonschema", "json", {"schema": {"title": "in no other test"}}, "pip install 'fxtune[rl]'"),
        ("jsonschema", "json", {"column": "form"}, "pip install 'fxtune[rl]'"),
        ("math_verify", "math", {}, "pip install 'fxtune[rl]'"),
        ("verifiers", "verifiers", {"taskset": "words"}, "pip install verifiers"),
    ],
)
def test_a_reward_without_its_package_is_refused_with_the_command_that_installs_it(
    monkeypatch, package, name, options, command
):
    monkeypatch.setitem(sys.modules, package, None)  # Python's way to say that there is no such module
    said = RewardConfig(name, options=options).refusal()
    assert command in said
    assert package in said
    assert not RewardConfig("json").refusal()


def test_an_answer_whose_value_takes_too_long_gets_0_and_the_worker_goes_on():
    """The limits of math-verify are signals, which need the main thread of the worker process."""
    hard = [r"\boxed{10^{10^{10}}}", r"\boxed{\sum_{n=1}^{1000000000} \frac{1}{n}}", "1 " * 20_000, r"\boxed{5}"]
    workers = RewardWorkers([Call("math", {"seconds": 1})], 600.0, 1)
    try:
        found = workers.score([Group(f"rows.jsonl:{line}", "", hard, [[1]] * 4, {"answer": "5"}) for line in (1, 2)])
    finally:
        workers.close()
    assert [scores.problem for scores in found] == ["", ""]
    assert [scores.rewards["math"] for scores in found] == [[0.0, 0.0, 0.0, 1.0]] * 2


def test_a_wrong_schema_of_one_row_is_a_problem_of_this_row():
    forms = [{"type": "object"}, {"type": "thing"}, {"type": "array"}]
    workers = RewardWorkers([Call("json", {"column": "schema"})], 600.0, 1)
    try:
        found = workers.score(
            [Group(f"rows.jsonl:{at}", "", ["[]"], [[1]], {"schema": form}) for at, form in enumerate(forms, 1)]
        )
    finally:
        workers.close()
    assert [scores.rewards.get("json") for scores in found] == [[0.0], None, [1.0]]
    assert "thing" in found[1].problem


def test_unknown_and_missing_options_are_refused(score):
    for name, options in (("exact", {"colum": "a"}), ("regex", {}), ("nothing", {}), ("plain", {"scale": 2})):
        assert name in RewardConfig(name, options=options).refusal()
    assert not RewardConfig("regex", options={"pattern": "a"}).refusal()
    assert not RewardConfig("words", options={"anything": 1}).refusal()
    assert math.isfinite(score(["plain"], ["a"])[0].rewards["plain"][0])


TOOLS = """
import asyncio, pathlib, time
import fxtune

RESETS = []

@fxtune.environment("tools")
class Tools:
    async def reset(self, fails=False, **row):
        RESETS.append(1)
        if fails and len(RESETS) == 1:
            raise RuntimeError("no browser yet")
        self.opened = asyncio.get_running_loop().create_future()

    async def close(self, text: str) -> str:
        \"\"\"Close it.

        Args:
            text: A text.
        \"\"\"
        asyncio.get_running_loop().call_soon(self.opened.set_result, text)
        return await self.opened

    def hang(self) -> str:
        \"\"\"Wait.\"\"\"
        pathlib.Path(__file__).with_name("hangs").touch()
        time.sleep(600)

    def get_reward(self):
        return 1.0
"""


@pytest.fixture
def turn(tmp_path):
    """A function (rows, a call for the answer to each, seconds) -> the scores of the calls, and then the rewards. All
    environments are in one process."""
    (tmp_path / "tools.py").write_text(TOOLS)
    with files_used([tmp_path / "tools.py"]):

        def of(rows: list[dict], calls: list[tuple], seconds: float = 600.0):
            workers = RewardWorkers([Call("environment", {})], seconds, 1)
            asked = enumerate(zip(rows, calls, strict=True), 1)
            begun = [
                Group(f"rows.jsonl:{at}", [], [], [], row, environment="tools", key=at, calls={0: [call]})
                for at, (row, call) in asked
            ]
            ended = [dataclasses.replace(group, calls=None, completions=[CHAT], ids=[[1]]) for group in begun]
            try:
                return workers.score(begun), workers.score(ended)
            finally:
                workers.close()

        yield of


def test_what_an_async_reset_opens_is_usable_in_a_tool(turn):
    ((called,), (scored,)) = turn([{}], [("close", {"text": "closed"})])
    assert called.replies == {0: [("close", "closed")]}
    assert scored.rewards == {"environment": [1.0]}


def test_a_lone_surrogate_becomes_a_question_mark(turn):
    ((called,), _) = turn([{}], [("close", {"text": "\ud83d!"})])
    assert called.replies == {0: [("close", "?!")]}


def test_a_reset_that_failed_is_no_reward_of_a_new_environment(turn):
    ((called,), (scored,)) = turn([{"fails": True}], [("close", {"text": ""})])
    assert "no browser yet" in called.problem
    assert scored.problem == called.problem
    assert not scored.rewards


def test_environments_that_end_with_their_process_name_the_row_that_ended_it(turn, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: 10.0 * (tmp_path / "hangs").exists()))
    called, scored = turn([{}, {}], [("close", {"text": ""}), ("hang", {})], seconds=0.1)
    assert not called[0].problem
    assert "hang took longer" in called[1].problem
    assert all("hang took longer" in scores.problem for scores in scored)
    assert "(rows.jsonl:2)" in scored[0].problem
