"""A teacher of answers that the student writes itself, by the public command and beside plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.rows import write_jsonl
from support.runs import figures, history, same_export
from transformers import AutoModelForCausalLM, AutoTokenizer

from fxtune.cli.main import main

ASSETS = Path(__file__).parents[2] / "fxtune" / "assets"
WORDS = [
    *("model=tiny", "objective=distill_on_policy", "techniques.lora.enabled=true", "data.cache_dir=cache"),
    *("data.sources=[{path: rows.jsonl}]", "data.sequence_length=128", "sampler.max_tokens=24", "sampler.answers=2"),
    *("train.micro_batch_size=1", "train.global_batch_size=4", "train.max_steps=3", "optimizer.lr=3e-3"),
    *("run.device=cpu", "run.report=false", "tracking.display=plain", "run.dir=run"),
]
ORDERS = ["Hello! Anna in Oslo asks for three grey lamps.", "I am Ben. Can I get two red jars? I live in Rome."]


@pytest.fixture(autouse=True)
def rows(cwd):
    turns = [[{"role": "user", "content": order}] for order in ORDERS]
    write_jsonl(Path("rows.jsonl"), [{"prompt": turn} for turn in turns * 2])


def answers(step: int) -> list[dict]:
    lines = Path(f"run/rollouts/step-{step:08d}/answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def teacher_log_probs(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    whole = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize(("rewards", "packs"), [("[]", True), ("[{name: length, options: {most: 24}}]", False)])
def test_advantages_are_the_teachers_log_probs_less_the_samplers(cwd, rewards, packs):
    words = [*WORDS, "objective.teacher=builtin:tiny-orders", f"objective.rewards={rewards}"]
    words += [] if packs else ["data.packing=false", "data.share_prompts=false", "train.micro_batch_size=4"]
    assert main([*words, "objective.teacher_weight=0.5", "train.max_steps=1"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    base = AutoModelForCausalLM.from_pretrained(ASSETS / "tiny", dtype=torch.float32)
    teacher = PeftModel.from_pretrained(base, ASSETS / "tiny-orders").eval()
    numbers = np.load("run/rollouts/step-00000001/numbers.npy")
    learned = [answer for answer in answers(1) if answer["advantage"] is not None]
    expected = []
    for answer in learned:
        order = ORDERS[(int(answer["where"].rpartition(":")[2]) - 1) % 2]
        turn = [{"role": "user", "content": order}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        seen = teacher_log_probs(teacher, prompt, answer["ids"]).numpy()
        expected.append(answer["advantage"] + 0.5 * (seen - np.array(answer["log_probs"])))
    stored = [each for each in numbers["advantages"] if each != 0]
    assert sorted(stored) == pytest.approx(sorted(value for each in expected for value in each), abs=2e-4)
    line = history(Path("run"))[0]
    total = sum(len(answer["ids"]) for answer in learned)
    kl = -sum((each - answer["advantage"]).sum() / 0.5 for each, answer in zip(expected, learned, strict=True)) / total
    assert line["rollout/teacher_kl"] == pytest.approx(kl, abs=1e-3)


def test_the_student_comes_nearer_to_its_teacher(cwd):
    """The student has learned one of the forms in which the base answers. On-policy it finds back to all of them."""
    tuned = ["objective=causal_lm", "data=preferences", "data.questions.path=null", "data.eval_fraction=0"]
    chosen = "data.sources=[{path: 'builtin:preferences_train', columns: {chosen: completion}, unused: [rejected]}]"
    keep = [word for word in WORDS if not word.startswith(("sampler", "objective", "data.sources"))]
    assert main([*keep, *tuned, chosen, "train.max_steps=3", "optimizer.lr=2e-3", "run.dir=tuned"]) == 0
    words = [*WORDS, "model.adapter=tuned/adapter", "objective.teacher=builtin:tiny", "train.max_steps=12"]
    assert main([*words, "sampler.answers=8", "optimizer.lr=1e-3"]) == 0
    kl = [line["rollout/teacher_kl"] for line in history(Path("run")) if "rollout/teacher_kl" in line]
    assert kl[0] > 0.005
    assert np.mean(kl[-3:]) < 0.7 * np.mean(kl[:2])


def test_without_rewards_the_last_weights_are_exported(cwd):
    """Evaluations of a run without rewards have no loss: equal losses would make the first weights the best."""
    words = [*WORDS, "objective.teacher=builtin:tiny-orders"]
    evaluations = ["data.eval_sources=[{path: rows.jsonl}]", "data.on_overlap=keep", "train.eval_every=1"]
    assert main([*words, *evaluations]) == 0
    assert main([*words, "run.dir=without"]) == 0
    assert same_export("run", "without")


def test_without_rewards_no_evaluation_ends_a_run_early(cwd, capsys):
    words = [*WORDS, "objective.teacher=builtin:tiny-orders", "data.eval_sources=[{path: rows.jsonl}]"]
    assert main([*words, "train.eval_every=1", "train.stop.patience=1"]) != 0
    assert "objective.rewards" in capsys.readouterr().err


def test_the_base_as_a_teacher_begins_with_no_distance(cwd):
    """With dropout, too: it acts in the training pass alone."""
    words = [*WORDS, "objective.teacher=base", "objective.rewards=[{name: length, options: {most: 24}}]"]
    assert main([*words, "techniques.lora.dropout=0.3", "train.max_steps=3"]) == 0
    assert all(line["rollout/gap"] < 1e-4 for line in history(Path("run")) if "rollout/gap" in line)
    kl = [line["rollout/teacher_kl"] for line in history(Path("run")) if "rollout/teacher_kl" in line]
    assert kl[0] == pytest.approx(0, abs=1e-5)
    assert abs(kl[2]) > 1e-4
    assert len(figures("run", "loss")) == 3


def test_an_adapter_that_the_run_goes_on_with_can_be_its_teacher(cwd):
    """Its base is another teacher (trl#3194)."""
    words = [*WORDS, "model.adapter=builtin:tiny-orders", "techniques.lora.r=8", "train.max_steps=1"]
    for teacher in ("builtin:tiny-orders", "builtin:tiny"):
        assert main([*words, f"objective.teacher={teacher}", f"run.dir={teacher[8:]}"]) == 0
    adapter, base = (history(Path(name))[0]["rollout/teacher_kl"] for name in ("tiny-orders", "tiny"))
    assert adapter == pytest.approx(0, abs=1e-5)
    assert base > 0.01
