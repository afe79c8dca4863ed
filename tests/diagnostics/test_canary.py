"""`fxtune verify --canary`: answers grow longer if long answers are rewarded, unless the sampler has other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.vllm_server import vllm_server

from fxtune.cli.main import main
from fxtune.diagnostics import canary
from fxtune.training.rollouts import client

TINY = Path(__file__).parents[2] / "fxtune" / "assets" / "tiny"
WORDS = [
    *("verify", "+recipe=rl_quickstart", "--canary", "--json", "seen.json", "run.device=cpu", "run.dir=run"),
    *("data.cache_dir=cache", "train.global_batch_size=2", "train.micro_batch_size=1", "sampler.max_tokens=32"),
    *("data.sequence_length=128", "optimizer.lr=5e-3", "sampler.answers=6"),
]


@pytest.fixture(autouse=True)
def start(cwd, monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.01)


def seen(*words: str) -> tuple[int, dict]:
    code = main([*WORDS, *words])
    found = json.loads(Path("seen.json").read_text())
    (row,) = [row for row in (found.get("results") or found)["evidence"] if row["technique"] == "sampler"]
    assert {file.name for file in Path.cwd().iterdir()} == {"seen.json", "cache"}, "nothing else is left"
    return code, row


@pytest.mark.parametrize("faults", [(), ("base",)])
def test_an_adapter_that_a_server_does_not_use_is_found(cwd, monkeypatch, faults):
    monkeypatch.setattr(canary, "STEPS", 2)
    monkeypatch.setattr(canary, "ERRORS", 2.0)
    with vllm_server(TINY, faults=faults) as server:
        code, row = seen(f"sampler.url={server.url}", "objective.max_gap=100")
        assert server.loaded == []
    assert row["acted"] == (not faults), row
    assert code == (1 if faults else 0)
    assert "vLLM 0.0.1" in row["observed"]


def test_equally_long_answers_say_what_to_change(cwd):
    code, row = seen("sampler.max_tokens=1")
    assert code == 1
    assert "raise sampler.max_tokens" in row["observed"]


def test_a_recipe_without_rollouts_has_no_canary(cwd, capfd):
    assert main(["verify", "+recipe=quickstart", "--canary"]) == 2
    assert "objective=policy" in capfd.readouterr().err
