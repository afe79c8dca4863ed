"""A teacher that is a vLLM server rates the answers as the same model does in the run's process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.rows import write_jsonl
from support.vllm_server import vllm_server
from transformers import AutoModelForCausalLM

from fxtune.cli.main import main
from fxtune.training.rollouts import client

TINY = Path(__file__).parents[3] / "fxtune" / "assets" / "tiny"
WORDS = [
    *(
        "model=tiny",
        "objective=distill_on_policy",
        "techniques.lora.enabled=true",
        "data.sources=[{path: rows.jsonl}]",
    ),
    *("data.cache_dir=cache", "sampler.max_tokens=8", "sampler.answers=2", "data.sequence_length=64"),
    *("train.micro_batch_size=1", "train.global_batch_size=2", "train.max_steps=2", "optimizer.lr=1e-2"),
    *("run.device=cpu", "run.report=false", "tracking.display=plain"),
]


@pytest.fixture(autouse=True)
def rows(cwd, monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.01)
    write_jsonl(Path("rows.jsonl"), [{"prompt": f"Tell me about {thing}."} for thing in ("lamps", "tents", "Rome")])


@pytest.mark.parametrize("shares", ["true", "false"])
def test_a_server_rates_answers_as_the_model_itself_does(cwd, shares):
    words, teacher = [*WORDS, f"data.share_prompts={shares}", "train.max_steps=1"], Path("teacher")
    shutil.copytree(TINY, teacher)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.lm_head.weight.data *= 1.5
    model.save_pretrained(teacher)
    assert main([*words, f"objective.teacher={teacher}", "run.dir=local"]) == 0
    with vllm_server(teacher, faults=("drops",)) as server:
        assert main([*words, f"objective.teacher={server.url}", "run.dir=served"]) == 0
    local, served = (Path(run, "rollouts", "step-00000001") for run in ("local", "served"))
    numbers = [np.load(folder / "numbers.npy")["advantages"] for folder in (local, served)]
    assert np.abs(numbers[0]).max() > 0.1
    np.testing.assert_allclose(numbers[1], numbers[0], atol=1e-4)
    figures = [json.loads((folder / "step.json").read_text())["figures"] for folder in (local, served)]
    assert figures[1]["teacher_kl"] == pytest.approx(figures[0]["teacher_kl"], abs=1e-4)


def test_a_teacher_that_does_not_fit_is_refused_before_the_weights(cwd, capfd, monkeypatch):
    def refused(*words: str, of: list[str] = WORDS) -> str:
        assert main([*of, *words]) == 2
        return capfd.readouterr().err

    supervised = [word for word in WORDS if not word.startswith(("objective", "sampler"))]
    write_jsonl(Path("answers.jsonl"), [{"prompt": "Tell me about lamps.", "completion": "They shine."}])
    answers = "data.sources=[{path: answers.jsonl}]"
    asked = "objective=distillation", "objective.teacher=http://host"
    assert "distill_on_policy" in refused(*asked, answers, of=supervised)

    assert "no vLLM server" in refused("objective.teacher=http://127.0.0.1:1")
    with vllm_server(TINY, longest=64) as server:
        url = f"objective.teacher={server.url}"
        assert "--max-model-len 65" in refused(url)
        assert "sampler.temperature=1" in refused(url, "sampler.temperature=0.5")
        assert "teacher_quantize" in refused(url, "objective.teacher_quantize=nf4")
        server.longest = 4096
        monkeypatch.setattr(server, "tokenizer", lambda text, **_: {"input_ids": [1, 2, 3]})
        assert "the same tokenizer" in refused(url)


def test_a_teacher_that_fails_ends_the_run_with_one_message(cwd, capfd, monkeypatch):
    with vllm_server(TINY) as server:
        monkeypatch.setattr(type(server), "rate", lambda self, given: (500, {"error": {"message": "no memory"}}))
        assert main([*WORDS, f"objective.teacher={server.url}"]) != 0
        assert "no memory" in capfd.readouterr().err
        monkeypatch.setattr(type(server), "rate", lambda self, given: (200, {"choices": [{"prompt_logprobs": None}]}))
        assert main([*WORDS, f"objective.teacher={server.url}"]) != 0
        assert "prompt_logprobs" in capfd.readouterr().err
