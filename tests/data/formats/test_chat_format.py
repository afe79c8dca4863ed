"""All chat formats become the same messages; an error names the wrong key of a row."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import LearnConfig, RowFormat
from fxtune.data.formats.values import RowError

USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}
CALLING = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}]}


def test_the_formats_agree() -> None:
    rows: list[tuple[RowFormat, dict[str, Any]]] = [
        (FORMATS["messages"], {"messages": [{"role": "system", "content": "s"},
         {"role": "user", "content": "u\n\nv"}, ANSWER]}),
        (FORMATS["messages"], {"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]},
         {"role": "user", "content": [{"type": "text", "text": "u\n"}, {"type": "text", "text": "\nv"}]},
         {"role": "assistant", "content": "a", "tool_calls": None, "weight": 1, "train": True, "name": None}]}),
        (FORMATS["sharegpt"], {"conversations": [{"from": "system", "value": "s"},
         {"from": "human", "value": "u\n\nv"}, {"from": "gpt", "value": "a", "weight": None}]}),
        (FORMATS["sharegpt"], {"conversations": [{"from": "user", "value": "u\n\nv"},
         {"from": "model", "value": "a"}], "system": "s"}),
        (FORMATS["alpaca"], {"instruction": "u", "input": "v", "output": "a", "system": "s"}),
        (FORMATS["prompt_completion"], {"prompt": [{"role": "system", "content": "s"},
         {"role": "user", "content": "u\n\nv"}], "completion": [ANSWER]}),
    ]  # fmt: skip
    for format, row in rows:
        chat = format.read(row, LearnConfig())
        assert chat.messages == [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u\n\nv"},
            {"role": "assistant", "content": "a"},
        ]
        assert chat.supervised == [False, False, True]
        assert chat.tools is None


@pytest.mark.parametrize(
    ("turn", "learned"),
    [
        ({}, True),
        ({"weight": 1}, True),
        ({"weight": 0}, False),
        ({"weight": 0.0}, False),
        ({"train": True}, True),
        ({"train": False}, False),
        ({"tool_calls": []}, True),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, True),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}], "train": False}, False),
        ({"function_call": {"name": "f", "arguments": "{}"}}, True),
    ],
)
def test_weight_and_train_select_learned_turns(turn: dict[str, Any], learned: bool) -> None:
    assert FORMATS["messages"].read({"messages": [USER, {**ANSWER, **turn}]}, LearnConfig()).supervised == [
        False,
        learned,
    ]


def test_tool_calls_reach_the_template_as_objects() -> None:
    function = {"name": "f", "arguments": {"x": 1}}
    expected = [{"type": "function", "function": function}]
    as_text = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    for turn in (
        {"role": "assistant", "content": None, "tool_calls": expected},
        {"role": "assistant", "content": None, "tool_calls": as_text},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]',
        },
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
    ):
        chat = FORMATS["messages"].read({"messages": [USER, turn]}, LearnConfig())
        assert chat.messages[1] == {"role": "assistant", "tool_calls": expected}
        assert chat.supervised == [False, True]


@pytest.mark.parametrize(
    "function", [{"arguments": ""}, {"arguments": " "}, {"arguments": None}, {}, {"arguments": {}}]
)
def test_a_call_without_arguments_has_an_empty_object(function: dict[str, Any]) -> None:
    named = {"name": "f", **function}
    for turn in (
        {"role": "assistant", "tool_calls": [{"id": "c1", "function": named}]},
        {"from": "function_call", "value": json.dumps(named)},
    ):
        chat = FORMATS["messages"].read({"messages": [USER, turn]}, LearnConfig())
        (call,) = chat.messages[1]["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": {}}


def test_an_empty_turn_is_used_where_it_is_not_learned() -> None:
    empty, call = {**ANSWER, "content": ""}, {"function": {"name": "f", "arguments": {}}}
    for turns in ([{**empty, "train": False}, USER, ANSWER], [{**empty, "tool_calls": [call]}, USER, ANSWER]):
        FORMATS["messages"].read({"messages": [USER, *turns]}, LearnConfig())
    last = LearnConfig(last_turn_only=True)
    assert FORMATS["messages"].read({"messages": [USER, empty, USER, ANSWER]}, last).supervised[1] is False
    FORMATS["prompt_completion"].read({"prompt": [USER, empty, USER], "completion": [ANSWER]}, LearnConfig())


NULLS = {"type": "object", "properties": {"city": {"type": "string"}, "date": None}}


@pytest.mark.parametrize("as_text", [False, True])
def test_nulls_of_a_table_are_no_values_and_nulls_of_a_json_string_are(as_text: bool) -> None:
    """JSONL that was written from a table has the nulls that Parquet has; a JSON string is what the user wrote."""
    arguments, function = {"city": "Paris", "date": None}, {"name": "weather", "parameters": NULLS}
    tools = [{"type": "function", "function": function}]
    call = {"function": {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}}
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}],
        "tools": json.dumps(tools) if as_text else tools,
    }
    chat = FORMATS["messages"].read(row, LearnConfig())
    learned = chat.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert learned == (arguments if as_text else {"city": "Paris"})
    assert ("date" in chat.tools[0]["function"]["parameters"]["properties"]) is as_text


@pytest.mark.parametrize("properties", [None, {"city": {}, "date": {}}])
def test_a_null_that_a_tool_may_have_is_a_value(properties: dict | None) -> None:
    arguments = {"city": "Paris", "date": None}
    call = {"function": {"name": "weather", "arguments": arguments}}
    tools = properties and [{"name": "weather", "parameters": {"properties": properties}}]
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": tools}
    (read,) = FORMATS["messages"].read(row, LearnConfig()).messages[1]["tool_calls"]
    assert read["function"]["arguments"] == arguments


def test_two_calls_of_a_turn_have_two_ids() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": {}}}
    turn = {"role": "assistant", "tool_calls": [call, call]}
    with pytest.raises(RowError, match=r"messages\[1\].tool_calls\[1\].id is 'c1'"):
        FORMATS["messages"].read({"messages": [USER, turn]}, LearnConfig())


def test_openai_s_older_names_are_read() -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    row = {
        "messages": [
            {"role": "developer", "content": "Be short."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
            {"role": "function", "name": "weather", "content": "sun"},
            {"role": "assistant", "content": "b"},
        ],
        "functions": [function],
    }
    chat = FORMATS["messages"].read(row, LearnConfig())
    assert [message["role"] for message in chat.messages] == ["developer", "user", "assistant", "tool", "assistant"]
    assert chat.tools == [{"type": "function", "function": function}]


def test_tools_and_tool_results() -> None:
    row = {
        "messages": [USER, CALLING, {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"}],
        "tools": '[{"type": "function"}]',
    }
    chat = FORMATS["messages"].read(row, LearnConfig())
    assert chat.tools == [{"type": "function"}]
    assert chat.messages[2] == {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"}


def test_reasoning_is_read_under_all_its_names() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        chat = FORMATS["messages"].read({"messages": [USER, {**ANSWER, name: "because"}]}, LearnConfig())
        assert chat.messages[1] == {**ANSWER, "reasoning_content": "because", "thinking": "because"}


def messages(*turns: Any, **rest: Any) -> dict[str, Any]:
    return {"messages": [USER, *turns], **rest}


def calling(arguments: Any, **function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments, **function}}]}


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("messages", messages(ANSWER, USER, {"role": "assistant", "content": None}), "messages[3].content is null"),
        ("messages", messages({"role": "assistant"}), "messages[1].content is null"),
        ("messages", messages({"role": "assistant", "content": 5}), "messages[1].content is a number, not a string"),
        (
            "messages",
            messages({"role": "asistant", "content": "a"}),
            "messages[1]: role 'asistant' is unknown; use system, user, assistant or tool",
        ),
        ("messages", messages({"role": "\u0430ssistant", "content": "a"}), "(with U+0430) is unknown"),
        ("messages", messages({"content": "a"}), "messages[1].role is missing"),
        ("messages", messages({"role": None, "content": "a"}), "messages[1].role is null"),
        ("messages", messages("a"), "messages[1] is a string, not an object"),
        ("messages", messages(USER), "no assistant turn"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": 3}, "messages is a number, not a list of messages"),
        ("messages", {"text": "a"}, "no list of messages: expected the key 'messages' or 'conversations'"),
        (
            "messages",
            messages({**ANSWER, "weight": 0.5}),
            "messages[1].weight is 0.5, and a turn is learned whole or not at all: use 0 (context only) or 1 (learn "
            "this turn). To learn a row less than others, move it to a source with a smaller `weight`",
        ),
        ("messages", messages({**ANSWER, "train": "no"}), "messages[1].train is a string; use true or false"),
        ("messages", messages({**ANSWER, "tool_calls": {"a": 1}}), "messages[1].tool_calls is an object, not a list"),
        ("messages", messages({**ANSWER, "tool_calls": [1]}), "messages[1].tool_calls[0] is a number, not an object"),
        ("messages", messages({**ANSWER, "tool_calls": "{"}), "messages[1].tool_calls is not valid JSON"),
        (
            "messages",
            messages({**ANSWER, "content": [{"type": "video"}]}),
            "messages[1].content[0] is of type 'video'; only parts with text or an image can be used",
        ),
        ("messages", messages({**ANSWER, "content": [{"type": "text"}]}), "messages[1].content[0].text is null"),
        (
            "messages",
            messages({**ANSWER, "content": "x\ud800"}),
            r"messages[1].content holds the lone surrogate \ud800 at character 1",
        ),
        ("messages", messages(ANSWER, tools=5), "tools is a number, not a list of JSON schemas"),
        ("messages", messages(ANSWER, tools=["f"]), "tools[0] is a string, not a JSON schema"),
        ("messages", messages(ANSWER, tools=[{"name": ["f"]}]), "tools[0]: the tool's name is a list, not a string"),
        (
            "sharegpt",
            {"conversations": [{"from": "alien", "value": "a"}]},
            "conversations[0]: from 'alien' is unknown; use one of system, human",
        ),
        ("sharegpt", {"conversations": [{"from": "human", "value": None}]}, "conversations[0].value is null"),
        ("alpaca", {"instruction": "u"}, "output is null"),
        ("alpaca", {"instruction": " ", "output": "a"}, "instruction is empty"),
        ("alpaca", {"instruction": ["u"], "output": "a"}, "instruction is a list, not a string"),
        ("messages", messages({**ANSWER, "content": ""}), "messages[1].content is empty"),
        ("messages", messages({**ANSWER, "content": " \n"}, USER, ANSWER), "messages[1].content is empty"),
        ("messages", messages({**ANSWER, "content": [{"type": "text", "text": ""}]}), "messages[1].content is empty"),
        ("messages", messages({"role": "assistant", "value": ""}), "messages[1].value is empty"),
        ("messages", messages({**ANSWER, "content": "", "reasoning": "r"}), "messages[1].content is empty"),
        ("messages", messages({**ANSWER, "content": "<think>r</think>\n"}), "messages[1].content is empty"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": ""}]}, "conversations[0].value is empty"),
        ("alpaca", {"instruction": "u", "output": ""}, "output is empty"),
        ("alpaca", {"instruction": "u", "output": "a", "history": [["v", ""]]}, "history[0][1] is empty"),
        (
            "prompt_completion",
            {"prompt": [USER], "completion": [{**ANSWER, "content": ""}]},
            "completion[0].content is empty",
        ),
        (
            "messages",
            messages(calling('{"city": "Par')),
            "messages[1].tool_calls[0].arguments is not valid JSON: Unterminated string",
        ),
        ("messages", messages(calling("[1]")), "messages[1].tool_calls[0].arguments is a list, not an object"),
        ("messages", messages(calling(5)), "messages[1].tool_calls[0].arguments is a number, not an object"),
        (
            "messages",
            messages(calling(None, parameters={"a": 1})),
            "messages[1].tool_calls[0] has no arguments, but 'parameters'",
        ),
        (
            "messages",
            messages({"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}),
            "messages[1].tool_calls[0].arguments is not valid JSON",
        ),
        (
            "messages",
            messages(CALLING, {"role": "tool", "content": "4", "tool_call_id": "c2"}),
            "messages[2].tool_call_id is 'c2', and the calls before it have 'c1'",
        ),
        (
            "messages",
            messages({"role": "tool", "content": "4", "tool_call_id": "c1"}, CALLING),
            "messages[1].tool_call_id is 'c1', and no turn before it has a call",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "f(1)"}]},
            "conversations[0].value is not valid JSON",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": "{"}'}]},
            "conversations[0].value.tool_calls[0].arguments is not valid JSON",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "5"}]},
            "conversations[0].value is no call",
        ),
        ("prompt_completion", {"prompt": [USER], "completion": [USER]}, "no assistant turn in completion"),
        ("prompt_completion", {"prompt": [USER], "completion": 4}, "completion is a number, not a text, a turn"),
    ],
)
def test_errors_name_the_wrong_key(format: str, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=re.escape(reason)):
        FORMATS[format].read(row, LearnConfig())
