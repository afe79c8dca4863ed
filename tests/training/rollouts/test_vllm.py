"""Answers of vLLM over HTTP: adapters by version, and everything that a server can do wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from support.rows import write_jsonl
from support.runs import history, same_export
from support.vllm_server import VllmServer, fake_vllm, real_vllm, vllm_server
from transformers import AutoModelForCausalLM

from fxtune.cli.main import main
from fxtune.training.rollouts import client

TINY = Path(__file__).parents[3] / "fxtune" / "assets" / "tiny"
WORDS = [
    *("model=tiny", "objective=policy", "techniques.lora.enabled=true", "data.sources=[{path: rows.jsonl}]"),
    *("objective.rewards=[{name: regex, options: {pattern: o}}]", "data.cache_dir=cache", "sampler.temperature=1.3"),
    *("sampler.max_tokens=8", "sampler.answers=3", "data.sequence_length=64", "run.dir=run"),
    *("train.micro_batch_size=1", "train.global_batch_size=2", "train.max_steps=3", "optimizer.lr=1e-2"),
    *("run.device=cpu", "run.report=false", "tracking.display=plain"),
]


@pytest.fixture(autouse=True)
def rows(cwd, monkeypatch):
    monkeypatch.setattr(client, "WAIT_SECONDS", 0.01)
    write_jsonl(Path("rows.jsonl"), [{"prompt": f"Tell me about {thing}."} for thing in ("lamps", "tents", "Rome")])


def test_each_step_is_sampled_by_its_own_adapter_and_the_old_one_goes(cwd):
    with vllm_server(TINY) as server:
        assert main([*WORDS, f"sampler.url={server.url}"]) == 0
        assert server.loaded == [], "the last one is unloaded, too"
    loads = [name for call, name in server.history if call == "load_lora_adapter"]
    assert len(set(loads)) == len(loads) == 3
    assert [name for call, name in server.history if call == "unload_lora_adapter"] == loads
    assert [name for call, name in server.history if call == "completions"] == [
        name for name in loads for _ in range(6)
    ]
    assert not Path("run/rollouts/adapters").exists(), "nobody needs the adapters after the run"
    for line in history(Path("run"))[:3]:
        assert line["rollout/gap"] < 1e-4, "answers of other weights would have other log-probabilities"
    about = json.loads(Path("run/rollouts/step-00000002/step.json").read_text())
    assert about["sampler"] == "vLLM 0.0.1"
    assert len({asked["seed"] for asked in server.asked}) == 18
    assert all(asked["top_p"] == 1 and asked["top_k"] == -1 for asked in server.asked)
    answers = [json.loads(line) for line in Path("run/rollouts/step-00000001/answers.jsonl").read_text().splitlines()]
    assert all(answer["finished"] == (len(answer["ids"]) < 8 or answer["ids"][-1] == 2) for answer in answers)


@pytest.mark.parametrize("fault", ["forgets", "drops"])
def test_a_server_that_starts_again_or_drops_a_request_is_asked_again(cwd, fault):
    with vllm_server(TINY, faults=(fault,)) as server:
        assert main([*WORDS, f"sampler.url={server.url}", "train.max_steps=2"]) == 0
        assert not server.faults
    assert all(line["rollout/gap"] < 1e-4 for line in history(Path("run"))[:2])


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("no_updates", ("--enable-lora", "--max-lora-rank 16")),
        ("no_lora", ("--enable-lora",)),
        ("low_rank", ("max_lora_rank 8",)),
        ("base", ("objective.max_gap", "Step 2")),
        ("hot", ("objective.max_gap", "Step 1")),
        ("nulls", ("--logprobs-mode processed_logprobs",)),
        ("other", ("not of the trained weights",)),
    ],
)
def test_a_server_that_does_not_serve_the_trained_weights_ends_the_run(cwd, capfd, fault, parts):
    with vllm_server(TINY, faults=(fault,)) as server:
        assert main([*WORDS, f"sampler.url={server.url}", "objective.max_gap=0.01"]) != 0
    said = capfd.readouterr().err
    assert all(part in said for part in parts), said
    assert len(said.strip().splitlines()) < 4


def test_a_server_that_is_gone_or_too_short_or_no_vllm_is_refused_before_the_first_step(cwd, capfd, monkeypatch):
    assert main([*WORDS, "sampler.url=http://127.0.0.1:1"]) == 2
    assert "http://127.0.0.1:1" in capfd.readouterr().err
    with vllm_server(TINY, longest=32) as server:
        assert main([*WORDS, f"sampler.url={server.url}"]) == 2
    assert "--max-model-len 64" in capfd.readouterr().err
    with vllm_server(TINY) as server:
        monkeypatch.setattr(server, "tokenizer", lambda text, **_: {"input_ids": [1, 2, 3]})
        assert main([*WORDS, f"sampler.url={server.url}"]) == 2
    assert "another model" in capfd.readouterr().err
    for words in (["sampler=vllm"], ["sampler=vllm", "sampler.venv=nowhere"]):
        assert main([*WORDS, *words]) == 2
        assert "sampler.venv" in capfd.readouterr().err


def test_what_vllm_cannot_serve_is_refused(cwd, capfd):
    with vllm_server(TINY) as server:
        words = [*WORDS, f"sampler.url={server.url}"]
        assert main([*words, "sampler.sleep=true", "sampler.ahead=true"]) == 2
        assert "sampler.sleep" in capfd.readouterr().err
        assert main([*words, "techniques.lora.dora=true"]) == 2
        assert "DoRA" in capfd.readouterr().err


def test_a_server_that_dies_ends_the_run_with_one_message(cwd, capfd, monkeypatch):
    with vllm_server(TINY) as server:
        url = server.url
        monkeypatch.setattr(type(server), "complete", lambda self, given: (500, {"error": {"message": "no memory"}}))
        assert main([*WORDS, f"sampler.url={url}"]) != 0
    said = capfd.readouterr().err
    assert "no memory" in said
    assert url in said


def test_a_step_ahead_is_sampled_by_the_weights_before_it_and_is_learned_the_same_after_a_kill(cwd, monkeypatch):
    """Batch s has the weights of step s - 1, whether the run is killed or not."""
    words = [
        *WORDS,
        "sampler.ahead=true",
        "train.max_steps=5",
        "checkpoint.every=1",
        "train.eval_every=2",
        "optimizer.lr=1e-3",
    ]
    write_jsonl(Path("held_out.jsonl"), [{"prompt": "Tell me about Oslo."}])
    words += ["data.eval_sources=[{path: held_out.jsonl}]"]
    with vllm_server(TINY) as server:
        assert main([*words, f"sampler.url={server.url}", "run.dir=whole"]) == 0
        for steps in (1, 3):
            assert main([*words, f"sampler.url={server.url}", f"train.pause_after={steps}"]) == 0
        assert main([*words, f"sampler.url={server.url}"]) == 0
    assert same_export("run", "whole")
    weights = {}
    for run in ("run", "whole"):
        steps = [Path(run, "rollouts", f"step-{step:08d}") for step in range(1, 6)]
        weights[run] = [json.loads((step / "step.json").read_text())["weights"] for step in steps]
    assert weights["run"] == weights["whole"]
    assert weights["run"][0] == weights["run"][1], "the first two steps have the weights of the start"
    assert len(set(weights["run"])) == 4


def test_a_process_of_the_run_that_ends_during_training_is_started_once_more(cwd):
    """The new process lives on after the thread that started it has written its step."""
    venv = fake_vllm(cwd / "venv", ("exits",))
    own = ["sampler=vllm", f"sampler.venv={venv}", "sampler.ahead=true", "train.max_steps=4", "optimizer.lr=1e-3"]
    assert main([*WORDS, *own]) == 0
    assert (venv / "starts").read_text() == "start\n" * 2


FULL = ["techniques.lora.enabled=false", "optimizer.lr=1e-3", "objective.max_gap=0.01"]


def test_full_fine_tuning_is_sampled_by_the_whole_weights_of_each_step(cwd, capfd, monkeypatch):
    folders = []

    def reload(server, given, reload=VllmServer.reload):
        folders.append(len(list(Path(given["kwargs"]["weights_path"]).parent.iterdir())))
        return reload(server, given)

    monkeypatch.setattr(VllmServer, "reload", reload)
    with vllm_server(TINY) as server:
        assert main([*WORDS, *FULL, f"sampler.url={server.url}"]) == 0
        calls = [call for call, _ in server.history]
    assert all(line["rollout/gap"] < 1e-4 for line in history(Path("run"))[:3])
    assert calls.count("collective_rpc") == calls.count("reset_prefix_cache") == 3
    assert folders == [1, 2, 2], "at most the weights of two steps are on the disk"
    assert not Path("run/rollouts/weights").exists(), "nobody needs the weights after the run"
    with vllm_server(TINY, faults=("base",)) as server:
        assert main([*WORDS, *FULL, f"sampler.url={server.url}", "run.dir=old"]) != 0
    assert "objective.max_gap" in capfd.readouterr().err, "a server that keeps its old weights is found"


def test_a_server_sleeps_while_the_model_trains(cwd, capfd):
    with vllm_server(TINY) as server:
        assert main([*WORDS, f"sampler.url={server.url}", "sampler.sleep=true"]) == 0
        calls = [call.partition("?")[0] for call, _ in server.history]
        assert not server.sleeps, "others may use the server after the run"
    assert [call for call in calls if call in ("sleep", "wake_up")] == ["sleep", "wake_up"] * 4
    with vllm_server(TINY, faults=("asleep",)) as server:
        assert main([*WORDS, f"sampler.url={server.url}", "sampler.sleep=true", "run.dir=again"]) != 0
    assert "the engine sleeps" in capfd.readouterr().err


@pytest.mark.slow
def test_the_real_engine_serves_each_adapter_with_its_log_probabilities(cwd, monkeypatch):
    """vLLM in a process of the run, on a CPU, where it takes no seeds."""
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_CPU_OMP_THREADS_BIND", "nobind")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    own = ["sampler=vllm", f"sampler.venv={real_vllm()}", "sampler.request_seeds=false"]
    assert main([*WORDS, *own, "sampler.arguments=[--enforce-eager]"]) == 0
    lines = history(Path("run"))[:3]
    assert all(line["rollout/gap"] < 1e-4 for line in lines), "each step has the adapter of its own weights"
    assert len({json.loads(file.read_text())["weights"] for file in Path("run/rollouts").glob("*/step.json")}) == 3
    assert json.loads(Path("run/rollouts/step-00000001/step.json").read_text())["sampler"].startswith("vLLM 0.32")
    # vLLM on a CPU does not read the head of a model whose head is its table of tokens.
    shutil.copytree(TINY, "untied")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained("untied")
    full = [*FULL, *own, "model.path=untied", "sampler.arguments=[--enforce-eager]", "run.dir=full"]
    assert main([*WORDS, *full]) == 0
    assert all(line["rollout/gap"] < 1e-4 for line in history(Path("full"))[:3]), "vLLM reads the whole weights"
