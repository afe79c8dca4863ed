"""Which special tokens end answers in tokenized data, and which question is tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import families, processors
from transformers import AutoTokenizer

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.tokenized import ends
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.models.kinds.image_decoder.families import concatenated
from fxtune.system.files.hub import locate

START, END = 1, 2
"""`<|im_start|>` and `<|im_end|>` of the built-in tokenizer, whose end of text is `<|im_end|>`."""


@pytest.fixture
def table(tmp_path):
    """A function that tokenizes rows."""
    tokenizer = AutoTokenizer.from_pretrained(locate("builtin:tiny").folder)

    def build(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(cache_dir=str(tmp_path / "cache"))
        return tokenize(SourceConfig(path=str(file)), data, tokenizer, progress=False), tokenizer

    return build


def row(ids: list[int], learned: list[int]) -> dict:
    return {"input_ids": ids, "labels": [one if keep else -100 for one, keep in zip(ids, learned, strict=True)]}


@pytest.mark.parametrize("block", [1, 3, 1 << 24])
def test_only_special_tokens_that_end_a_supervised_run_count(table, monkeypatch, block):
    monkeypatch.setattr(ends, "BLOCK", block)
    built, tokenizer = table(row([5, 6, START, 7], [0, 1, 1, 1]), row([START, 8, END, 9], [0, 1, 1, 0]))
    assert ends.learned_ends([built], tokenizer) == [END]
    built, tokenizer = table(row([5, 6, 7], [0, 1, 1]), row([START, 8, 9], [0, 0, 1]))
    assert ends.learned_ends([built], tokenizer) == []


@pytest.mark.parametrize("block", [2, 1 << 24])
def test_the_end_of_a_document_ends_a_run(table, monkeypatch, block):
    monkeypatch.setattr(ends, "BLOCK", block)
    built, tokenizer = table(row([5, 0], [1, 1]), row([6, 7, 8], [1, 1, 1]))
    assert ends.learned_ends([built], tokenizer) == [0]


@pytest.mark.parametrize(
    ("family", "end"), [("kimi", "<|end_of_msg|>"), ("command", "<|END_OF_TURN_TOKEN|>"), ("glm", "<|user|>")]
)
def test_a_turn_with_several_special_tokens_has_one_end(tmp_path, family, end):
    tokenizer, file = families.tokenizer(family), tmp_path / "rows.jsonl"
    chat = [
        {"role": "user", "content": "2 and 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"},
    ]
    file.write_text(json.dumps({"messages": chat}))
    source = SourceConfig(path=str(file), unused=["reasoning_content"])
    built = tokenize(source, DataConfig(cache_dir=str(tmp_path / "cache")), tokenizer, progress=False)
    assert tokenizer.convert_ids_to_tokens(ends.learned_ends([built], tokenizer)) == [end]


def test_the_shortest_question_that_ends_is_tried(table):
    built, _ = table(row([5, 6, 7, 8, END], [0, 0, 0, 1, 1]), row([5, 9, END], [0, 1, 1]), row([4, 9], [0, 1]))
    assert ends.short_question([built], [END]) == ends.ShortQuestion([5], 2)
    assert ends.short_question([built], []) is None
    built, _ = table(row([5, END], [1, 1]))
    assert ends.short_question([built], [END]) is None, "an answer without a question"


def test_a_question_comes_with_the_images_of_its_prompt(tmp_path):
    words, path = processors.tokenizer("llava"), processors.write_picture_rows(tmp_path / "pictures", 3)
    rows = path.read_text().splitlines()
    path.write_text(f"{rows[2]}\n")
    images = ImageProcessor(processors.processor("llava", tmp_path / "model"), concatenated)
    config = DataConfig(cache_dir=str(tmp_path / "cache"))
    built = tokenize(SourceConfig(path=str(path)), config, words, progress=False, images=images)
    question = ends.short_question([built], [words.eos_token_id])
    assert [Path(image.name).name for image in question.images] == json.loads(rows[2])["images"]
    assert images.read(question.images)["pixel_values"].shape == (2, 3, 28, 28)
