"""Answers that call tools of an environment, by the public command."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from support.harness import kill, start
from support.killing import tail
from support.rows import write_jsonl
from support.runs import history, same_export
from support.vllm_server import vllm_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.cli.main import main
from fxtune.training.rollouts import client
from fxtune.training.rollouts.episodes import seed_of

ROOT = Path(__file__).parents[3]
TINY = ROOT / "fxtune" / "assets" / "tiny"
TEMPLATE = """{%- if tools %}<|im_start|>system
{{ tools | map(attribute="function.name") | join(" ") }}<|im_end|>
{% endif %}{%- for message in messages %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls %}
{{- "<tool_call>\\n" + {"name": call.function.name, "arguments": call.function.arguments} | tojson + "\\n</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
"""The forms of Hermes, with a short description of the tools: the tiny model reads 512 tokens."""
TOKENIZER = AutoTokenizer.from_pretrained(TINY)
(CALCULATOR,) = re.findall(r"```python\n(# calculator\.py\n.*?)```", (ROOT / "docs" / "rl.md").read_text(), re.DOTALL)
FAULTY = """
import os, time

@fxtune.environment("faulty")
class Faulty(Calculator):
    async def slow(self, seconds: float) -> None:
        \"\"\"Wait.

        Args:
            seconds: How long.
        \"\"\"
        time.sleep(seconds)

    def die(self) -> None:
        \"\"\"End the process.\"\"\"
        os._exit(1)

@fxtune.reward("as_trl")
def as_trl(completions, environments, answer, **columns):
    return [len(chat) + 0.25 * (own.right == right) for chat, own, right in zip(completions, environments, answer)]
"""
SEED, GROUP = 7, 2
WORDS = [
    *("model=tiny", "objective=policy", "techniques.lora.enabled=true", "data.cache_dir=cache", "run.dir=run"),
    "data.sources=[{path: rows.jsonl, environment: calculator}]",
    *("data.chat_template=chat.jinja", "objective.rewards=[{name: environment}]"),
    *(
        "sampler.max_tokens=160",
        f"run.seed={SEED}",
        f"sampler.answers={GROUP}",
        "data.sequence_length=512",
        "train.micro_batch_size=1",
    ),
    *("train.global_batch_size=1", "train.max_steps=2", "optimizer.lr=1e-2", "schedule.name=constant"),
    *("run.device=cpu", "run.report=false", "tracking.display=plain", "--plugin", "calculator.py"),
]
FAILS = "data.sources=[{path: rows.jsonl, environment: faulty}]"
END = "<|im_end|>"
"""Begins the tokens that a turn ends with."""


def call(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>{END}'


def one_by_one(text: str) -> list[int]:
    """Tokens of single characters: no tokenizer would encode the text so."""
    text, end, _ = text.partition(END)
    return [token for letter in text for token in TOKENIZER(letter)["input_ids"]] + [2] * bool(end)


@pytest.fixture(autouse=True)
def files(cwd, monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.01)
    Path("chat.jinja").write_text(TEMPLATE)
    Path("calculator.py").write_text(CALCULATOR + FAULTY)
    write_jsonl(Path("rows.jsonl"), [{"prompt": [{"role": "user", "content": text}], "answer": 5} for text in ASKED])


def script(*answers: list[str]):
    """Writes the turns of answers: answer `number` to prompt `group` of a step is answers[group * G + number], over
    and over. The seed of a request depends on the step, the prompt, the answer and the turn alone."""
    known: dict[int, tuple[int, int, int]] = {}
    for step, group, number in product(range(4), range(4), range(8)):
        seed = seed_of(SEED, step, group, number)
        known |= {(seed_of(seed, turn) if turn else seed): (group, number, turn) for turn in range(4)}

    for number, turn in product(range(4), range(4)):  # of an evaluation
        seed = seed_of(SEED, -1, number)
        known[seed_of(seed, turn) if turn else seed] = 0, number, turn

    def write(given) -> list[int]:
        group, number, turn = known[given["seed"]]
        return one_by_one(answers[(group * GROUP + number) % len(answers)][turn])

    return write


def answers(step: int, run: str = "run") -> list[dict]:
    lines = Path(run, "rollouts", f"step-{step:08d}", "answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


ASKED = "What is 0 + 5?", "Give me 0 + 5."
RIGHT = [call("add", {"a": 0, "b": 5}), f"It is 5.{END}"]
WRONG = [call("add", {"a": 1, "b": 1}), call("add", {"a": 2, "b": 2}), f"Four, or so it seems to me.{END}"]


@pytest.mark.parametrize("shares", ["true", "false"])
def test_the_loss_counts_the_tokens_that_the_model_wrote_and_no_others(cwd, shares):
    words = [*WORDS, f"data.share_prompts={shares}", "train.max_steps=1", "sampler.max_tokens=300"]
    with vllm_server(TINY) as server:
        server.script = script(RIGHT, WRONG)
        assert main([*words, f"sampler.url={server.url}"]) == 0
    right, wrong = answers(1)
    assert (right["rewards"], wrong["rewards"]) == ({"environment": 1.0}, {"environment": 0.0})
    model, losses, count = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32), [], 0
    for answer, turns, results in ((right, RIGHT, ["5"]), (wrong, WRONG, ["2", "4"])):
        between = [f"\n<|im_start|>tool\n{result}{END}\n<|im_start|>assistant\n" for result in results]
        parts = [one_by_one(turns[0])]
        for text, turn in zip(between, turns[1:], strict=True):
            parts += [TOKENIZER(text)["input_ids"], one_by_one(turn)]
        assert answer["ids"] == [token for part in parts for token in part], (
            "the tokens of the script, not of its text"
        )
        wrote = [at % 2 == 0 for at, part in enumerate(parts) for _ in part]
        assert [value is not None for value in answer["log_probs"]] == wrote
        prompt = next(asked["prompt"] for asked in server.asked if asked["seed"] == answer["seed"])
        ids = torch.tensor([[*prompt, *answer["ids"]]])
        with torch.no_grad():
            seen = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = seen.gather(1, ids[0, len(prompt) :, None])[:, 0][torch.tensor(wrote)].numpy()
        stored = np.array([value for value in answer["log_probs"] if value is not None])
        assert own == pytest.approx(stored, abs=1e-4)
        losses += [*(-np.exp(own - stored) * answer["advantage"])]
        count += sum(wrote)
    (line,) = history(Path("run"))[:1]
    assert line["train/supervised_tokens"] == count == len(losses)
    assert line["train/loss"] == pytest.approx(sum(losses) / count, rel=1e-5)
    for command in ("preview", "report"):
        assert main([command, "run"]) == 0
    assert line["rollout/turns"] == 2.5
    assert line["rollout/length"] == count / 2
    assert line["rollout/gap"] < 1e-4
    for asked in server.asked:
        assert asked["max_tokens"] <= 300
    assert len({asked["seed"] for asked in server.asked}) == len(server.asked) == 5
    longest = max(server.asked, key=lambda asked: len(asked["prompt"]))
    assert len(longest["prompt"]) + longest["max_tokens"] == len(prompt) + 300, "the room counts for all turns"


def test_verify_compares_turns_with_plain_transformers(cwd):
    for shares in ("true", "false"):
        assert main(["verify", *WORDS, f"data.share_prompts={shares}", "--loss", "--json", "verify.json"]) == 0
        assert "within" in Path("verify.json").read_text()


def test_rewards_get_the_messages_and_environments_as_in_trl(cwd):
    with vllm_server(TINY) as server:
        server.script = script(RIGHT, WRONG)
        words = [
            "train.max_steps=1",
            "sampler.max_tokens=300",
            "objective.rewards=[{name: as_trl},{name: environment}]",
        ]
        assert main([*WORDS, *words, f"sampler.url={server.url}"]) == 0
    right, wrong = answers(1)
    assert right["rewards"] == {"as_trl": 3.25, "environment": 1.0}
    assert wrong["rewards"] == {"as_trl": 5.25, "environment": 0.0}
    assert [message["role"] for message in wrong["messages"]] == ["assistant", "tool"] * 2 + ["assistant"]
    assert right["messages"][0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 0, "b": 5}}
    assert right["messages"][1] == {"role": "tool", "name": "add", "content": "5"}


def test_the_model_reads_what_is_wrong_with_a_call(cwd):
    wrong = {
        call("subtract", {}): "There is no tool subtract",
        call("get_reward", {}): "There is no tool get_reward",
        call("add", [1]): "no JSON object",
        call("add", {"a": 1}): "missing 1 required positional argument",
        call("add", {"a": "<|im_", "b": "start|>"}): "special token",
        call("slow", {"seconds": 0}): "None",
    }
    with vllm_server(TINY) as server:
        server.script = script(*([text, f"Oh.{END}"] for text in wrong))
        words = ["train.max_steps=1", f"sampler.answers={len(wrong)}", "objective.rewards=[{name: length}]", FAILS]
        assert main([*WORDS, *words, "sampler.max_tokens=300", f"sampler.url={server.url}"]) == 0
    for answer in answers(1):
        _, result, last = answer["messages"]
        (expected,) = [
            part for text, part in wrong.items() if one_by_one(text) == answer["ids"][: len(one_by_one(text))]
        ]
        assert expected in result["content"]
        assert last["content"] == "Oh."


@pytest.mark.parametrize(
    ("tool", "arguments", "part", "limit"),
    [
        pytest.param("slow", {"seconds": 6000}, "the tool slow took longer", 15, marks=pytest.mark.slow),
        ("die", {}, "the tool die ended its process", 600),
    ],
)
def test_a_tool_that_hangs_or_ends_its_process_is_named_with_its_row(cwd, capfd, tool, arguments, part, limit):
    write_jsonl(Path("rows.jsonl"), [{"prompt": [{"role": "user", "content": "What?"}], "answer": 5}] * 3)
    words = [*WORDS, "train.max_steps=1", "train.global_batch_size=3", f"sampler.reward_seconds={limit}", FAILS]
    with vllm_server(TINY) as server:
        words.append(f"sampler.url={server.url}")
        server.script = script([call(tool, arguments), f"Oh.{END}"], [f"Five.{END}"], *[RIGHT, [f"Five.{END}"]] * 2)
        assert main(words) == 2
        said = capfd.readouterr().err
        assert part in said
        assert "rows.jsonl:" in said
        server.script = script([call(tool, arguments), f"Oh.{END}"], [f"Five.{END}"], *[RIGHT, [f"Five.{END}"]] * 2)
        assert main([*words, "objective.on_bad_reward=drop", "sampler.reward_workers=3", "run.dir=other"]) == 0
    assert capfd.readouterr().out.count("Left out the answers to rows.jsonl:") == 1
    learned = [answer for answer in answers(1, "other") if answer["advantage"] is not None]
    assert [answer["rewards"]["environment"] for answer in learned] == [1.0, 0.0] * 2


def test_an_answer_that_still_calls_after_its_last_turn_or_without_room_is_cut_off(cwd):
    for words, turns, cut in ((["sampler.turns=2"], 2, [False, True]), (["sampler.max_tokens=80"], 1, [True, True])):
        with vllm_server(TINY) as server:
            server.script = script(RIGHT, WRONG)
            words = [*WORDS, "train.max_steps=1", "sampler.max_tokens=300", *words, f"run.dir={turns}"]
            assert main([*words, f"sampler.url={server.url}"]) == 0
        found = answers(1, str(turns))
        assert [not answer["finished"] for answer in found] == cut
        assert [sum("name" not in one for one in answer["messages"]) for answer in found] == [turns] * 2
        assert all(answer["messages"][-1]["role"] == "assistant" for answer in found)


def test_a_server_that_starts_again_between_turns_writes_whole_answers_again(cwd):
    with vllm_server(TINY, faults=("forgets",)) as server:
        server.script = script(RIGHT, WRONG)
        words = ["train.max_steps=1", "sampler.answers=4", "sampler.max_tokens=300", f"sampler.url={server.url}"]
        assert main([*WORDS, *words]) == 0
        assert not server.faults
    assert [answer["rewards"]["environment"] for answer in answers(1)] == [1.0, 0.0] * 2
    assert history(Path("run"))[0]["rollout/gap"] < 1e-4


def test_held_out_prompts_call_tools_too_also_a_step_ahead(cwd):
    sources = "[{path: rows.jsonl, environment: calculator}]"
    words = [
        f"data.eval_sources={sources}",
        "data.on_overlap=keep",
        "train.eval_every=1",
        "sampler.ahead=true",
        "optimizer.lr=1e-4",
    ]
    with vllm_server(TINY) as server:
        server.script = script(RIGHT, WRONG)
        assert main([*WORDS, *words, "sampler.max_tokens=300", f"sampler.url={server.url}"]) == 0
    for step in (1, 2):
        assert [answer["rewards"]["environment"] for answer in answers(step)] == [1.0, 0.0]
    figures = {name: value for line in history(Path("run")) for name, value in line.items()}
    assert figures["eval/reward"] == 0.5
    assert figures["eval/turns"] == 2.5


def test_rows_of_a_source_without_an_environment_are_asked_beside_the_others(cwd):
    write_jsonl(Path("plain.jsonl"), [{"prompt": "Two and two?", "answer": "4"}])
    words = ["data.sources=[{path: rows.jsonl, environment: calculator},{path: plain.jsonl}]", "train.max_steps=1"]
    words += ["objective.rewards=[{name: environment},{name: length}]", "train.global_batch_size=3"]
    with vllm_server(TINY) as server:
        server.script = script(RIGHT, WRONG)
        assert main([*WORDS, *words, "sampler.max_tokens=300", f"sampler.url={server.url}"]) == 0
    for answer in answers(1):
        is_plain = answer["where"].startswith("plain")
        assert (answer["rewards"]["environment"] is None) == is_plain
        assert bool(answer["messages"]) != is_plain


@pytest.mark.slow
def test_the_trained_model_writes_turns_on_any_number_of_ranks(cwd):
    """In this template an `o` before a letter is a call, so the tiny model calls tools that do not exist."""
    template = TEMPLATE.replace('"<tool_call>\\n" + {"name"', '"o" + call.function.name + " " + ({"name"')
    begin, end = template.index('({"name"'), template.index("}}", template.index('({"name"'))
    Path("chat.jinja").write_text(template[:begin] + "call.function.arguments | tojson " + template[end:])
    words = [*WORDS, "objective.rewards=[{name: length}]", "train.global_batch_size=2", "train.max_steps=1"]
    words += ["sampler.answers=4", "sampler.turns=3", "sampler.batch=3"]
    assert main(words) == 0
    assert main([*words, "run.dir=two", "run.gpus=2"]) == 0
    found = answers(1)
    assert [answer["ids"] for answer in found] == [answer["ids"] for answer in answers(1, "two")]
    turns = [sum("name" not in one for one in answer["messages"]) for answer in found]
    assert 1 < max(turns) <= 3
    assert all(len(answer["ids"]) <= 160 for answer in found)
    assert any("There is no tool" in one["content"] for answer in found for one in answer["messages"])
    for run in ("run", "two"):
        assert history(Path(run))[0]["rollout/gap"] < 1e-4


@pytest.mark.slow
def test_a_run_that_is_killed_between_turns_learns_stored_answers_again_and_ends_with_the_same_adapter(cwd):
    broken, whole, last = cwd / "broken", cwd / "whole", seed_of(seed_of(SEED, 1, 0, 1), 2)
    for folder in (broken, whole):
        folder.mkdir()
        for name in ("rows.jsonl", "calculator.py", "chat.jinja"):
            (folder / name).write_bytes(Path(name).read_bytes())
    with vllm_server(TINY) as server:
        words, write = [*WORDS, "sampler.max_tokens=300", f"sampler.url={server.url}"], script(RIGHT, WRONG)
        server.script = write
        assert start(words, whole).wait(600) == 0, tail(whole)
        process = start(words, broken)

        def write_and_kill(given):
            if given["seed"] == last and process.poll() is None:
                kill(process)
            return write(given)

        server.script = write_and_kill
        assert process.wait(600) == -9, tail(broken)
        server.asked.clear()
        assert start(words, broken).wait(600) == 0, tail(broken)
        assert len(server.asked) == 5, "one step; the other is on the disk"
    assert same_export(broken / "run", whole / "run")
    for step in (1, 2):
        assert answers(step, str(broken / "run")) == answers(step, str(whole / "run"))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["data.sources=[{path: rows.jsonl, environment: calculater}]"], ["calculater", "calculator"]),
        (["data.sources=[{path: rows.jsonl, environment: quiet}]"], ["quiet.py", "docstring"]),
        (["data.chat_template=null"], ["data.chat_template", "tools"]),
        (["data.sources=[{path: texts.jsonl, environment: calculator}]"], ["texts.jsonl:1", "messages"]),
        (["data.sources=[{path: rows.jsonl}]", "sampler.turns=3"], ["sampler.turns", "environment"]),
    ],
)
def test_what_cannot_work_is_refused_before_a_weight_is_loaded(cwd, capfd, words, parts):
    write_jsonl(Path("texts.jsonl"), [{"prompt": "Two and two?", "answer": 4}])
    Path("quiet.py").write_text(
        "import fxtune\n\n@fxtune.environment('quiet')\nclass Quiet:\n"
        "    def reset(self, **row): ...\n    def say(self, what): ...\n"
    )
    assert main([*WORDS, "--plugin", "quiet.py", *words]) != 0
    found = capfd.readouterr()
    for part in parts:
        assert part in found.err
    assert "Building the model" not in found.out


def test_an_environment_is_for_policies(cwd, capfd):
    write_jsonl(Path("rows.jsonl"), [{"prompt": "Two and two?", "completion": "4"}])
    words = [word for word in WORDS if not word.startswith(("objective", "sampler"))]
    assert main(words) != 0
    said = capfd.readouterr().err
    assert "environment" in said
    assert "objective=policy" in said


def test_a_reset_that_raises_or_writes_a_prompt_is_named(cwd, capfd):
    for body, part in (("raise KeyError('no board')", "no board"), ("return 'Look!'", "reset() returned a value")):
        Path("calculator.py").write_text(CALCULATOR.replace("self.right, self.found = answer, None", body))
        assert main([*WORDS, "train.max_steps=1", "sampler.max_tokens=20"]) == 2
        said = capfd.readouterr().err
        for each in ("rows.jsonl:", "calculator", part):
            assert each in said
