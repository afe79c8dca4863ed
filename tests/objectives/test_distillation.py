"""Distillation by the public command, and compared with plain transformers, one document at a time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.architectures import on_disk
from support.cases import slow_but
from support.harness import SMALLER, write_chats, write_texts
from support.rows import write_jsonl
from support.runs import figures, same_export
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fxtune.cli.main import main
from fxtune.config.compose import load
from fxtune.models.replacement import PackedLinear
from fxtune.techniques.quantized_modules import dequantized
from fxtune.training.builder import RunBuilder

TINY = Path(__file__).parents[2] / "fxtune" / "assets" / "tiny"
WORDS = [
    "objective=distillation",
    "objective.teacher=builtin:tiny",
    "data.sources=[{path: rows.jsonl}]",
    "data.sequence_length=128",
    "data.cache_dir=cache",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "train.max_steps=4",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]
SMALL = ["model.init=random", f"model.architecture={SMALLER}"]
BASE = ["objective.teacher=base", "objective.text_weight=0.3"]
LORA = "techniques.lora.enabled=true"


def write_student(folder: Path, rows: int = 1024) -> Path:
    """A random model with the tokens of builtin:tiny, whose padding is its end token. `rows`: of its table."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
    LlamaForCausalLM(LlamaConfig(vocab_size=rows, eos_token_id=2, **sizes)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": config["eos_token"]}))
    return folder


@pytest.mark.parametrize(
    ("packing", "micro", "rows"), slow_but([(True, 2, 1024), (False, 4, 1040)], (True, 2, 1024), (False, 4, 1040))
)
def test_loss_and_gradients_are_those_of_plain_transformers(cwd, packing, micro, rows):
    """End tokens count, though padding is the same token (trl#6357). Targets are the next tokens (ms-swift#8436). A
    student with more rows than its teacher learns from the rows that both have."""
    folder = write_student(cwd / "student", rows)
    texts = ["Anna lives in Oslo.", "A red lamp", "Ben wants seven blue chairs from Rome, please.", "Yes."]
    write_jsonl(Path("rows.jsonl"), [{"text": text} for text in texts])
    words = [f"model.path={folder}", f"data.packing={packing}", f"train.micro_batch_size={micro}"]
    words += ["train.global_batch_size=4", "objective.text_weight=0.25", "objective.temperature=2"]
    if packing:
        words += ["data.sequence_length=32", "train.global_batch_size=2", "train.micro_batch_size=1"]
    builder = RunBuilder(load([*WORDS, *words, "train.max_steps=1", "techniques.lora.enabled=false"]))
    _, data = builder.read()
    model, _ = builder.proven_model()
    objective, plan = builder.config.objective, data.training
    batches = [plan.batch(0, index) for index in range(plan.micro_batches(0))]
    found = builder.train_step(model, objective).backward(batches, objective.normalizer(plan, 0))

    student = AutoModelForCausalLM.from_pretrained(folder)
    teacher = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loss, kl, count = torch.zeros(()), 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        own = student(ids).logits[0, :-1]
        with torch.no_grad():
            other = teacher(ids).logits[0, :-1]
        p, q = (other / 2).log_softmax(-1), (own[:, :1024] / 2).log_softmax(-1)
        divergence = F.kl_div(q, p, reduction="sum", log_target=True)
        loss = loss + 0.75 * divergence + 0.25 * F.cross_entropy(own, ids[0, 1:], reduction="sum")
        kl, count = kl + divergence.item(), count + ids.shape[1] - 1
    (loss / count).backward()
    assert plan.supervised(0) % count == 0  # a short packed epoch repeats in the step
    assert found["loss"].item() == pytest.approx(loss.item() / count, rel=1e-5)
    assert found["kl"].item() == pytest.approx(kl / count, rel=1e-5)
    gradients = dict(model.model.named_parameters())
    for name, parameter in student.named_parameters():
        difference = (gradients[name].grad - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm(), name


@pytest.mark.parametrize("teacher", [TINY, TINY.parent / "tiny-orders"])
def test_quantized_teacher_is_plain_transformers_with_its_dequantized_weights(cwd, teacher):
    """An adapter is added to its base before the sum is quantized."""
    folder, texts = write_student(cwd / "student"), ["Anna lives in Oslo.", "A red lamp, please.", "Seven blue chairs"]
    write_jsonl(Path("rows.jsonl"), [{"text": text} for text in texts])
    words = [f"model.path={folder}", f"objective.teacher={teacher}", "objective.teacher_quantize=nf4"]
    words += ["train.max_steps=1", "train.global_batch_size=3", "train.micro_batch_size=1", "data.packing=false"]
    builder = RunBuilder(load([*WORDS, *words, "techniques.lora.enabled=false"]))
    _, data = builder.read()
    model, _ = builder.proven_model()
    objective, plan = builder.config.objective, data.training
    batches = [plan.batch(0, index) for index in range(plan.micro_batches(0))]
    found = builder.train_step(model, objective).backward(batches, objective.normalizer(plan, 0))["loss"].item()

    student, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    if teacher != TINY:
        plain = PeftModel.from_pretrained(plain, teacher).merge_and_unload()

    @torch.no_grad()
    def divergence() -> float:
        total, count = 0.0, 0
        for text in texts:
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
            p, q = (each(ids).logits[0, :-1].log_softmax(-1) for each in (plain, student))
            total, count = total + F.kl_div(q, p, reduction="sum", log_target=True).item(), count + ids.shape[1] - 1
        return total / count

    whole = divergence()
    for name, module in model.teacher.model.model.named_modules():
        if isinstance(module, PackedLinear):
            weight, made = plain.get_submodule(name).weight, dequantized(module)
            assert 0 < (made - weight).norm() < 0.15 * weight.norm()
            weight.data = made
    assert found == pytest.approx(divergence(), rel=1e-5)
    assert 1e-4 < abs(found / whole - 1) < 0.2


@pytest.mark.parametrize(
    "words",
    slow_but(
        [
            [*SMALL, LORA, "data.packing=true"],
            [*SMALL, LORA, "objective.teacher_quantize=nf4"],
            [*SMALL, LORA, "data.packing=false", "objective.divergence=jensen_shannon"],
            [*SMALL, "techniques.lora.enabled=false", "objective.divergence=reverse_kl"],
            [LORA, *BASE],
        ],
        [LORA, *BASE],
    ),
)
def test_verify_compares_the_loss_with_plain_transformers(cwd, words):
    """Also that the loss does not depend on micro-batches (trl#6478, #6452, #6006)."""
    write_chats(Path("rows.jsonl"))
    assert main(["verify", *WORDS, "--loss", "--json", "seen.json", *words]) == 0
    found = [each for each in json.loads(Path("seen.json").read_text())["loss"] if each["name"].startswith("fxtune")]
    assert len(found) >= 3
    assert max(max(each["loss_off"], each["gradient_off"]) for each in found) < 1e-5


@pytest.mark.parametrize(
    "words",
    slow_but([[*SMALL, "train.max_steps=12"], [LORA, *BASE, "optimizer.lr=1e-3"]], [*SMALL, "train.max_steps=12"]),
)
def test_student_learns_and_the_run_resumes_bit_for_bit(cwd, words):
    write_texts(Path("rows.jsonl"))
    words = [*WORDS, "data.eval_fraction=0.2", *words]
    assert main([*words, "run.dir=whole"]) == 0
    assert main([*words, "run.dir=paused", "train.pause_after=2"]) == 0
    assert main([*words, "run.dir=paused"]) == 0
    assert figures("paused", "loss", "kl", "text_loss") == figures("whole", "loss", "kl", "text_loss")
    assert same_export("whole", "paused")
    learned = figures("whole", "loss")
    assert learned[-1] < learned[0]
    result = json.loads(Path("whole/result.json").read_text())
    assert result["eval/kl"] > 0
    assert main(["eval", "whole"]) == 0


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(ranks, cwd):
    write_chats(Path("rows.jsonl"))
    words = [*WORDS, *SMALL, "train.log_every=1"]
    assert main([*words, "run.dir=alone"]) == 0
    assert ranks.run([*words, "run.dir=together"], cwd) == [0, 0]
    for one, other in zip(figures("alone", "loss", "kl"), figures("together", "loss", "kl"), strict=True):
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["objective.teacher=''"], ["objective.teacher", "base"]),
        (["objective.teacher=missing/folder"], ["objective.teacher", "missing/folder"]),
        (["objective.teacher=builtin:tiny-vision"], ["objective.teacher=builtin:tiny-vision", "tokens", "differ"]),
        (
            ["objective.teacher=base", "techniques.lora.enabled=true"],
            ["objective.teacher=base", "objective.text_weight"],
        ),
        ([*BASE, "techniques.lora.enabled=false"], ["objective.teacher=base", "no adapters"]),
        (["objective.divergence=jensen_shannon", "objective.teacher_share=1"], ["objective.teacher_share"]),
        (["objective.teacher_quantize=fp8"], ["objective.teacher_quantize: fp8", "GPU", "nf4 or int8"]),
        ([*BASE, LORA, "objective.teacher_quantize=nf4"], ["objective.teacher_quantize", "techniques.quantize"]),
    ],
)
def test_impossible_teachers_are_refused_before_weights_are_read(cwd, words, parts, capsys):
    write_texts(Path("rows.jsonl"))
    assert main([*WORDS, *words]) in (2, 6)  # 6: the hub cannot be reached
    said = " ".join(capsys.readouterr().err.split())
    assert all(part in said for part in parts), said
    assert "Building" not in said


