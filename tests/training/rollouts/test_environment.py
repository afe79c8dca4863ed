"""Answers that call tools of an environment, by the public command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.rows import write_jsonl
from support.runs import history, same_export
from support.vllm_server import vllm_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.cli.main import main
from fxtune.training.rollouts import client

TINY = Path(__file__).parents[3] / "fxtune" / "assets" / "tiny"
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
CALCULATOR = """
import os, time
import fxtune

@fxtune.environment("calculator")
class Calculator:
    def reset(self, answer, **row):
        self.right, self.found = answer, None

    def add(self, a: int, b: int) -> int:
        \"\"\"Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        \"\"\"
        self.found = a + b
        return self.found

    async def slow(self, seconds: float) -> None:
        \"\"\"Wait.

        Args:
            seconds: How long.
        \"\"\"
        time.sleep(seconds)

    def die(self) -> None:
        \"\"\"End the process.\"\"\"
        os._exit(1)

    def get_reward(self):
        return float(self.found == self.right)

@fxtune.reward("as_trl")
def as_trl(completions, environments, answer, **columns):
    return [float(len(chat)) + 0.25 * (own.right == right) for chat, own, right in zip(completions, environments, answer)]
"""
WORDS = [
    *("model=tiny", "objective=policy", "techniques.lora.enabled=true", "data.cache_dir=cache", "run.dir=run"),
    "data.sources=[{path: rows.jsonl, environment: calculator}]",
    *("data.chat_template=chat.jinja", "objective.rewards=[{name: environment}]"),
    *("sampler.max_tokens=160", "sampler.answers=2", "data.sequence_length=512", "train.micro_batch_size=1"),
    *("train.global_batch_size=1", "train.max_steps=2", "optimizer.lr=1e-2", "schedule.name=constant"),
    *("run.device=cpu", "run.report=false", "tracking.display=plain", "--plugin", "calculator.py"),
]
END = "<|im_end|>"
"""Begins the tokens that a turn ends with."""


def call(name: str, arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>{END}'


def one_by_one(text: str) -> list[int]:
    """Tokens of single characters: no tokenizer would encode the text so."""
    text, end, _ = text.partition(END)
    return [token for letter in text for token in TOKENIZER(letter)["input_ids"]] + [2] * bool(end)


class Script:
    """Writes the turns of each answer: `turns` by the number of results that its prompt has, for the answer whose
    number is the count of answers that began before."""

    def __init__(self, *answers: list[str], encode=one_by_one) -> None:
        self.answers, self.encode, self.begun = answers, encode, 0
        self.asked: list[tuple[list[int], int]] = []

    def __call__(self, given) -> list[int]:
        turn, prompt = 0, given["prompt"]
        own = next((index for index, text in enumerate(self.asked) if prompt[: len(text[0])] == text[0]), None)
        raise NotImplementedError


@pytest.fixture(autouse=True)
def files(cwd, monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.01)
    Path("chat.jinja").write_text(TEMPLATE)
    Path("calculator.py").write_text(CALCULATOR)
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 5?"}], "answer": n + 5} for n in range(2)]
    write_jsonl(Path("rows.jsonl"), rows)


def test_first(cwd):
    turns = {}

    def script(given):
        text = TOKENIZER.decode(given["prompt"])
        results = text.count("<|im_start|>tool")
        right = turns.setdefault(given["seed"], len(turns))
        if results == 0:
            return one_by_one(call("add", {"a": right % 2, "b": 5}))
        return one_by_one(f"It is so.{END}")

    with vllm_server(TINY) as server:
        server.script = script
        assert main([*WORDS, f"sampler.url={server.url}"]) == 0
        for asked in server.asked:
            print(TOKENIZER.decode(asked["prompt"]), asked["max_tokens"])
    print(Path("run/rollouts/step-00000001/answers.jsonl").read_text())
    print(history(Path("run")))
    raise AssertionError
