"""Tool calls are learned wherever a published template writes them, exactly their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.encoded import encoded, reason, runs

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import ChatRole, LearnConfig

USER = {"role": "user", "content": "what is two and two?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": "two", "b": [2, {"c": null}]}'},
}
OTHER = {"id": "call_2", "type": "function", "function": {"name": "sub", "arguments": {}}}
WRITTEN = '{"a": "two", "b": [2, {"c": null}]}'
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "it is 4"}
ANSWER = {"role": "assistant", "content": "four."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]

CALL_TEXT = {
    "qwen3": f'<tool_call>\n{{"name": "add", "arguments": {WRITTEN}}}\n</tool_call><|im_end|>',
    "llama31": f'{{"name": "add", "parameters": {WRITTEN}}}<|eot_id|>',
    "mistral_v3": f'[TOOL_CALLS] [{{"name": "add", "arguments": {WRITTEN}, "id": "ID"}}]</s>',
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {WRITTEN}}}\n</tool_call><|im_end|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    + WRITTEN
    + "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    "harmony": f" to=functions.add<|channel|>commentary json<|message|>{WRITTEN}<|call|>",
    "command": f'<|START_ACTION|>{{"name": "add", "parameters": {WRITTEN}}}<|END_ACTION|><|END_OF_TURN_TOKEN|>',
    "kimi": f"<|open|>call add<|sep|>{WRITTEN}<|close|>call<|sep|><|close|>message<|sep|><|end_of_msg|>",
    "glm": f"<tool_call>add\n{WRITTEN}</tool_call><|observation|>",
}
ANSWER_TEXT = {
    "qwen3": "<think>\n\n</think>\n\nfour.<|im_end|>",
    "llama31": "four.<|eot_id|>",
    "mistral_v3": "four.</s>",
    "hermes": "four.<|im_end|>",
    "deepseek": "four.<｜end▁of▁sentence｜>",
    "harmony": "<|channel|>final<|message|>four.<|return|>",
    "command": "<|START_RESPONSE|>four.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "kimi": "<|open|>response<|sep|>four.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    "glm": "four.<|user|>",
}


def with_tools(family: str, row: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek's published template writes no tools, so a row with tools is refused."""
    return row if family == "deepseek" else {**row, "tools": TOOLS}


def learned(family: str, row: dict[str, Any], format: str = "messages", learn: LearnConfig | None = None) -> list[str]:
    """The supervised stretches of a row under a published template, decoded from their tokens."""
    tokenizer = families.tokenizer(family)
    texts = map(tokenizer.decode, runs(encoded(Encoder(tokenizer, FORMATS[format], learn=learn), row)))
    # Mistral's tokenizer puts a space before the text behind a special token.
    return [one.lstrip().replace("]  [", "] [") for one in texts] if family == "mistral_v3" else list(texts)


def without_id(stretch: str) -> str:
    """The text of a Mistral call with its id of nine characters replaced."""
    before, key, after = stretch.partition('"id": "')
    return f"{before}{key}ID{after[9:]}" if key else stretch


@pytest.mark.parametrize("family", families.TOOL_FAMILIES)
def test_calls_and_answers_are_learned_and_results_are_not(family: str) -> None:
    """With and without tools, in several rounds, and in a chat that ends with a call."""
    call, answer, once = CALL_TEXT[family], ANSWER_TEXT[family], [USER, CALLING, RESULT]
    row = {"messages": [*once, ANSWER]}
    assert [without_id(one) for one in learned(family, row)] == [call, answer]
    assert [without_id(one) for one in learned(family, with_tools(family, row))] == [call, answer]
    found = learned(family, with_tools(family, {"messages": [*once, ANSWER, *once, CALLING, RESULT, ANSWER]}))
    assert [without_id(one) for one in found if "add" in one] == [call] * 3
    assert (len(found), found[-1]) == (5, answer)
    (alone,) = learned(family, with_tools(family, {"messages": [USER, CALLING]}))
    # Qwen3 writes an empty block of reasoning in the last turn, and the model must learn that.
    assert without_id(alone) == ("<think>\n\n</think>\n\n" if family == "qwen3" else "") + call


@pytest.mark.parametrize("family", ["qwen3", "mistral_v3"])
def test_sharegpt_calls_and_observations(family: str) -> None:
    turns = [
        {"from": "human", "value": "what is two and two?"},
        {"from": "function_call", "value": f'{{"name": "add", "arguments": {WRITTEN}}}'},
        {"from": "observation", "value": "it is 4"},
        {"from": "gpt", "value": "four."},
    ]
    call, answer = learned(family, with_tools(family, {"conversations": turns}), "sharegpt")
    assert without_id(call) == CALL_TEXT[family]
    assert answer == ANSWER_TEXT[family]


@pytest.mark.parametrize("family", ["qwen3", "mistral_v3", "hermes", "deepseek"])
def test_parallel_calls_are_one_turn(family: str) -> None:
    both = [{**CALLING, "tool_calls": [CALL, OTHER]}, RESULT, {**RESULT, "tool_call_id": "call_2"}]
    call, answer = learned(family, {"messages": [USER, *both, ANSWER]})
    assert call.index("add") < call.index("sub")
    assert call.endswith(CALL_TEXT[family][-6:])
    assert answer == ANSWER_TEXT[family]


