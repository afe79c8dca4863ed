"""The reference in each step and stored, by the public command: the same losses, and never a stale file."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from support.cases import slow_but
from support.harness import SMALLER
from support.rows import numbered_chat, write_jsonl
from support.runs import figures, same_export

from fxtune.cli.evaluate import of_output
from fxtune.cli.main import main
from fxtune.errors import ConfigError

WORDS = [
    "objective=dpo",
    "data.sources=[{path: pairs.jsonl}]",
    "data.sequence_length=192",
    "data.cache_dir=cache",
    "data.eval_fraction=0.2",
    "model.init=random",
    f"model.architecture={SMALLER}",
    "techniques.lora.enabled=true",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.max_steps=4",
    "optimizer.lr=1e-2",
    "tracking.display=plain",
    "run.report=false",
    "run.device=cpu",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with pairs, and two finished runs on them: `base`, with the reference in each step, and `stored`."""
    home = tmp_path_factory.mktemp("finished")
    torch.set_num_threads(1)  # as in the tests, whose runs must have the same bits
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        write_pairs()
        for run in ("base", "stored"):
            train(run, f"objective.reference={run}")
    return home


@pytest.fixture(autouse=True)
def runs(cwd, finished):
    """A copy of `finished` is the working directory."""
    shutil.copytree(finished, cwd, dirs_exist_ok=True)


def write_pairs() -> None:
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
    return figures(run, "loss", "reward_margin", "grad_norm")


def stored() -> list[Path]:
    return sorted(Path("cache").rglob("reference-*.npy"))


def assert_alike(one: str, other: str) -> None:
    """Two runs have the same steps and the same evaluation."""
    for mine, theirs in zip(steps(one), steps(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    evaluated = [json.loads(Path(f"{run}/result.json").read_text())["eval/reward_margin"] for run in (one, other)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-4)


def test_stored_numbers_are_those_of_the_step():
    assert steps("base")[0][0] == pytest.approx(0.693147, abs=1e-6)
    assert_alike("base", "stored")
    assert len(stored()) == 1
    before = stored()[0].stat().st_mtime_ns
    assert train("again", "objective.reference=stored") == steps("stored")
    assert stored()[0].stat().st_mtime_ns == before


@pytest.mark.slow
def test_stored_numbers_are_those_of_the_step_without_packing():
    for run in ("base", "stored"):
        train(f"apart_{run}", f"objective.reference={run}", "data.packing=false")
    assert_alike("apart_base", "apart_stored")


def test_other_weights_or_cuts_never_read_a_stored_file():
    train("other_weights", "objective.reference=stored", "run.seed=1")
    assert steps("other_weights")[0][0] == pytest.approx(0.693147, abs=1e-6)
    train("other_cut", "objective.reference=stored", "data.on_long=drop")
    train("other_pairs_dropped", "objective.reference=stored", "data.on_long=drop", "data.packing=false")
    assert len(stored()) == 4


def test_damaged_file_is_computed_again():
    stored()[0].write_bytes(b"")
    assert train("second", "objective.reference=stored") == steps("stored")


def test_continued_adapter_is_its_own_reference(capsys):
    sft = "model.adapter=base/adapter"
    train("auto", sft, "train.max_steps=2")  # less than an epoch
    assert "reference: the model as it was at the start, in each step" in " ".join(capsys.readouterr().out.split())
    continued = train("continued", sft, "objective.reference=start")
    assert continued[0][0] == pytest.approx(0.693147, abs=1e-6)
    from_base = train("from_base", sft, "objective.reference=base", "train.max_steps=1")
    assert abs(from_base[0][0] - 0.693147) > 1e-3
    kept = train("kept", sft, "objective.reference=stored")
    for one, other in zip(continued, kept, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_base_is_refused_where_the_adapter_holds_a_part_of_it(capsys):
    assert main([*WORDS, "techniques.lora.init=pissa", "run.dir=refused", "objective.reference=base"]) == 2
    assert "objective.reference=start" in capsys.readouterr().err
    assert train("pissa", "techniques.lora.init=pissa", "objective.reference=start")[0][0] == pytest.approx(0.693147)


def test_full_fine_tuning_stores_and_its_export_without_its_start_names_the_checkpoints(capsys):
    full = "techniques.lora.enabled=false"
    assert main([*WORDS, full, "run.dir=refused", "objective.reference=base"]) == 2
    assert "objective.reference=stored" in capsys.readouterr().err
    assert train("full", full, "optimizer.lr=1e-3")[0][0] == pytest.approx(0.693147, abs=1e-6)
    assert len(stored()) == 2
    with pytest.raises(ConfigError, match="fxtune eval full/step-"):
        reward_margin("full")
    write_jsonl(Path("asked.jsonl"), [numbered_chat(0)])
    capsys.readouterr()
    asked = of_output("full", "data.questions.path=asked.jsonl", "data.questions.max_new_tokens=2")
    assert asked == {"questions/exact_match": 0.0}
    assert "fxtune eval full/step-" in capsys.readouterr().out
    wanted = json.loads(Path("full/result.json").read_text())["eval/reward_margin"]
    assert wanted > 0.01, "the trained model is not its own reference"
    assert reward_margin("full/checkpoints/step-00000004") == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("reference", slow_but(["base", "stored"], "stored"))
def test_run_resumes_bit_for_bit(reference):
    word = f"objective.reference={reference}"
    train("paused", word, "train.pause_after=2")
    for file in stored():
        file.unlink()  # computed again from the start's weights, not from the checkpoint's
    assert train("paused", word) == steps(reference)
    assert same_export(reference, "paused")


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["base", "stored"])
def test_two_ranks_learn_what_one_process_learns(ranks, cwd, reference):
    words = [*WORDS, f"objective.reference={reference}", "data.cache_dir=other", "run.dir=together"]
    assert ranks.run(words, cwd) == [0, 0]
    for one, other in zip(steps(reference), steps("together"), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def reward_margin(output: str) -> float:
    return of_output(output)["eval/reward_margin"]


@pytest.mark.parametrize("word", slow_but(["", "techniques.lora.init=pissa", "model.adapter=base/adapter"], ""))
def test_evaluation_of_an_export_compares_with_the_start_of_its_run(word):
    run = "run" if word else "base"
    if word:
        train(run, word)
    wanted = json.loads(Path(f"{run}/result.json").read_text())["eval/reward_margin"]
    assert wanted > 0.1
    for output in (run, f"{run}/adapter", f"{run}/checkpoints/step-00000004"):
        assert reward_margin(output) == pytest.approx(wanted, rel=1e-4)


def test_evaluation_never_compares_with_a_base_without_its_factored_part(capsys):
    train("pissa", "techniques.lora.init=pissa", "train.max_steps=1")
    words = [*WORDS, "techniques.lora.init=pissa", "model.adapter=pissa/adapter"]
    assert main(["eval", *words]) == 2
    assert "fxtune eval RUN" in capsys.readouterr().err
