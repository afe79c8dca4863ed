"""Images in chats: parts, marks and columns."""

from __future__ import annotations

from typing import Any

import pytest

from fxtune.data.formats.image_parts import IMAGE
from fxtune.data.formats.registry import FORMATS, row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.formats.values import RowError

ANSWER = {"role": "assistant", "content": "A."}
BYTES = {"bytes": b"png", "path": None}
HOLLOW = {"image": {"bytes": None, "path": None}}


def read(row: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """(content, what names its images) of each message."""
    format = row_format(row)
    assert format is not None
    chat = format.read(row, LearnConfig())
    assert isinstance(chat, Conversation)
    return [
        (message.get("content", ""), [value for _, value in message.get("images", ())]) for message in chat.messages
    ]


def question(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}, ANSWER]


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ({"type": "image", "image": "a.png"}, "a.png"),
        ({"type": "image", "path": "a.png"}, "a.png"),
        ({"type": "image", "url": "data:image/png;base64,AA=="}, "data:image/png;base64,AA=="),
        ({"type": "image", "bytes": b"png"}, b"png"),
        ({"type": "image", "image": BYTES}, BYTES),
        ({"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}, "a.png"),
        ({"type": "image_url", "image_url": "a.png"}, "a.png"),
        ({"type": "image", "image": "a.png", "text": None, "url": None}, "a.png"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            "data:image/png;base64,AA==",
        ),
        ({"type": "image", "source": {"type": "url", "url": "a.png"}}, "a.png"),
        ({"type": "image", "image": "a.png", "image_url": {"url": None, "detail": None}}, "a.png"),
        ({"type": "image_url", "image": {"bytes": None, "path": None}, "image_url": {"url": "a.png"}}, "a.png"),
    ],
)
def test_parts_name_images(part, value):
    text = {"type": "text", "text": "What?"}
    assert read({"messages": question(part, text)})[0] == (f"{IMAGE}What?", [value])
    assert read({"messages": question(text, part)})[0] == (f"What?{IMAGE}", [value])


def test_parts_without_an_image_take_the_column_in_order():
    part, given = {"type": "image"}, {"type": "image", "image": "own.png"}
    row = {"messages": question(part, "one", given, part), "images": ["a.png", "b.png"]}
    assert read(row)[0] == (f"{IMAGE}one{IMAGE}{IMAGE}", ["a.png", "own.png", "b.png"])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "<image>\nWhat?<image>"}, ANSWER], "images": ["a.png", BYTES]},
        {"conversations": [{"from": "human", "value": "<image>\nWhat?<image>"}, {"from": "gpt", "value": "A."}],
         "id": "7", "images": ["a.png", BYTES]},
        {"instruction": "<image>\nWhat?<image>", "output": "A.", "images": ["a.png", BYTES]},
        {"prompt": [{"role": "user", "content": "<image>\nWhat?<image>"}], "completion": [ANSWER],
         "images": ["a.png", BYTES]},
    ],
)  # fmt: skip
def test_marks_take_the_column(row):
    assert read(row) == [(f"{IMAGE}\nWhat?{IMAGE}", ["a.png", BYTES]), ("A.", [])]


def test_llava_has_one_image():
    turns = [{"from": "human", "value": "What?\n<image>"}, {"from": "gpt", "value": "A."}]
    assert read({"id": "7", "image": "a.png", "conversations": turns})[0] == (f"What?\n{IMAGE}", ["a.png"])
    assert read({"image": BYTES, "conversations": turns})[0] == (f"What?\n{IMAGE}", [BYTES])


def test_a_cell_of_a_csv_file_lists_images():
    row = {"messages": '[{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "A."}]'}
    assert read({**row, "images": '["a.png"]'})[0] == (f"{IMAGE}?", ["a.png"])
    assert read({**row, "images": "a.png"})[0] == (f"{IMAGE}?", ["a.png"])


def test_the_result_of_a_tool_can_have_an_image():
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "look", "arguments": {}}}]}
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "image": "a.png"}]}
    assert read({"messages": [{"role": "user", "content": "?"}, call, result, ANSWER]})[2] == (IMAGE, ["a.png"])


@pytest.mark.parametrize("images", [{}, {"images": []}, {"images": None}, {"image": None}, {"image": {}}, HOLLOW])
def test_a_mark_is_text_where_a_row_has_no_images(images):
    row = {"messages": [{"role": "user", "content": "What is <image>?"}, ANSWER], **images}
    assert read(row)[0] == ("What is <image>?", [])


def test_a_mark_in_an_answer_is_text():
    row = {"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Use <image>."}]}
    assert read({**row, "images": ["a.png"]}) == [(f"{IMAGE}?", ["a.png"]), ("Use <image>.", [])]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": question("What?"), "images": ["a.png"]}, "images has 1 image, and the messages have 0 places"),
        ({"messages": question("<image>"), "images": ["a", "b"]}, "2 images, and the messages have 1 place"),
        ({"messages": question("<image><image>"), "image": "a"}, "1 image, and the messages have 2 places"),
        ({"messages": question({"type": "image"})}, r"messages\[0\].content\[0\] names no image"),
        ({"messages": question("<image>"), "images": ["a"], "image": "b"}, "two columns"),
        ({"messages": question({"type": "image", "image": "a", "path": "b"})}, "twice"),
        ({"messages": question({"type": "image", "image": "a", "resized_height": 8})}, "resized_height.*not read"),
        ({"messages": question({"type": "video", "video": "a"})}, "'video'; only parts"),
        ({"messages": question(f"a{IMAGE}")}, "private-use"),
        (
            {"messages": [{"role": "user", "content": "?"},
                          {"role": "assistant", "content": [{"type": "image", "image": "a"}]}]},
            "answer with an image",
        ),
        ({"instruction": f"a{IMAGE}", "output": "A."}, "names no image"),
    ],
)  # fmt: skip
def test_rows_whose_images_do_not_match(row, reason):
    with pytest.raises(RowError, match=reason):
        read(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>", "completion": "b", "images": ["a.png"]},
        {"prompt": "<image>", "chosen": "b", "rejected": "c", "images": ["a.png"]},
    ],
)
def test_a_text_without_a_chat_template_has_no_images(row):
    format = row_format(row)
    assert format in FORMATS.values()
    with pytest.raises(RowError, match="images is for chats") as raised:
        format.read(row, LearnConfig())
    assert "`instruction`" in str(raised.value)  # which makes a chat
    renamed = {("output" if key == "completion" else key): value for key, value in row.items() if key != "prompt"}
    renamed["instruction"] = row["prompt"]
    found = row_format(renamed).read(renamed, LearnConfig())
    for chat in found.answers if isinstance(found, Preference) else [found]:
        assert chat.messages[0]["content"] == IMAGE


def test_both_answers_of_a_row_have_the_images():
    row = {
        "prompt": [{"role": "user", "content": "<image>?"}],
        "chosen": [ANSWER],
        "rejected": [{"role": "assistant", "content": "B."}],
        "images": ["a.png"],
    }
    found = row_format(row).read(row, LearnConfig())
    assert [[len(message.get("images", ())) for message in chat.messages] for chat in found.answers] == [[1, 0]] * 2