@pytest.mark.parametrize("family", ["llama31", "harmony"])
def test_a_template_that_takes_one_call_a_turn_refuses_two(family: str) -> None:
    row = {"messages": [USER, {**CALLING, "tool_calls": [CALL, OTHER]}]}
    found = reason(Encoder(families.tokenizer(family), FORMATS["messages"]), row)
    assert "single tool-calls" in found or "does not write tool_calls[1] of messages[1]" in found


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_text_beside_a_call_is_learned_with_it(family: str) -> None:
    call, _ = learned(family, {"messages": [USER, {**CALLING, "content": "let me see"}, RESULT, ANSWER]})
    assert call.startswith("let me see")
    assert call.endswith(CALL_TEXT[family])


def test_reasoning_before_a_call() -> None:
    calling = {**CALLING, "reasoning_content": "I must add."}
    found = learned("qwen3", {"messages": [USER, calling, RESULT, ANSWER]})
    assert found[0] == "<think>\nI must add.\n</think>\n\n" + CALL_TEXT["qwen3"]
    (found,) = learned("harmony", {"messages": [USER, calling]})
    assert found == "<|channel|>analysis<|message|>I must add.<|end|><|start|>assistant" + CALL_TEXT["harmony"]


@pytest.mark.parametrize(
    ("family", "learn", "switch", "expected"),
    [
        ("qwen3", LearnConfig(), {"train": False}, [False, True]),
        ("llama31", LearnConfig(), {"weight": 0}, [False, True]),
        ("mistral_v3", LearnConfig(tool_calls=False), {}, [False, True]),
        ("hermes", LearnConfig(tool_calls=False), {"train": True}, [True, True]),
        ("deepseek", LearnConfig(last_turn_only=True), {}, [False, True]),
        ("harmony", LearnConfig(roles=[]), {"weight": 1}, [True, False]),
        ("glm", LearnConfig(tool_calls=False), {}, [False, True]),
    ],
)
def test_what_is_learned_can_be_chosen(family: str, learn: LearnConfig, switch: dict, expected: list[bool]) -> None:
    found = learned(family, {"messages": [USER, {**CALLING, **switch}, RESULT, ANSWER]}, learn=learn)
    texts = [CALL_TEXT[family], ANSWER_TEXT[family]]
    assert [without_id(one) for one in found] == [text for text, wanted in zip(texts, expected, strict=True) if wanted]


def test_other_roles_can_be_learned() -> None:
    row = {"messages": [USER, ANSWER, {"role": "user", "content": "thanks"}]}
    learn = LearnConfig(roles=[ChatRole.user, ChatRole.assistant])
    expected = ["what is two and two?<|eot_id|>", "four.<|eot_id|>", "thanks<|eot_id|>"]
    assert learned("llama31", row, learn=learn) == expected
    assert learned("llama31", row, learn=LearnConfig(roles=[ChatRole.user])) == expected[::2]


WORDS = st.sampled_from(
    ["two", " four\n", '"', "{}", "\\", "é😀", "</tool_call>", "<|im_end|>", "[TOOL_CALLS] [", "<｜Assistant｜>", "</s>", "```"]
)  # fmt: skip
TEXT = st.lists(WORDS, min_size=1, max_size=4).map("".join)
ARGUMENTS = st.dictionaries(TEXT, st.none() | st.integers() | TEXT | st.lists(TEXT, max_size=2), max_size=3)


@st.composite
def agents(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A conversation with calls of any arguments, results and answers; some turns are switched off."""

    def call(number: int) -> dict[str, Any]:
        function = {"name": draw(st.sampled_from(["add", "user", "name", "a.b"])), "arguments": draw(ARGUMENTS)}
        own = ["call_1", "abcdefghi"] if number else ["2", "call_2"]
        return {"id": draw(st.sampled_from(own)), "type": "function", "function": function}

    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            calls = [
                call(number) for number in range(1 if family in ("llama31", "harmony") else draw(st.integers(1, 2)))
            ]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            if family in ("qwen3", "deepseek"):
                messages[-1]["content"] = draw(st.none() | TEXT)
            if draw(st.integers(0, 3)) == 0:
                messages[-1]["train"] = False
            messages += [{"role": "tool", "content": draw(TEXT), "tool_call_id": one["id"]} for one in calls]
        messages.append({"role": "assistant", "content": draw(TEXT)})
    if messages[0]["role"] == "user" and draw(st.booleans()):
        messages.pop()
    if not any(message["role"] == "assistant" for message in messages):
        messages.append({"role": "assistant", "content": "four"})
    return with_tools(family, {"messages": messages}) if draw(st.booleans()) else {"messages": messages}


@pytest.mark.slow
@pytest.mark.parametrize("family", families.TOOL_FAMILIES)
def test_spans_with_calls_equal_those_of_marks(family: str) -> None:
    marked = Encoder(families.tokenizer(family, marks=True), FORMATS["messages"])
    stock = Encoder(families.tokenizer(family), FORMATS["messages"])

    @settings(max_examples=40)
    @given(agents(family))
    def check(row: dict[str, Any]) -> None:
        expected, found = marked.encode([row])[0], stock.encode([row])[0]
        assert isinstance(expected, Document), expected
        assert found == expected

    check()
