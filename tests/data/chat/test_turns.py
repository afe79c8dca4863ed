"""Spans without generation marks must be those that marks give, whatever people write into their conversations."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.encoded import runs

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.chat.template import ChatTemplate
from fxtune.data.chat.turns import supervised_spans
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.formats.values import RowError

WITH_TOOLS = ("llama31", "qwen3")
LOOKALIKES = ["<|im_end|>", "<|eot_id|>", "</s>", "<|end|>", "</think>", "<|channel|>final<|message|>", " [/INST] "]
LOOKALIKES += ["<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|assistant|>\n"]
LOOKALIKES += ["<start_of_turn>model\n", "<end_of_turn>\n", "<think>\n", "\n</think>\n\n"]
PIECES = [*LOOKALIKES, " ", "\n", "\n\n", "\t", "two", "two and two", "it is four."]
PIECES += ["é", "日本", "😀", "👨‍👩‍👧", "\u00a0", "\u2028"]
CONTENT = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=5).map("".join),
    # Not private-use characters: hypothesis finds ours in the source, and rows that hold them are refused.
    st.text(st.characters(codec="utf-8", exclude_categories=["Co"]), max_size=8),
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "two and two"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "two and two", "parameters": {}}}]


def is_answer(content: str) -> bool:
    return bool(content.rpartition("</think>")[2].strip())


@st.composite
def conversations(draw: st.DrawFn, family: str) -> dict:
    messages: list[dict] = []
    if family not in ("mistral", "mistral_v3") and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(CONTENT)})
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(CONTENT)})
        if family in WITH_TOOLS and draw(st.booleans()):
            messages.append({"role": "assistant", "content": draw(CONTENT), "tool_calls": [CALL]})
            messages.append({"role": "tool", "content": draw(CONTENT)})
        answer = {"role": "assistant", "content": draw(CONTENT.filter(is_answer))}
        if family in ("qwen3", "gptoss") and draw(st.booleans()):
            answer["reasoning_content"] = draw(CONTENT)
        if draw(st.integers(0, 4)) == 0:
            answer["weight"] = 0
        messages.append(answer)
    if draw(st.booleans()):
        messages.append({"role": "user", "content": draw(CONTENT)})
    return {"messages": messages, "tools": TOOLS if family in WITH_TOOLS and draw(st.booleans()) else None}


@pytest.mark.slow
@pytest.mark.parametrize("family", families.FAMILIES)
def test_masks_without_marks_equal_masks_with_marks(family: str) -> None:
    marked = Encoder(families.tokenizer(family, marks=True), FORMATS["messages"])
    stock = Encoder(families.tokenizer(family), FORMATS["messages"])

    @settings(max_examples=30)
    @given(conversations(family))
    def check(row: dict) -> None:
        expected, found = marked.encode([row])[0], stock.encode([row])[0]
        assert isinstance(expected, Document)
        assert found == expected

    check()


def supervised_text(family: str, messages: list[dict], tools: list[dict] | None = None) -> list[str]:
    """The supervised parts of the published template's text, decoded from their tokens."""
    tokenizer = families.tokenizer(family)
    encoder, row = Encoder(tokenizer, FORMATS["messages"]), {"messages": messages, "tools": tools}
    (document,) = encoder.encode([row])
    assert isinstance(document, Document), document
    chat = FORMATS["messages"].read(row, LearnConfig())
    template, *_ = encoder.templates.get(chat.tools is not None)
    text, spans = supervised_spans(template, chat.messages, chat.supervised, chat.tools)
    decoded = [tokenizer.decode(run) for run in runs(document)]
    assert [text[start:end].strip() for start, end in spans] == [one.strip() for one in decoded]
    return decoded


