"""The model card: what made the model, and code and commands that work."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from support import processors
from support.architectures import (
    SIZES,
    built,
    facts_of,
    logits,
    lora,
    prepared_model,
    tiny_model,
    trained,
)

from fxtune.cli.main import main
from fxtune.data.config import DataConfig, ImageTokensConfig, QuestionsConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.export.save import save_model
from fxtune.models.load import DType, ModelConfig, load_tokenizer
from fxtune.models.prepared import PreparedModel
from fxtune.settle.images import image_processor
from fxtune.training.answers import load_questions


def test_card_names_origin_and_its_loading_code_runs(base, tmp_path):
    model = ModelConfig(path=str(base))
    pipeline = lora()
    pipeline.rope.enabled, pipeline.rope.factor = True, 2.0
    adapter = save_model(
        trained(prepared_model(pipeline, model)),
        load_tokenizer(model),
        tmp_path / "adapter",
        card={
            "config": {
                "run": {"name": "<b>|[mine](x)", "seed": 7},
                "data": {"chat_template_kwargs": {"enable_thinking": False}},
            },
            "data": "abc123",
            "figures": {"eval/loss": 0.5},
            "machine": facts_of(model),
        },
    )
    card = (adapter / "README.md").read_text()
    for part in (
        "library_name: peft",
        str(base),
        r"| run | \<b\>\|\[mine\](x) |",
        "apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False)",
        "| seed | 7 |",
        "abc123",
        "| eval/loss | 0.5 |",
        "| transformers |",
    ):
        assert part in card
    assert "base_model:" not in card, "a local path is not a hub id"
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f"folder = {str(adapter)!r}")
    names: dict = {}
    exec(code, names)  # the card's own lines, as a reader would run them
    assert torch.equal(
        logits(names["model"]), logits(built(pipeline, ModelConfig(path=str(base), adapter=str(adapter))))
    )
    assert names["model"].config.max_position_embeddings == 2 * SIZES["max_position_embeddings"]


def _codes(card: str) -> list[str]:
    """The blocks of Python in a card."""
    return [block.split("```")[0] for block in card.split("```python\n")[1:]]


def _vision(tmp_path, family: str, **options) -> tuple[ModelConfig, PreparedModel]:
    """A tiny vision model in a folder, and the model with trained adapters."""
    model = ModelConfig(path=str(processors.write_model(family, tmp_path / "base")), dtype=DType.float32)
    prepared = prepared_model(lora(**options), model, dtype="float32")
    trained(prepared.module)
    return model, prepared


def test_the_code_for_an_image_runs(tmp_path, monkeypatch, capsys):
    model, prepared = _vision(tmp_path, "llava")
    tokenizer = load_tokenizer(model)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "picture.png")
    adapter = save_model(prepared, tokenizer, tmp_path / "adapter")
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    answers = []
    for folder in (adapter, tmp_path / "merged"):
        names: dict = {}
        for code in _codes((folder / "README.md").read_text()):
            exec(code.replace('folder = "."', f"folder = {str(folder)!r}"), names)
        answers.append((names["written"].tolist(), capsys.readouterr().out))
    assert answers[0] == answers[1]
    data = DataConfig(questions=QuestionsConfig(path=str(tmp_path / "q.jsonl")))
    turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "red"}]
    (tmp_path / "q.jsonl").write_text(json.dumps({"messages": turns, "images": ["picture.png"]}))
    (question,) = load_questions(data, tokenizer, image_processor(model, data, tokenizer))
    assert answers[0][0][0][: len(question.prompt)] == question.prompt, "other tokens than in training"


def test_bounds_of_images_are_in_the_code(tmp_path):
    model, prepared = _vision(tmp_path, "qwen2_5_vl")
    tokenizer = load_tokenizer(model)
    card = {"config": {"data": {"image_tokens": {"min": None, "max": 9}}}}
    code = _codes((save_model(prepared, tokenizer, tmp_path / "adapter", card) / "README.md").read_text())[1]
    made = image_processor(model, DataConfig(), tokenizer)
    bounded = image_processor(model, DataConfig(image_tokens=ImageTokensConfig(max=9)), tokenizer)
    assert len(processors.image_ids(made, 600, 800)) > 9
    lines = code.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("side = "))
    exec("\n".join(lines[begin : begin + 3]), {"processor": made.processor})
    made = ImageProcessor(made.processor, made.merge)
    assert processors.image_ids(made, 600, 800) == processors.image_ids(bounded, 600, 800)


@pytest.mark.parametrize("vision", [False, True])
def test_the_card_says_what_vllm_does_with_the_parts_for_images(tmp_path, vision):
    model, prepared = _vision(tmp_path, "llava", vision=vision)
    card = (save_model(prepared, load_tokenizer(model), tmp_path / "adapter") / "README.md").read_text()
    assert "Loads in vLLM: yes" in card
    assert ("--enable-tower-connector-lora" in card) == vision
    assert "language model only" in card
    assert "text-only class" in card


@pytest.mark.parametrize(
    ("targets", "named", "unnamed"),
    [(["all-linear"], [], ["sglang#"]), (["q_proj", "in_proj_ba"], ["`in_proj_ba`", "sglang#30499"], ["vllm#"])],
)
def test_card_and_a_line_say_what_servers_do_with_adapters_of_linear_attention(
    targets, named, unnamed, tmp_path, capsys
):
    prepared = prepared_model(lora(target_modules=targets), tiny_model("qwen3_next"), packing=False)
    line = capsys.readouterr().out
    card = save_model(prepared, load_tokenizer(ModelConfig()), tmp_path / "adapter") / "README.md"
    for part in named:
        assert part in card.read_text()
    assert not [part for part in unnamed if part in card.read_text()]
    assert ("sglang#30499" in line) == bool(named)
