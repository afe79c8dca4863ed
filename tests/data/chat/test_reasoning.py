"""Answers are learned as a model will be asked for them: with the reasoning that a template writes in sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import families
from support.cases import pairs
from support.encoded import encoded
from support.encoded import learned as learned_text
from support.rows import write_jsonl

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.chat.remarks import EMPTY_REASONING_REMARK, PROMPT_REMARK, REWRITTEN_REMARKS
from fxtune.data.config import DataConfig, OnRewritten, SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError

USER = {"role": "user", "content": "what is two and two?"}
AGAIN = {"role": "user", "content": "and two?"}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "123456789", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "tool_call_id": "123456789", "content": "4"}
SPLIT, CONTEXT = (REWRITTEN_REMARKS[choice] for choice in (OnRewritten.split, OnRewritten.context))


def answer(text: str, reasoning: str | None = None, **more: Any) -> dict[str, Any]:
    thought = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    return {"role": "assistant", "content": text, **thought, **more}


def encoder(family: str, marks: bool = False, **options: Any) -> Encoder:
    return Encoder(families.tokenizer(family, marks), FORMATS["messages"], **options)


def documents(encoder: Encoder, row: dict[str, Any]) -> list[Document]:
    """The documents of a chat, as a table of tokens has them."""
    whole = encoded(encoder, row)
    encoder.by_question = encoder.on_rewritten is OnRewritten.split
    return encoder.split(row, whole).pieces if whole.is_rewritten and encoder.by_question else [whole]


def learned(family: str, found: list[Document]) -> list[str]:
    return [learned_text(one, families.tokenizer(family)) for one in found]


THOUGHT = {"messages": [USER, answer("four.", "I add"), AGAIN, answer("six.", "I add again")]}


def test_each_question_is_a_document_with_its_reasoning() -> None:
    found = documents(encoder("qwen3"), THOUGHT)
    assert learned("qwen3", found) == [
        "<think>\nI add\n</think>\n\nfour.<|im_end|>",
        "<think>\nI add again\n</think>\n\nsix.<|im_end|>",
    ]
    second = families.tokenizer("qwen3").decode(found[1].ids)
    assert "assistant\nfour.<|im_end|>" in second, "the earlier answer has no reasoning, as in sampling"
    found = documents(encoder("harmony"), THOUGHT)
    assert learned("harmony", found) == [
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"
        for thought, text in (("I add", "four."), ("I add again", "six."))
    ]


def test_tools_that_a_template_moves_to_the_last_question_are_in_each_document() -> None:
    """Mistral's template finds the last question by comparing messages, so a trial with equal ones would not see it."""
    tools = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": {}}}]
    row = {"messages": [USER, answer("four."), AGAIN, answer("six.")], "tools": tools}
    found = documents(encoder("mistral_v3"), row)
    texts = [families.tokenizer("mistral_v3").decode(one.ids) for one in found]
    assert [text.count("[AVAILABLE_TOOLS]") for text in texts] == [1, 1]
    assert texts[0].startswith("<s>[AVAILABLE_TOOLS]")
    assert [text.strip() for text in learned("mistral_v3", found)] == ["four.</s>", "six.</s>"]


CHATS = {
    "plain": [USER, answer("four."), AGAIN, answer("six.")],
    "thought": THOUGHT["messages"],
    "in the text": [USER, answer("<think>\nI add\n</think>\n\nfour."), AGAIN, answer("six.")],
    "mixed": [USER, answer("four.", "I add"), AGAIN, answer("six."), USER, answer("four.", "I know")],
    "unanswered": [USER, answer("four.", "I add"), AGAIN],
}


