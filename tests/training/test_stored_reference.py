"""The reference in each step and stored, by the public command: the same losses, and never a stale file."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.rows import write_jsonl
from support.runs import history

from fxtune.cli.evaluate import of_output
from fxtune.cli.main import main
from fxtune.errors import ConfigError

ARCHITECTURE = (
    "{hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "head_dim: 16}"
)
WORDS = [
    "objective=dpo",
    "data.sources=[{path: pairs.jsonl}]",
    "data.sequence_length=192",
    "data.cache_dir=cache",
    "data.eval_fraction=0.2",
    "model.init=random",
    f"model.architecture={ARCHITECTURE}",
    "techniques.lora.enabled=true",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.max_steps=4",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]


@pytest.fixture(autouse=True)
def rows(cwd):
    draw, rows = random.Random(0), []
    for number in range(48):
        turns = [{"role": "user", "content": f"Which number is {number}?"}]
        answers = ["It is " + "very " * draw.randint(0, 5) + "fine.", "Ask " * draw.randint(1, 4) + "me."]
        documents = [{"messages": [*turns, {"role": "assistant", "content": answer}]} for answer in answers]
        rows.append({"documents": documents})
    write_jsonl(Path("pairs.jsonl"), rows)


def train(run: str, *words: str) -> list[tuple[float, ...]]:
    """The losses, margins and gradient norms of a run."""
    assert main([*WORDS, f"run.dir={run}", *words]) == 0
    return steps(run)


def steps(run: str) -> list[tuple[float, ...]]:
    lines = [line for line in history(Path(run)) if "train/loss" in line]
    return [(line["train/loss"], line["train/reward_margin"], line["train/grad_norm"]) for line in lines]


def stored() -> list[Path]:
    return sorted(Path("cache").rglob("reference-*.npy"))


@pytest.mark.parametrize("packing", [True, False])
def test_stored_numbers_are_those_of_the_step(packing):
    words = [f"data.packing={packing}"]
    in_step = train("in_step", "objective.reference=base", *words)
    assert in_step[0][0] == pytest.approx(0.693147, abs=1e-6)
    assert not stored()
    found = train("stored", "objective.reference=stored", *words)
    for one, other in zip(in_step, found, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    evaluated = [
        json.loads(Path(f"{run}/result.json").read_text())["eval/reward_margin"] for run in ("in_step", "stored")
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-4)
    assert len(stored()) == 1
    before = stored()[0].stat().st_mtime_ns
    assert train("again", "objective.reference=stored", *words) == found
    assert stored()[0].stat().st_mtime_ns == before


def test_other_weights_or_cuts_never_read_a_stored_file():
    train("first", "objective.reference=stored")
    train("other_weights", "objective.reference=stored", "run.seed=1")
    assert steps("other_weights")[0][0] == pytest.approx(0.693147, abs=1e-6)
    train("other_cut", "objective.reference=stored", "data.on_long=drop")
    train("other_pairs_dropped", "objective.reference=stored", "data.on_long=drop", "data.packing=false")
    assert len(stored()) == 4


def test_damaged_file_is_computed_again():
    found = train("first", "objective.reference=stored")
    stored()[0].write_bytes(b"")
    assert train("second", "objective.reference=stored") == found


def test_continued_adapter_is_its_own_reference(capsys):
    train("sft", "objective.reference=base")
    capsys.readouterr()
    train("auto", "model.adapter=sft/adapter", "train.max_steps=2")  # less than an epoch
    assert "reference: the model as it was at the start, in each step" in " ".join(capsys.readouterr().out.split())
    continued = train("continued", "model.adapter=sft/adapter", "objective.reference=start")
    assert continued[0][0] == pytest.approx(0.693147, abs=1e-6)
    from_base = train("from_base", "model.adapter=sft/adapter", "objective.reference=base")
    assert abs(from_base[0][0] - 0.693147) > 1e-3
    kept = train("kept", "model.adapter=sft/adapter", "objective.reference=stored")
    for one, other in zip(continued, kept, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_base_is_refused_where_the_adapter_holds_a_part_of_it(capsys):
    assert main([*WORDS, "techniques.lora.init=pissa", "run.dir=refused", "objective.reference=base"]) == 2
    assert "objective.reference=start" in capsys.readouterr().err
    assert train("pissa", "techniques.lora.init=pissa", "objective.reference=start")[0][0] == pytest.approx(0.693147)


def test_full_fine_tuning_stores(capsys):
    full = "techniques.lora.enabled=false"
    assert main([*WORDS, full, "run.dir=refused", "objective.reference=base"]) == 2
    assert "objective.reference=stored" in capsys.readouterr().err
    assert train("full", full, "optimizer.lr=1e-3")[0][0] == pytest.approx(0.693147, abs=1e-6)
    assert len(stored()) == 1


@pytest.mark.parametrize("reference", ["base", "stored"])
def test_run_resumes_bit_for_bit(reference):
    word = f"objective.reference={reference}"
    train("whole", word)
    train("paused", word, "train.pause_after=2")
    for file in stored():
        file.unlink()  # computed again from the start's weights, not from the checkpoint's
    assert train("paused", word) == steps("whole")
    one, other = (load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("whole", "paused"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", "stored"])
def test_two_ranks_learn_what_one_process_learns(ranks, cwd, reference):
    word = f"objective.reference={reference}"
    alone = train("alone", word)
    assert ranks.run([*WORDS, word, "data.cache_dir=other", "run.dir=together"], cwd) == [0, 0]
    for one, other in zip(alone, steps("together"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def reward_margin(output: str) -> float:
    return of_output(output)["eval/reward_margin"]


@pytest.mark.parametrize("word", ["", "techniques.lora.init=pissa", "model.adapter=sft/adapter"])
def test_evaluation_of_an_export_compares_with_the_start_of_its_run(word):
    if "sft" in word:
        train("sft", "train.max_steps=1")
    train("run", *filter(None, [word]))
    wanted = json.loads(Path("run/result.json").read_text())["eval/reward_margin"]
    assert wanted > 0.1
    for output in ("run", "run/adapter", "run/checkpoints/step-00000004"):
        assert reward_margin(output) == pytest.approx(wanted, rel=1e-4)


def test_evaluation_never_compares_with_a_base_without_its_factored_part(capsys):
    train("pissa", "techniques.lora.init=pissa", "train.max_steps=1")
    words = [*WORDS, "techniques.lora.init=pissa", "model.adapter=pissa/adapter"]
    assert main(["eval", *words]) == 2
    assert "fxtune eval RUN" in capsys.readouterr().err


def test_evaluation_of_an_export_without_its_start_names_the_checkpoints():
    train("full", "techniques.lora.enabled=false", "optimizer.lr=1e-3")
    with pytest.raises(ConfigError, match="fxtune eval full/step-"):
        reward_margin("full")
    wanted = json.loads(Path("full/result.json").read_text())["eval/reward_margin"]
    assert wanted > 0.01, "the trained model is not its own reference"
    assert reward_margin("full/checkpoints/step-00000004") == pytest.approx(wanted, rel=1e-4)
