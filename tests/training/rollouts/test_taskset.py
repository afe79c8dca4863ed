"""Tasksets of verifiers: `pip install verifiers==0.4.0` first, which neither fxtune nor its tests bring."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from support.rows import write_jsonl
from support.runs import history

from fxtune.cli.main import main
from fxtune.training.rollouts.scoring import Call, Group, RewardWorkers
from fxtune.training.rollouts.taskset import rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("verifiers") is None, reason="needs verifiers (pip install verifiers)"
    ),
]
WORDS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    word: str

class Config(vf.TasksetConfig):
    words: list[str] = ["red", "blue", "green", "black"]

class WordTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def says_it(self, trace: vf.Trace) -> float:
        return float(self.data.word in trace.last_reply)

    @vf.reward(weight=-0.5)
    async def is_long(self, trace) -> float:
        return float(trace.num_output_tokens > 3)

    @vf.metric
    async def messages(self, trace) -> float:
        assert trace.num_turns == 1
        return len(trace.messages)

class Words(vf.Taskset[WordTask, Config]):
    def load(self):
        for word in self.config.words:
            yield WordTask(Data(prompt=f"Say {word}.", system_prompt="Be short.", word=word), self.config.task)

__all__ = ["Words"]
"""
NEEDS_MORE = {
    "a runtime": "    async def setup(self, trace, runtime): ...",
    "tools": "    @classmethod\n    def toolsets(cls, config): return [object()]",
    "`WordTask.runs` needs a runtime": "    @vf.reward\n    async def runs(self, trace, runtime) -> float: return 1.0",
}


@pytest.fixture
def taskset(tmp_path, monkeypatch):
    """A function (text of a module) -> id of its taskset."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"taskset_{len([*tmp_path.glob('taskset_*')])}_{tmp_path.name}".replace("-", "_").lower()
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("taskset_")]:
        del sys.modules[name]


def score(taskset: str, row: dict, texts: list[str], tokens: list[int]):
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {key: value for key, value in row.items() if key != "prompt"}
    workers = RewardWorkers([Call("verifiers", {"taskset": taskset})], 60.0, 1)
    try:
        (found,) = workers.score(
            [Group("rows.jsonl:1", row["prompt"], completions, [[1] * n for n in tokens], columns)]
        )
    finally:
        workers.close()
    return found


def test_rows_come_from_tasks_and_rewards_from_their_rewards(taskset):
    name = taskset(WORDS)
    made = json.loads(json.dumps(list(rows(name, {"words": ["red", "blue", "green"]}, most=2))))
    assert [row["prompt"] for row in made] == [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"Say {word}."}]
        for word in ("red", "blue")
    ]
    found = score(name, made[1], ["blue", "<think>blue</think>red", "so blue it is", "red"], [1, 2, 4, 3])
    assert not found.problem
    assert found.rewards == {"verifiers": [2.0, 0.0, 1.5, 0.0]}
    assert found.metrics["says_it"] == [1.0, 0.0, 1.0, 0.0]
    assert found.metrics["is_long"] == [0.0, 0.0, 1.0, 0.0]
    assert found.metrics["messages"] == [3.0] * 4
    assert "word" in score(name, {"prompt": "", "task": {"prompt": "Say red."}}, ["red"], [1]).problem


def test_a_run_learns_from_a_taskset(taskset, cwd, capfd):
    name = taskset(WORDS)
    write_jsonl(Path("rows.jsonl"), list(rows(name)))
    words = [
        *("model=tiny", "objective=policy", "data.sources=[{path: rows.jsonl}]", "data.cache_dir=cache"),
        *("sampler.max_tokens=6", "sampler.answers=4", "data.sequence_length=96", "run.dir=run", "run.device=cpu"),
        *("train.micro_batch_size=1", "train.global_batch_size=4", "train.max_steps=2", "run.report=false"),
        *("tracking.display=plain", "sampler.reward_seconds=120", "sampler.temperature=2"),
    ]
    assert main([*words, f"objective.rewards=[{{name: verifiers, options: {{taskset: {name}}}}}]"]) == 0
    (step, *_) = history(Path("run"))
    assert step["rollout/reward"] == pytest.approx(
        2 * step["rollout/metric/says_it"] - 0.5 * step["rollout/metric/is_long"]
    )
    capfd.readouterr()
    assert main([*words, "run.dir=other", "objective.rewards=[{name: verifiers, options: {taskset: absent}}]"]) == 2
    assert "`absent`" in capfd.readouterr().err


@pytest.mark.parametrize("need", NEEDS_MORE)
def test_a_taskset_that_needs_more_than_an_answer_is_refused(taskset, need):
    text = WORDS.replace("class WordTask(vf.Task[Data]):", f"class WordTask(vf.Task[Data]):\n{NEEDS_MORE[need]}\n")
    with pytest.raises(ValueError, match=need):
        list(rows(taskset(text)))


def test_a_taskset_without_end_needs_the_number_of_rows(taskset):
    name = taskset(WORDS.replace("    def load(self):", "    INFINITE = True\n\n    def load(self):"))
    with pytest.raises(ValueError, match="`most`"):
        list(rows(name))
    assert len(list(rows(name, most=3))) == 3