def test_teacher_of_another_vocabulary_is_refused(cwd, capsys):
    write_texts(Path("rows.jsonl"))
    on_disk(Path("other"))
    assert main([*WORDS, *SMALL, "objective.teacher=other"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "objective.teacher=other" in said
    assert "same tokenizer" in said


def test_plan_counts_the_teacher(cwd):
    """plan counts the teacher's weights, in 16 or 4 bits, and its passes. The base as teacher adds passes and no weights."""
    write_texts(Path("rows.jsonl"))

    def planned(*words: str, given: list[str] = WORDS) -> dict:
        assert main(["plan", *given, LORA, *words, "--gpu", "H200", "--json", "plan.json"]) == 0
        return json.loads(Path("plan.json").read_text())

    with_teacher, with_base = planned(), planned(*BASE)
    alone = planned("objective=causal_lm", given=[word for word in WORDS if not word.startswith("objective")])
    weights = 2 * 2_623_232 / 2**30
    assert with_teacher["memory_gib"] - with_base["memory_gib"] > 0.9 * weights
    saved = with_teacher["memory_gib"] - planned("objective.teacher_quantize=nf4")["memory_gib"]
    assert saved == pytest.approx(0.9 * weights * (1 - 4.13 / 16), rel=0.1)  # nine tenths are weights of linears
    assert with_teacher["step_seconds"] > alone["step_seconds"]
    assert with_base["step_seconds"] > alone["step_seconds"]


@pytest.mark.parametrize("packing", slow_but([True, False], True))
def test_stored_tokens_are_the_live_teacher(cwd, packing, capsys):
    """All tokens stored give the live teacher's losses, but for float16. Few tokens with a tail give less: a KL over
    fewer outcomes is smaller. The numbers are computed once."""
    write_chats(Path("rows.jsonl"))
    words = [*WORDS, *SMALL, "data.eval_fraction=0.2", f"data.packing={packing}", "optimizer.lr=1e-3"]
    for name, stored in {"live": [], "all": ["objective.store=1024"], "few": ["objective.store=8"]}.items():
        assert main([*words, *stored, f"run.dir={name}"]) == 0
    live, every, few = ([kl for (kl,) in figures(name, "kl")] for name in ("live", "all", "few"))
    assert every == pytest.approx(live, rel=1e-3)
    assert all(0.3 * whole < part < whole for part, whole in zip(few, live, strict=True))
    capsys.readouterr()
    assert main([*words, "objective.store=8", "run.dir=again"]) == 0
    assert "likeliest tokens take" not in capsys.readouterr().out
    assert figures("again", "loss", "kl") == figures("few", "loss", "kl")
    assert main([*words, "objective.store=8", "objective.teacher_quantize=nf4", "run.dir=quantized"]) == 0
    assert "likeliest tokens take" in capsys.readouterr().out
    assert figures("quantized", "kl") != figures("few", "kl")
    assert main([*words, "objective.store=8", "objective.divergence=reverse_kl"]) == 2
    assert "objective.store=8" in capsys.readouterr().err