@pytest.mark.parametrize(
    ("family", "chat"),
    [
        *(("qwen3", chat) for chat in CHATS),
        *pairs(["gptoss", "harmony"], list(CHATS)),
        *pairs(["chatml", "llama31", "gemma3", "phi3", "zephyr"], list(CHATS)),
    ],
)
def test_each_document_begins_with_the_prompt_of_sampling_and_has_its_answer(family: str, chat: str) -> None:
    """The tokens before an answer, and the answer, are those of the chat up to this turn."""
    messages = CHATS[chat]
    if family not in ("qwen3", "gptoss", "harmony"):  # templates without reasoning
        messages = [{key: message[key] for key in ("role", "content")} for message in messages]
    tokenizer = families.tokenizer(family)
    used = encoder(family, unused=("reasoning_content",))
    seen = []
    for document in documents(used, {"messages": messages}):
        starts = [
            index for index, mark in enumerate(document.supervised) if mark and not document.supervised[index - 1]
        ]
        for start in starts:
            turn = next(
                turn
                for turn, message in enumerate(messages)
                if message["role"] == "assistant"
                and document.ids[:start]
                == tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=False)
            )
            seen.append(turn)
            alone = tokenizer.apply_chat_template(messages[: turn + 1], return_dict=False)
            end = next(
                (at for at in range(start, len(document.ids)) if not document.supervised[at]), len(document.ids)
            )
            assert document.ids[:end] == alone[:end]
    assert seen == [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def test_tool_rounds_that_a_template_writes_alike_stay_in_one_document() -> None:
    rounds = [USER, {**CALLING, **answer("", "I must add")}, RESULT, answer("four.", "now I know")]
    (document,) = documents(encoder("qwen3"), {"messages": rounds})
    text = families.tokenizer("qwen3").decode(document.ids)
    assert text.count("<think>") == text.count("</think>") == 2
    call, last = learned("qwen3", documents(encoder("qwen3"), {"messages": [USER, CALLING, RESULT, answer("four.")]}))
    assert call.startswith("<think>\n\n</think>\n\n<tool_call>")
    assert last == "<think>\n\n</think>\n\nfour.<|im_end|>"


def test_the_key_says_what_becomes_of_rewritten_turns() -> None:
    late = "<think>\nI add again\n</think>\n\nsix.<|im_end|>"
    (context,) = documents(encoder("qwen3", on_rewritten=OnRewritten.context), THOUGHT)
    assert learned("qwen3", [context]) == [late]
    assert context.remarks == (CONTEXT,)
    (kept,) = documents(encoder("qwen3", on_rewritten=OnRewritten.keep), THOUGHT)
    assert learned("qwen3", [kept]) == ["four.<|im_end|>" + late]
    assert encoded(encoder("qwen3"), THOUGHT).remarks == (SPLIT,)
    assert encoded(encoder("chatml"), {"messages": CHATS["plain"]}).remarks == ()


def test_a_turn_before_a_question_without_an_answer_that_is_learned_is_written_as_in_sampling() -> None:
    for rest in ([AGAIN], [AGAIN, answer("six.", train=False)]):
        found = documents(encoder("qwen3"), {"messages": [USER, answer("four.", "I add"), *rest]})
        assert learned("qwen3", found) == ["<think>\nI add\n</think>\n\nfour.<|im_end|>"]


def test_learning_since_the_last_question_keeps_its_tool_rounds() -> None:
    rounds = [AGAIN, {**CALLING, **answer("", "I must add")}, RESULT, answer("six.", "so it is")]
    since = LearnConfig(since_last_question=True)
    for rest in ([], [USER]):
        (found,) = documents(
            encoder("qwen3", learn=since), {"messages": [USER, answer("four.", "I add"), *rounds, *rest]}
        )
        (text,) = learned("qwen3", [found])
        assert text.startswith("<think>\nI must add\n</think>\n\n<tool_call>")
        assert text.endswith("</tool_call><|im_end|><think>\nso it is\n</think>\n\nsix.<|im_end|>")


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("row", [{}, {"chat_template_kwargs": {"enable_thinking": False, "tools_in_user": None}}])
def test_without_thinking_the_empty_block_is_in_the_prompt(row: dict[str, Any], marks: bool) -> None:
    tokenizer = families.tokenizer("qwen3")
    variables = {} if row else {"enable_thinking": False}
    used = encoder("qwen3", marks, variables=variables)
    found = documents(used, {"messages": CHATS["plain"], **row})
    assert learned("qwen3", found) == ["four.<|im_end|>", "six.<|im_end|>"]
    for document, turn in zip(found, (1, 3), strict=True):
        prompt = tokenizer.apply_chat_template(
            CHATS["plain"][:turn], add_generation_prompt=True, return_dict=False, enable_thinking=False
        )
        assert document.ids[: len(prompt)] == prompt
        assert document.supervised.index(True) == len(prompt)
    as_text = {"messages": CHATS["plain"], "chat_template_kwargs": json.dumps({"enable_thinking": False})}
    assert encoded(encoder("qwen3", marks), as_text) == encoded(used, {"messages": CHATS["plain"], **row})


def test_a_row_overrides_the_variables_of_the_config() -> None:
    used = encoder("qwen3", variables={"enable_thinking": False})
    rows = [{"messages": [USER, answer("four.")]}, {"messages": [USER, answer("four.", "I add")]}]
    rows[1]["chat_template_kwargs"] = {"enable_thinking": True}
    assert learned("qwen3", [encoded(used, row) for row in rows]) == [
        "four.<|im_end|>",
        "<think>\nI add\n</think>\n\nfour.<|im_end|>",
    ]
    del rows[1]["chat_template_kwargs"]
    assert PROMPT_REMARK in encoded(used, rows[1]).remarks, "reasoning behind a prompt that has ended it"


def test_an_answer_with_an_empty_block_of_reasoning_is_counted() -> None:
    plain = {"messages": [USER, answer("four.")]}
    assert encoded(encoder("qwen3"), plain).remarks == (EMPTY_REASONING_REMARK,)
    assert encoded(encoder("qwen3", variables={"enable_thinking": False}), plain).remarks == ()
    assert encoded(encoder("qwen3"), {"messages": [USER, answer("four.", "I add")]}).remarks == ()


def test_a_variable_that_no_template_reads_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.chat_template_kwargs.enable_thinkin: .*did you mean.*enable_thinking"):
        encoder("qwen3", variables={"enable_thinkin": False})
    with pytest.raises(DataError, match=r"data.chat_template_kwargs.tools: fxtune sets"):
        encoder("qwen3", variables={"tools": []})
    plain, used = {"messages": [USER, answer("four.")]}, encoder("qwen3")
    for given, reason in (
        ({"thinking": True}, "reads no such variable"),
        ([1], "chat_template_kwargs is a list, not an object of variables"),
        ("{", "chat_template_kwargs is not valid JSON"),
        ({"enable_thinking": "<|im_end|>"}, "chat_template_kwargs holds a special token"),
    ):
        (found,) = used.encode([{**plain, "chat_template_kwargs": given}])
        assert isinstance(found, str)
        assert reason in found
    (found,) = Encoder(families.tokenizer("qwen3"), FORMATS["prompt_completion"]).encode(
        [{"prompt": "a", "completion": "b", "chat_template_kwargs": {"enable_thinking": True}}]
    )
    assert "is for chats" in str(found)


def test_variables_reach_other_templates(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    turns = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    file.write_text("{{ greeting }}" + turns + "{% if add_generation_prompt %}[assistant]{% endif %}")
    used = Encoder(families.tokenizer("chatml"), FORMATS["messages"], str(file), variables={"greeting": "hello"})
    document = encoded(used, {"messages": [USER, answer("four.")]})
    assert families.tokenizer("chatml").decode(document.ids).startswith("hello[user]what is")


def test_the_tokens_of_a_source_are_those_of_its_questions(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [THOUGHT, {"messages": [USER, answer("four.", "I add")]}]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    tokenizer = families.tokenizer("qwen3")

    def table_of(**options: Any):
        data = DataConfig(cache_dir=str(tmp_path / "cache"), workers=1, **options)
        return tokenize(SourceConfig(path=path), data, tokenizer)

    for _ in range(2):  # tokenized, and from the cache
        table = table_of()
        assert (len(table), table.split.questions, len(np.unique(table.digests))) == (3, 2, 2)
        assert tokenizer.decode(table.ids[table.supervised]).count("<think>") == 3
        text = " ".join(capsys.readouterr().out.split())
        assert f"{SPLIT} (1 of 2 documents)." in text
        assert "the questions of these chats are 2 documents." in text
    assert table.whole is not None
    kept, context, since, other = (
        table_of(**options).fingerprint
        for options in (
            {"on_rewritten": OnRewritten.keep},
            {"on_rewritten": OnRewritten.context},
            {"learn": LearnConfig(since_last_question=True)},
            {"chat_template_kwargs": {"enable_thinking": False}},
        )
    )
    assert kept == table.whole.fingerprint
    assert context == since, "the last answer alone is learned"
    assert len({table.fingerprint, kept, context, other}) == 4
    longest = int(np.diff(table.offsets).max())
    short = table_of(sequence_length=longest - 1)
    assert (len(short), short.split.questions, short.split.chats) == (3, 2, 1)
    assert np.diff(short.offsets).max() < longest
    assert tokenizer.decode(short.ids[short.supervised]) == tokenizer.decode(table.ids[table.supervised])
