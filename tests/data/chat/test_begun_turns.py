"""An answer goes on with a turn that the prompt has begun: one turn is written, and its beginning is not learned."""

from __future__ import annotations

import pytest
from support import families

from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.formats.registry import FORMATS, row_format

QUESTION = {"role": "user", "content": "what is two and two?"}
BEGUN = {"role": "assistant", "content": "two and two is"}
REST = {"role": "assistant", "content": " four."}
ROWS = {
    "chat": {"messages": [QUESTION, BEGUN | {"prefix": True, "train": False}, REST]},
    "prompt_completion": {"prompt": [QUESTION, BEGUN], "completion": [REST]},
    "pair": {"prompt": [QUESTION, BEGUN], "chosen": [REST], "rejected": [{"role": "assistant", "content": " five."}]},
    "pair_of_texts": {"prompt": [QUESTION, BEGUN], "chosen": " four.", "rejected": " five."},
    "turns": {"conversations": [QUESTION, BEGUN | {"prefix": True}], "chosen": REST, "rejected": " five."},
    "kto": {"prompt": [QUESTION, BEGUN], "completion": [REST], "label": True},
}


def read(family: str, row: dict, marks: bool = False) -> tuple[str, str]:
    """(all of the first document's text, the part that is learned)."""
    tokenizer, format = families.tokenizer(family, marks), row_format(row)
    assert format is not None
    (found,) = Encoder(tokenizer, FORMATS[format.name]).encode([row])
    document = found.documents[0] if isinstance(found, EncodedGroup) else found
    assert isinstance(document, Document), document
    learned = [token for token, is_learned in zip(document.ids, document.supervised, strict=True) if is_learned]
    return tokenizer.decode(document.ids), tokenizer.decode(learned)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("family", ["chatml", "llama31", "qwen3", "phi3", "command", "kimi", "glm"])
def test_the_answer_goes_on_with_the_begun_turn(family: str, kind: str) -> None:
    whole = {"messages": [QUESTION, {"role": "assistant", "content": "two and two is four."}]}
    text, answer = read(family, whole)
    found, learned = read(family, ROWS[kind])
    assert found == text
    assert learned == answer[answer.index("four.") - 1 :]


def test_marks_of_a_template_say_the_same() -> None:
    assert read("llama31", ROWS["prompt_completion"], marks=True) == read("llama31", ROWS["prompt_completion"])


def test_a_begun_turn_of_a_chat_is_learned_as_its_other_turns_are() -> None:
    row = {"messages": [QUESTION, BEGUN | {"prefix": True}, REST]}
    assert read("chatml", row)[1] == "two and two is four.<|im_end|>"


@pytest.mark.parametrize("family", ["chatml", "kimi"])
def test_a_turn_that_stays_open_teaches_no_end(family: str) -> None:
    assert read(family, {"messages": [QUESTION, BEGUN | {"prefix": True}]})[1].endswith("two and two is")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [QUESTION | {"prefix": True}, REST]}, "prefix"),
        ({"messages": [QUESTION, BEGUN | {"prefix": True}, QUESTION, REST]}, "is begun"),
        (
            {"prompt": [QUESTION, BEGUN | {"reasoning_content": "r"}], "completion": [REST]},
            "without calls or reasoning",
        ),
        ({"prompt": [QUESTION, BEGUN], "completion": [REST | {"content": " "}]}, "empty"),
    ],
)
def test_what_cannot_go_on_is_a_bad_row(row: dict, reason: str) -> None:
    format = row_format(row)
    assert format is not None
    (found,) = Encoder(families.tokenizer("qwen3"), format).encode([row])
    assert isinstance(found, str)
    assert reason in found