TWO_TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": " what is two and two?"},
    {"role": "assistant", "content": " it is four.\n"},
    {"role": "user", "content": "it is four."},
    {"role": "assistant", "content": "yes 😀"},
]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("chatml", [" it is four.\n<|im_end|>", "yes 😀<|im_end|>"]),
        ("llama31", ["it is four.<|eot_id|>", "yes 😀<|eot_id|>"]),
        ("qwen3", [" it is four.\n<|im_end|>", "<think>\n\n</think>\n\nyes 😀<|im_end|>"]),
        ("gemma3", ["it is four.<end_of_turn>", "yes 😀<end_of_turn>"]),
        ("zephyr", ["it is four.\n</s>", "yes 😀</s>"]),
        ("mistral", ["it is four.</s>", "yes 😀</s>"]),
        ("phi3", ["it is four.\n<|end|>", "yes 😀<|end|>"]),
        (
            "command",
            [
                f"<|START_RESPONSE|>{text}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
                for text in (" it is four.\n", "yes 😀")
            ],
        ),
        (
            "kimi",
            [
                f"<|open|>response<|sep|>{text}<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
                for text in (" it is four.\n", "yes 😀")
            ],
        ),
        ("glm", [" it is four.\n<|user|>", "yes 😀<|user|>"]),
        (
            "gptoss",
            ["<|channel|>final<|message|> it is four.\n<|end|>", "<|channel|>final<|message|>yes 😀<|return|>"],
        ),
    ],
)
def test_published_templates_supervise_exactly_the_answers(family: str, expected: list[str]) -> None:
    # Mistral's drops the system prompt of a chat that ends with an answer, which is an error.
    found = supervised_text(family, TWO_TURNS[1:] if family == "mistral" else TWO_TURNS)
    if family in ("mistral", "phi3", "zephyr"):  # their tokenizers add a space before the first word
        found = [one.lstrip(" ").replace("\n ", "\n") for one in found]
    assert [one.replace(" <", "<") if family in ("phi3", "zephyr") else one for one in found] == expected


def test_qwen3_reasoning_is_supervised_if_the_template_keeps_it() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "second"},
    ]
    assert supervised_text("qwen3", messages) == ["b<|im_end|>", "<think>\nsecond\n</think>\n\nd<|im_end|>"]
    messages[3] = {"role": "assistant", "content": "<think>\nsecond\n</think>\n\nd"}
    assert supervised_text("qwen3", messages) == ["b<|im_end|>", "<think>\nsecond\n</think>\n\nd<|im_end|>"]


def test_answer_inside_a_user_turn_is_not_supervised() -> None:
    """Llama-3.1 writes the first message, of whatever role, as the user's, after the tools."""
    turns = [
        {"role": "assistant", "content": "it is four."},
        {"role": "user", "content": "two and two"},
        {"role": "assistant", "content": "four"},
    ]
    encoder = Encoder(families.tokenizer("llama31"), FORMATS["messages"])
    reason, document = encoder.encode([{"messages": turns, "tools": TOOLS}, {"messages": turns}])
    assert isinstance(reason, str)
    assert "messages[0]" in reason
    assert isinstance(document, Document)


SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
LEARN = [False, True, False]


def found(source: str, messages: list[dict] = CHAT, learn: list[bool] = LEARN) -> list[str]:
    text, spans = supervised_spans(ChatTemplate(source, {"eos_token": "</s>"}, SPECIAL), messages, learn)
    return [text[start:end] for start, end in spans]


def test_mark_ends_after_the_end_of_turn_token() -> None:
    head = "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    tail = "{% else %}<|user|>{{ m.content }}\n{% endif %}{% endfor %}"
    for body in (
        "{% generation %}{{ m.content }}{% endgeneration %}{{ '</s>\n' }}",
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{{ '\n' }}",
        "{% generation %}{{ m.content + '</s>\n' }}{% endgeneration %}",
        "{%- generation -%}{{ m.content }} {% endgeneration %}{{ '</s>\n' }}",
    ):
        (span,) = found(head + body + tail)
        assert span.replace(" ", "") == "a</s>"
        (span,) = found(head + body + tail, [CHAT[0], {"role": "assistant", "content": "a</s>"}], LEARN[:2])
        assert span.replace(" ", "") == "a</s></s>"


def test_misplaced_marks_are_not_used() -> None:
    """Inside a macro, positions count from the call of the macro, so the mark would cover the header."""
    source = (
        "{% macro say(m) %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ say(m) }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert found(source) == ["a</s>"]


def test_marks_on_some_turns_only_are_not_used() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' and loop.last %}{% generation %}{{ m.content }}</s>"
        "{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert found(source, [*CHAT, {"role": "assistant", "content": "b"}], [*LEARN, True]) == ["a</s>", "b</s>"]


def test_header_of_the_next_turn_is_an_end_where_turns_have_no_other() -> None:
    """As in GLM: models stop at the tag of the next turn."""
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    assert found(source) == ["a<|user|>"]
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}"
    assert found(source) == ["a"]


def test_an_end_of_turn_in_plain_letters() -> None:
    source = (
        "{% for m in messages %}## {{ m.role }}\n{{ m.content }}\n## end\n{% endfor %}"
        "{% if add_generation_prompt %}## assistant\n{% endif %}"
    )
    assert found(source) == ["a\n## end"]


