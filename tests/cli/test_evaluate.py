"""What a user sees of `fxtune eval`: for an adapter the figures of its run, for a base those before training."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import prepared_model, trained
from support.processors import write_model, write_picture_rows
from support.runs import history

from fxtune.cli import evaluate
from fxtune.data.config import OnOverlap, QuestionsConfig, SourceConfig
from fxtune.errors import ConfigError, NumbersError
from fxtune.export.save import save_model
from fxtune.models import load as models
from fxtune.training import trainer


def test_the_figures_are_those_of_the_run(small, cwd, capsys):
    small.data.eval_fraction = 0.2
    small.data.questions = QuestionsConfig(path=small.data.sources[0].path, limit=6, max_new_tokens=4, show=1)
    small.data.on_overlap = OnOverlap.keep
    small.run.dir = str(cwd / "run")
    small.train.max_steps = 2
    trainer.run(small)
    lines = history(cwd / "run")
    loss = next(line["eval/loss"] for line in lines if "eval/loss" in line)
    before, after = (line["questions/exact_match"] for line in lines if "questions/exact_match" in line)
    ran = sorted(cwd.rglob("*"))

    base = evaluate.run(small)
    tuned = evaluate.run(replace(small, model=replace(small.model, adapter=str(cwd / "run" / "adapter"))))
    assert tuned["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert (base["questions/exact_match"], tuned["questions/exact_match"]) == (before, after)
    assert base["eval/loss"] > tuned["eval/loss"]
    assert f"{tuned['eval/loss']:.4f}" in capsys.readouterr().out
    assert [file for file in sorted(cwd.rglob("*")) if file not in ran] == [], "an evaluation writes nothing"


def test_answers_about_images_are_those_of_the_run(small, cwd, capsys):
    model, rows = write_model("qwen2_5_vl", cwd / "model"), write_picture_rows(cwd / "pictures", 9)
    small.model, small.data.sequence_length = models.ModelConfig(path=str(model)), 128
    small.data.sources = [SourceConfig(path=str(rows))]
    small.data.questions = QuestionsConfig(path=str(rows), max_new_tokens=4)
    small.data.on_overlap, small.data.eval_fraction = OnOverlap.keep, 0.0
    small.run.dir, small.train.max_steps = str(cwd / "run"), 1
    trainer.run(small)
    answers = [json.loads(line) for line in (cwd / "run" / "answers_before.jsonl").read_text().splitlines()]
    asked = [json.loads(line) for line in rows.read_text().splitlines()]
    for row, given in list(zip(asked, answers, strict=True))[::3]:
        row["messages"][-1]["content"] = given["answer"]
    (cwd / "pictures" / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    small.data.questions.path = str(cwd / "pictures" / "asked.jsonl")
    capsys.readouterr()
    assert evaluate.run(small)["questions/exact_match"] == pytest.approx(1 / 3)
    assert f"[{asked[1]['images'][0]}] What is 1?" in capsys.readouterr().out


def with_adapter(small, cwd, **changes):
    """`small` with an adapter of its own recipe, whose adapter_config.json has `changes`."""
    small.data.eval_fraction = 0.2
    small.techniques.lora.r, small.techniques.lora.target_modules = 4, ["q_proj", "v_proj"]
    adapter = save_model(
        trained(prepared_model(small.techniques, small.model)), models.load_tokenizer(small.model), cwd / "adapter"
    )
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (adapter / "proof.json").unlink()  # the adapter is another one now, on purpose
    return replace(small, model=replace(small.model, adapter=str(adapter)))


def test_a_loss_that_is_not_finite_is_an_error(small, cwd, capsys):
    config = with_adapter(small, cwd)
    weights = cwd / "adapter" / "adapter_model.safetensors"
    save_file({name: torch.full_like(tensor, 1e30) for name, tensor in load_file(weights).items()}, weights)
    with pytest.raises(NumbersError, match=r"/adapter is nan"):
        evaluate.run(config)
    assert "nan" in capsys.readouterr().out, "the table is printed, too"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alora_invocation_tokens": [1, 2]}, r"alora_invocation_tokens: \[1, 2\]"),
        ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern: {} in the recipe, {'q_proj': 8}"),
        ({"lora_bias": True, "bias": "all"}, "bias: all\n  lora_bias: True"),
        ({"peft_type": "IA3"}, "it is a IA3 adapter"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_adapter_with_options_that_no_recipe_has_is_refused(changes, message, small, cwd):
    config = with_adapter(small, cwd, **changes)
    with pytest.raises(ConfigError, match=message):
        evaluate.run(config)


def test_options_that_change_nothing_are_accepted(small, cwd):
    config = with_adapter(
        small,
        cwd,
        bias="none",
        layers_to_transform=None,
        rank_pattern={},
        exclude_modules=[],
        lora_dropout=0.5,
        base_model_name_or_path="moved/since",
        some_new_key=False,
        init_lora_weights="gaussian",
    )
    assert evaluate.run(config)["eval/loss"] > 0


@pytest.mark.parametrize(("base", "noted"), [("some/other-model", True), ("/moved/since/tiny", False)])
def test_an_adapter_of_another_base_of_the_same_shapes_is_noted(base, noted, small, cwd, capsys):
    config = with_adapter(small, cwd, base_model_name_or_path=base)
    evaluate.run(config)
    assert (f"was trained on {base}; here it is over " in capsys.readouterr().out) == noted


def test_without_held_out_data_there_is_nothing_to_evaluate(small, cwd):
    with pytest.raises(ConfigError, match=r"eval_sources.*eval_fraction.*questions"):
        evaluate.run(small)


def test_shipped_questions_are_asked_of_shipped_data_only(small, cwd, capsys):
    small.data.questions = QuestionsConfig(path="builtin:quickstart_test")
    with pytest.raises(ConfigError, match="no questions are asked"):
        evaluate.run(small)
    small.data.eval_fraction = 0.2
    assert not [name for name in evaluate.run(small) if name.startswith("questions/")]
    assert "no questions are asked" in capsys.readouterr().out


@pytest.mark.slow
def test_a_quantized_base_is_evaluated_as_stored(small, cwd):
    small.data.eval_fraction = 0.2
    full = evaluate.run(small)["eval/loss"]
    small.techniques.quantize.enabled = True
    found = evaluate.run(small)["eval/loss"]
    assert found != full
    assert found == pytest.approx(full, rel=0.02)
