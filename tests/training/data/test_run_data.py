"""Preview, plan and the run have the same steps and refuse the same rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import slow_but
from support.rows import write_jsonl

from fxtune.cli import preview
from fxtune.config import compose
from fxtune.errors import UserError
from fxtune.estimate.machines import machine
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast.run_forecast import forecast_run, with_lengths

SMALL = (
    "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2}"
)
WORDS = [
    "model.init=random",
    f"model.architecture={SMALL}",
    "data.sources=[{path: rows.jsonl}]",
    "data.cache_dir=cache",
    "data.sequence_length=96",
    "techniques=lora",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
]


def texts(number: int, **more) -> dict:
    return {"prompt": f"Which number is {number}? ", "chosen": "four " * (number % 7 + 1), "rejected": "five", **more}


def judged(number: int, good: bool) -> dict:
    return {"prompt": f"Which number is {number}? ", "completion": "four " * (number % 7 + 1), "label": int(good)}


ROWS = {
    "chat": [{"prompt": row["prompt"], "completion": row["chosen"]} for row in map(texts, range(17))],
    "pairs": [texts(number) for number in range(17)],
    "judged": [judged(number, number % 2 == 0) for number in range(17)],
    "good": [judged(number, True) for number in range(17)],
    "scored": [texts(number, score_chosen=number, score_rejected=5) for number in range(17)],
}


def in_preview(words: list[str]) -> int | str:
    page = preview.run(compose.load(words))
    refused = [note for note in page["notes"] if note.startswith("A run is refused: ")]
    return refused[0].removeprefix("A run is refused: ") if refused else page["summary"]["steps"]


def in_plan(words: list[str]) -> int | str:
    config, card = compose.load(words), machine("cpu", 64.0, None)
    try:
        config, lengths = with_lengths(config, card, None)
        return forecast_run(config, card, 1, lengths).steps
    except UserError as error:
        return str(error)


def in_run(words: list[str]) -> int | str:
    try:
        return RunBuilder(compose.load(words)).read()[1].training.steps
    except UserError as error:
        return str(error)


STEPS = [
    ("chat", ["data.packing=false", "train.epochs=1.3"]),
    ("chat", ["data.packing=false", "train.batch_ramp=[[0.5, 8]]", "train.epochs=2"]),
    ("chat", ["data.packing=true", "data.length_schedule=[[0.0, 48], [0.5, 96]]", "train.epochs=3"]),
    ("chat", ["train.max_steps=3"]),
    ("pairs", ["objective=dpo", "data.packing=false"]),
    ("pairs", ["objective=dpo", "data.packing=true", "data.eval_fraction=0.3"]),
    ("judged", ["objective=kto", "data.packing=true"]),
    ("judged", ["objective=kto", "data.packing=false", "data.on_long=truncate"]),
]


@pytest.mark.parametrize(
    ("kind", "words"),
    slow_but(STEPS, *STEPS[1::3]),
)
def test_steps_are_the_same(cwd, kind, words):
    write_jsonl(Path("rows.jsonl"), ROWS[kind])
    found = [steps([*WORDS, *words]) for steps in (in_preview, in_plan, in_run)]
    assert isinstance(found[0], int)
    assert found == found[:1] * 3


REFUSED = [
    ("good", ["objective=kto"], "all answers are good"),
    ("pairs", ["objective=kto"], "its rows are preferences"),
    ("judged", ["objective=dpo"], "Set objective=kto"),
    ("pairs", ["objective=reward", "objective.margin=true"], "objective.margin: no pair has a `margin`"),
    ("pairs", ["objective=dpo", "data.packing=false", "data.share_prompts=true"], "data.share_prompts: true, but"),
    (
        "pairs",
        ["objective=dpo", "techniques.lora.enabled=false", "objective.reference=start"],
        "no adapters to switch off",
    ),
    ("pairs", ["objective=dpo", "techniques.lora.init=pissa", "objective.reference=base"], "a part of the base"),
]


@pytest.mark.parametrize(("kind", "words", "reason"), slow_but(REFUSED, REFUSED[0], REFUSED[-1]))
def test_refusals_are_the_same(cwd, kind, words, reason):
    write_jsonl(Path("rows.jsonl"), ROWS[kind])
    found = [refused([*WORDS, *words]) for refused in (in_preview, in_plan, in_run)]
    assert reason in str(found[0])
    assert found == found[:1] * 3


def test_only_what_is_left_to_train_on_counts_as_good_and_bad(cwd):
    rows = [judged(number, good=number % 2 == 0) for number in range(60)]
    write_jsonl(Path("rows.jsonl"), rows)
    words = [*WORDS, "objective=kto", "data.eval_fraction=0.2"]
    plan = RunBuilder(compose.load(words)).read()[1].evaluation
    # Each answer is followed by its mismatched twin.
    held_out = {document // 2 for step in range(plan.steps) for _, document in plan.documents(step, 0)}
    rows = [{**row, "label": number in held_out} for number, row in enumerate(rows)]
    write_jsonl(Path("rows.jsonl"), rows)
    found = [refused(words) for refused in (in_preview, in_plan, in_run)]
    assert "answers to train on are bad by their `label`" in str(found[0])
    assert found == found[:1] * 3


def test_low_margins_contradictions_and_few_good_answers_are_counted(cwd):
    write_jsonl(Path("rows.jsonl"), ROWS["scored"])
    words = [*WORDS, "objective=reward", "objective.margin=true"]
    notes = preview.run(compose.load(words))["notes"]
    assert any("6 of 17 pairs have a margin of 0 or below" in note for note in notes)
    turned = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS["pairs"][:3]]
    write_jsonl(Path("rows.jsonl"), [*ROWS["pairs"], *turned])
    notes = preview.run(compose.load([*WORDS, "objective=dpo"]))["notes"]
    assert any("6 of 20 pairs contradict others" in note for note in notes)
    write_jsonl(Path("rows.jsonl"), [judged(number, number == 0) for number in range(17)])
    notes = preview.run(compose.load([*WORDS, "objective=kto"]))["notes"]
    assert any("objective.desirable_weight=16" in note for note in notes)


@pytest.mark.parametrize("source", ["data.eval_fraction=0.3", "data.eval_sources=[{path: held_out.jsonl}]"])
def test_held_out_rows_are_counted_without_rows_that_are_too_long(cwd, source):
    def chat(number: int, words: int) -> dict:
        turns = zip(("user", "assistant"), (f"Which number is {number}? " * words, "four"), strict=True)
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    for name in ("rows.jsonl", "held_out.jsonl"):
        write_jsonl(
            Path(name), [chat(number + 100 * (name != "rows.jsonl"), 40 * (number > 7) + 1) for number in range(20)]
        )
    words = [*WORDS, "data.packing=false", source]
    found = RunBuilder(compose.load(words)).read()[1].evaluation
    (note,) = [line for line in preview.run(compose.load(words))["notes"] if line.startswith("held out")]
    assert f"held out for evaluation: {len(found.stream.segments)} documents" in note
    assert ("12 longer than" in note) == ("eval_sources" in source)