def test_content_with_the_sentinels_characters() -> None:
    chat = [
        {"role": "user", "content": "\U000f80000\U000f8001"},
        {"role": "assistant", "content": "\U000f80000\U000f8001"},
    ]
    assert found(PLAIN, chat, LEARN[:2]) == ["\U000f80000\U000f8001</s>"]


def test_reasoning_prompt_that_earlier_turns_lack() -> None:
    """As in QwQ: the generation prompt opens <think>, finished turns lack it, and users quote the prompt."""
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    )
    chat = [
        {"role": "user", "content": "<|assistant|><think>u"},
        CHAT[1],
        CHAT[2],
        {"role": "assistant", "content": "b"},
    ]
    assert found(source, chat, [False, True, False, True]) == ["a</s>", "</think>b</s>"]


def test_a_generation_prompt_that_depends_on_the_conversation() -> None:
    source = (
        "{% set tag = '<think>' if 'ponder' in messages[0].content else '' %}{% for m in messages %}<|{{ m.role }}|>"
        "{{ tag + '-' if m.role == 'assistant' and tag }}{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ tag }}{% endif %}"
    )
    assert found(source) == ["a</s>"]
    assert found(source, [{"role": "user", "content": "ponder"}, CHAT[1]], LEARN[:2]) == ["-a</s>"]


def test_content_that_a_template_escapes_is_located() -> None:
    source = PLAIN.replace("{{ m.content }}", "{{ m.content | tojson }}")
    chat = [CHAT[0], {"role": "assistant", "content": 'say "a"\n'}]
    assert found(source, chat, LEARN[:2]) == ['"say \\"a\\"\\n"</s>']


def test_turns_out_of_order_are_a_bad_row() -> None:
    source = PLAIN.replace("in messages", "in messages[::-1]")
    with pytest.raises(RowError, match=r"writes messages\[3\] inside an earlier turn"):
        found(source, [*CHAT, {"role": "assistant", "content": "b"}], [*LEARN, True])


def test_marks_locate_content_that_is_written_twice() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}({{ m.content }})"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert found(source) == ["a</s>"]


def test_empty_answer_written_differently_is_a_bad_row() -> None:
    source = PLAIN.replace("{{ m.content }}</s>", "{{ '-' + m.content + '-' if m.content else '-' }}")
    source = source.replace("%}<|assistant|>", "%}<|assistant|>-")
    assert found(source) == ["a-"]
    with pytest.raises(RowError, match=r"messages\[1\] changes what the chat template writes"):
        found(source, [CHAT[0], {"role": "assistant", "content": ""}], LEARN[:2])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ m.content }}"),
            r"writes the content of messages\[1\] 2 times",
        ),
        (
            PLAIN.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}"),
            r"writes the content of messages\[1\] 0 times",
        ),
        ("{{ messages[1].content | length }}" + PLAIN, r"messages\[1\] changes what the chat template writes before"),
        (PLAIN + "{{ messages[1].content | length }}", r"messages\[1\] changes what the chat template writes later"),
        (
            PLAIN + "{{ raise_exception('no ' + messages[1].content) }}",
            "the chat template refuses this conversation: no a",
        ),
        (PLAIN + "{{ 1 + messages[1].content }}", "the chat template fails on this conversation: TypeError"),
    ],
)
def test_content_that_cannot_be_located_is_a_bad_row(source: str, reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        found(source)


def test_template_silent_before_the_assistant_supervises_no_user() -> None:
    source = (
        "<s>{% if messages[-1].role == 'assistant' and messages|length > 1 %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% endif %}"
    )
    assert found(source, CHAT[:2], LEARN[:2]) == ["a"]


def test_reasoning_with_a_header_that_changes_each_turn() -> None:
    """No generation prompt is a prefix of the text, so the certain part is supervised: from the reasoning on."""
    source = "{{ messages|length }}" + PLAIN.replace(
        "{{ m.content }}", "{{ '<think>' + m.thinking + '</think>' if m.thinking }}{{ m.content }}"
    )
    answer = {"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "r"}
    assert found(source, [CHAT[0], answer, CHAT[2]]) == ["r</think>a</s>"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_conversation_without_marks_takes_two_renderings(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(families.tokenizer(family), FORMATS["messages"])
    renders: list[int] = []
    draw = ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, *args, **keys: renders.append(1) or draw(self, *args, **keys)
    )
    row = {"messages": [CHAT[0], {"role": "assistant", "content": " a\u00e9 "}] * 20}
    (document,) = encoder.encode([row])
    assert isinstance(document, Document)
    known = len(renders)  # a new shape of conversation is tried in a few more
    assert encoder.encode([row]) == [document]
    assert len(renders) - known == 2
