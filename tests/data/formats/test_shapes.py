"""The commonest published shapes of rows are read from files as they are, and other shapes are named with their rewrite.

Each row here is our own, in the shape of a published format.
"""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.families import tokenizer
from support.processors import processor
from support.rows import values, write_jsonl

from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.config import SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.read.row import file_and_place
from fxtune.data.read.sources import open_source
from fxtune.errors import DataError
from fxtune.models.kinds.image_decoder.families import concatenated


def _png() -> bytes:
    file = BytesIO()
    Image.effect_noise((28, 28), 90).save(file, "PNG")
    return file.getvalue()


PNG = _png()
BASE64 = base64.b64encode(PNG).decode()
WRAPPED = base64.encodebytes(PNG).decode()
"""In lines of 76 characters, as MIME has it."""
USER, MODEL = {"role": "user", "content": "Add 2 and 2."}, {"role": "assistant", "content": "It is 4."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
SUM = f"{CALL}<|im_end|>", "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
THOUGHT = "<think>\nTwo twice.\n</think>\n\nIt is 4.<|im_end|>"
SEEN = "<|image|>What is it?", "red<|im_end|>"

# {name: (a row, or several, part of the prompt, what is learned)}. An image is written as <|image|>.
IMAGES: dict[str, Any] = {
    "vqa": ({"image": "a.png", "question": "What is it?", "answer": "red"}, *SEEN),
    "vqa with answers": ({"image": "a.png", "question": "What is it?", "answers": ["rose", "red", "red"],
     "question_id": 4}, *SEEN),
    "vqa with answers of annotators": ({"image": "a.png", "question": "What is it?", "multiple_choice_answer": "red",
     "answers": [{"answer": answer, "answer_confidence": "yes", "answer_id": 1} for answer in ("red", "rose")]},
     *SEEN),
    "prompt and response": ({"image": "a.png", "prompt": "What is it?", "response": "red"}, *SEEN),
    "a mark in the question": ({"image": "a.png", "question": "What <image> is it?", "answer": "red"},
     "What <|image|> is it?", SEEN[1]),
    "captions": ({"image": "a.png", "text": "A red field."}, "user\n<|image|>", "A red field.<|im_end|>"),
    "imagefolder captions": ({"file_name": "a.png", "text": "A red field."}, "user\n<|image|>",
     "A red field.<|im_end|>"),
    "imagefolder questions": ({"file_name": "a.png", "question": "What is it?", "answer": "red"}, *SEEN),
    "rlaif-v": ({"question": "What is it?", "chosen": "red", "rejected": "blue", "image": "a.png",
     "image_path": "x/a.png", "ds_name": "own", "origin_dataset": "own", "origin_split": "{}", "idx": 1}, SEEN[0],
     "red<|im_end|>", "blue<|im_end|>"),
    "judged": ({"image": "a.png", "prompt": "What is it?", "completion": "red", "label": "true"}, *SEEN),
    "llava": ({"id": "1", "image": "a.png", "conversations": [{"from": "human", "value": "<image>What is it?"},
     {"from": "gpt", "value": "red"}]}, *SEEN),
    "gemini": ({"contents": [{"role": "user", "parts": [{"inlineData": {"mimeType": "image/png", "data": BASE64}},
     {"text": "What is it?"}]}, {"role": "model", "parts": [{"text": "red"}]}]}, *SEEN),
    "anthropic": ({"messages": [{"role": "user", "content": [{"type": "image",
     "source": {"type": "base64", "media_type": "image/png", "data": WRAPPED}},
     {"type": "text", "text": "What is it?"}]}, {"role": "assistant",
     "content": [{"type": "text", "text": "red"}]}]}, *SEEN),
    "responses": ({"input": [{"role": "user", "content": [{"type": "input_image",
     "image_url": f"data:image/png;base64,{BASE64}"}, {"type": "input_text", "text": "What is it?"}]},
     {"type": "message", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "red", "annotations": []}]}]}, *SEEN),
    "wrapped base64 alone": ({"image": WRAPPED, "question": "What is it?", "answer": "red"}, *SEEN),
}  # fmt: skip
TEXTS: dict[str, Any] = {
    "gemini": ({"systemInstruction": {"parts": [{"text": "Be short."}]},
     "tools": [{"functionDeclarations": [{"name": "add", "description": "adds", "parameters": SCHEMA}]}],
     "contents": [{"role": "user", "parts": [{"text": "Add 2 and 2."}]},
     {"role": "model", "parts": [{"functionCall": {"name": "add", "args": {"a": 2}}}]},
     {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"sum": 4}}}]},
     {"role": "model", "parts": [{"text": "It is 4."}]}]}, '<tool_response>\n{"sum": 4}', *SUM),
    "gemini's thoughts": ({"contents": [{"role": "user", "parts": [{"text": "Add."}]},
     {"role": "model", "parts": [{"text": "Two twice.", "thought": True}, {"text": "It is 4."}]}]}, "Add.",
     THOUGHT),
    "anthropic": ({"system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
     "tools": [{"name": "add", "description": "adds", "input_schema": SCHEMA}],
     "messages": [{"role": "user", "content": "Add 2 and 2."},
     {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}]},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1",
     "content": [{"type": "text", "text": '{"sum": 4}'}]}]}, {"role": "assistant",
     "content": [{"type": "text", "text": "It is 4."}]}]}, '<tool_response>\n{"sum": 4}', *SUM),
    "anthropic's system": ({"system": [{"type": "text", "text": "Be short."}], "messages": [USER, MODEL]},
     "system\nBe short.", SUM[1]),
    "anthropic's empty turn": ({"messages": [USER, {"role": "assistant",
     "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 2}}]},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}, MODEL,
     {"role": "user", "content": ""}, MODEL]}, "<tool_response>", SUM[0], MODEL["content"] + "<|im_end|>", SUM[1]),
    "anthropic's thinking": ({"messages": [USER, {"role": "assistant",
     "content": [{"type": "thinking", "thinking": "Two twice.", "signature": "c2ln"},
     {"type": "text", "text": "It is 4."}]}]}, "Add", THOUGHT),
    "responses": ({"instructions": "Be short.", "tools": [{"type": "function", "name": "add", "description": "adds",
     "parameters": SCHEMA}], "input": [{"role": "user", "content": [{"type": "input_text", "text": "Add 2 and 2."}]},
     {"type": "function_call", "id": "f", "call_id": "c1", "name": "add", "arguments": '{"a": 2}',
     "status": "completed"}, {"type": "function_call_output", "call_id": "c1", "output": '{"sum": 4}'},
     {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 4."}]}]},
     '<tool_response>\n{"sum": 4}', *SUM),
    "responses' reasoning": ({"input": "Add 2 and 2.", "output": [{"type": "reasoning", "id": "r",
     "summary": [{"type": "summary_text", "text": "Two twice."}]},
     {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 4."}]}]}, "Add",
     THOUGHT),
    "one object that holds the chat": ({"conv": {"messages": [USER, MODEL]}, "id": 3}, "Add 2 and 2.", SUM[1]),
    "one object that holds question and answer": ({"qa": {"question": "Add 2 and 2.", "answer": " 4"}},
     "Add 2 and 2.", " 4<|im_end|>"),
    "responses with scores": ({"prompt": "Add 2 and 2.", "responses": ["5", "4", "It is 4."],
     "scores": [0.1, 0.5, 0.9]}, "Add 2 and 2.", "It is 4.<|im_end|>", "5<|im_end|>"),
    "ultrafeedback": ({"source": "own", "instruction": "Add 2 and 2.", "models": ["a", "b", "c"],
     "completions": [{"model": model, "response": response, "overall_score": score, "critique": "Fine.",
     "annotations": {"honesty": {"Rating": "5"}}, "custom_system_prompt": "", "fine-grained_score": 4.0,
     "principle": "honesty"} for model, response, score in (("a", "4", 6.0), ("b", "5", 2.0),
     ("c", "It is 4.", 8.5))]}, "Add 2 and 2.", SUM[1], "<think>\n\n</think>\n\n5<|im_end|>"),
}  # fmt: skip


def read(file: Path, images: ImageProcessor | None, **config: Any) -> list[tuple[str, list[str]]]:
    """(text, learned stretches) of each document of the first row."""
    source = open_source(SourceConfig(path=str(file), **config))
    source.keeps_images = images is not None
    letters = images.processor.tokenizer if images else tokenizer("qwen3")
    encoder = Encoder(letters, source.format(), images=images, unused=source.config.unused)
    encoder.folders = source.folders
    (row,) = source.rows()
    assert row.value is not None, row.error
    (found,) = encoder.encode([row.value], [encoder.folders.get(file_and_place(row.where)[0])])
    assert not isinstance(found, str), found
    return [shown(document, letters) for document in (found.documents if isinstance(found, EncodedGroup) else [found])]


def shown(document: Document, letters: Any) -> tuple[str, list[str]]:
    pads = {index for image in document.images for index in range(image.start, image.end)}
    starts = {image.start for image in document.images}
    text, learned = "", []
    for index, (token, is_learned) in enumerate(zip(document.ids, document.supervised, strict=True)):
        if index not in pads:
            text += letters.decode([token])
        elif index in starts:
            text += "<|image|>"
        if is_learned:
            learned = [*learned, []] if not (index and document.supervised[index - 1]) else learned
            learned[-1].append(token)
    return text, [letters.decode(ids) for ids in learned]


@pytest.fixture
def images(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    return ImageProcessor(processor("qwen2_5_vl", tmp_path / "model"), concatenated)


@pytest.mark.parametrize("name", IMAGES)
def test_shapes_with_images(tmp_path, images, name):
    row, prompt, *learned = IMAGES[name]
    documents = read(write_jsonl(tmp_path / "rows.jsonl", [row]), images)
    assert [stretch for _, stretches in documents for stretch in stretches] == learned
    assert all(
        prompt in text.replace("<|vision_start|>", "").replace("<|vision_end|>", "") and text.count("<|image|>") == 1
        for text, _ in documents
    )


@pytest.mark.parametrize("name", TEXTS)
def test_shapes_of_text(tmp_path, name):
    row, prompt, *learned = TEXTS[name]
    documents = read(write_jsonl(tmp_path / "rows.jsonl", [row]), None)
    assert [stretch for _, stretches in documents for stretch in stretches] == learned
    assert all(prompt in text for text, _ in documents)


CALLING = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}, {"type": "text", "text": "So."}],
}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "Why?", "answer": "So.", "messages": [USER, MODEL]}, r"'question', 'answer'.*unused: \[question"),
        ({"contents": [{"parts": [{"text": "Why?"}]}], "messages": [USER, MODEL]}, r"'contents'.*unused: \[contents"),
        ({"contents": [{"parts": [{"text": "Why?"}]}], "messages": [{"from": "gpt", "value": "x"}]}, "no format"),
        ({"prompt": "a", "chosen": "b", "responses": ["b", "c"], "scores": [1, 2]}, "row of preferences"),
        ({"a": {"messages": [USER, MODEL]}, "b": {"messages": [USER, MODEL]}}, r"columns: {a.messages: messages}"),
        ({"messages": [USER, CALLING]}, "turn 2.*make two turns"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "'redacted_thinking'; only parts with text or an image"),
        ({"contents": [{"role": "user", "parts": [{"text": "a"}]}, {"role": "model", "parts": [{"executableCode": {}}]}]},
         "'executableCode'"),
        ({"input": [USER, {"type": "web_search_call", "id": "w"}]}, "'web_search_call'"),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1, 1]}, "a higher score than another"),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1]}, "each answer needs a score"),
        ({"prompt": "a", "responses": ["b", "c"], "scores": [1, 2, "x"]}, "each answer needs a score"),
        ({"prompt": "a", "answers": [{"answer": "b", "rank": 1}, {"answer": "c", "rank": 2}]}, "prompt, chosen, rejected"),
        ({"image": "a.png", "question": "a", "answer": "b", "text": "c"}, "name the column"),
        ({"image": "a.png", "question": "a", "answer": "b", "response": "c"}, "`instruction` and `output`"),
        ({"image": "a.png", "prompt": "a", "chosen": "b", "rejected": "c"}, "`instruction`, `chosen` and `rejected`"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused_with_what_to_change(tmp_path, images, row, reason):
    with pytest.raises((AssertionError, DataError), match=reason):
        read(write_jsonl(tmp_path / "rows.jsonl", [row]), images)


def test_unused_columns_and_models_of_text_leave_rows_as_they_were(tmp_path, images):
    row = {"image": "a.png", "question": "What is it?", "answer": "red"}
    ((text, learned),) = read(write_jsonl(tmp_path / "rows.jsonl", [row]), images, unused=["image"])
    assert (text, learned) == ("What is it?red<|im_end|>", ["red<|im_end|>"])
    page = {"file_name": "a.png", "text": "A page that shows a.png"}
    assert read(write_jsonl(tmp_path / "pages.jsonl", [page]), None)[0][0].startswith(page["text"])


def test_a_question_without_an_image_among_others_is_a_chat(tmp_path, images):
    rows = [{"image": "a.png", "question": "What is it?", "answer": "red"}] * 2 + [
        {"question": "Why?", "answer": "So."}
    ]
    source = open_source(SourceConfig(path=str(write_jsonl(tmp_path / "rows.jsonl", rows))))
    source.keeps_images = True
    *_, last = Encoder(images.processor.tokenizer, source.format(), images=images).encode(
        [row.value for row in source.rows()], [tmp_path] * 3
    )
    assert shown(last, images.processor.tokenizer)[1] == ["So.<|im_end|>"]


def test_a_column_names_a_key_of_an_object(tmp_path):
    row = {"a": {"messages": [USER, MODEL], "by": "x"}, "b": {"messages": [USER, MODEL]}}
    options = {"columns": {"a.messages": "messages"}, "unused": ["b", "a"]}
    assert read(write_jsonl(tmp_path / "rows.jsonl", [row]), None, **options)[0][1] == [SUM[1]]


def test_answers_that_are_not_used_are_counted(tmp_path, images):
    rows = [{"prompt": "a", "responses": list("bcd")[:count], "scores": [1, 2, 3][:count]} for count in (2, 3, 3)]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    encoded = Encoder(tokenizer("qwen3"), FORMATS["preference"]).encode(values(file))
    assert [any("not used" in line for line in row.documents[0].remarks) for row in encoded] == [False, True, True]


def test_tables_have_these_shapes_too(tmp_path, images):
    row = {"image": {"bytes": PNG, "path": None}, "question": "What is it?", "answer": "red"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet", images)[0][1] == [SEEN[1]]
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png,A red field.\n")
    assert read(tmp_path / "metadata.csv", images)[0][1] == ["A red field.<|im_end|>"]
    (tmp_path / "judged.csv").write_text("prompt,completion,label\nAdd.,4,true\n")
    assert read(tmp_path / "judged.csv", None)[0][1] == ["4<|im_end|>"]
