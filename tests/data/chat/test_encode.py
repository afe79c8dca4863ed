"""Rows of every format become ids and the mask of what the model learns to write."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.cases import slow_but
from support.encoded import encoded, learned, reason

from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import RowFormat
from fxtune.errors import DataError

# (kind, bos, eos, others). Few, because test_template.py covers the alphabets of byte-level tokenizers.
STYLES = ["bytelevel", "bytelevel_trimmed", "metaspace", "metaspace_prefixed"]
CHAT = {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]}


@pytest.mark.parametrize("style", STYLES)
def test_text_learns_every_token_between_bos_and_eos(style: str) -> None:
    tokenizer = families.build_tokenizer(style, "<s>", "</s>")
    encoder = Encoder(tokenizer, FORMATS["text"])
    document = encoded(encoder, {"text": "two and two 😀"})
    assert document.ids == [*tokenizer("two and two 😀")["input_ids"], tokenizer.eos_token_id]
    assert document.ids[0] == tokenizer.bos_token_id
    assert all(document.supervised)
    for text in ("<s>two and two 😀", "two and two 😀</s>", "<s>two and two 😀</s>"):
        assert encoded(encoder, {"text": text}).ids.count(tokenizer.eos_token_id) == 1
        assert encoded(encoder, {"text": text}).ids.count(tokenizer.bos_token_id) == 1


def test_text_with_a_tokenizer_without_special_tokens() -> None:
    tokenizer = families.build_tokenizer("bytelevel", None, None)
    document = encoded(Encoder(tokenizer, FORMATS["text"]), {"text": "two"})
    assert document.ids == tokenizer("two")["input_ids"]


@pytest.mark.parametrize("style", STYLES)
def test_prompt_and_completion_have_one_text_and_the_prompts_own_tokens(style: str) -> None:
    tokenizer = families.build_tokenizer(style, "<s>", "</s>")
    encoder = Encoder(tokenizer, FORMATS["prompt_completion"])
    for prompt, completion in (("what is two?", " it is four."), ("what 😀 é ", "two 😀  "), ("two  ", "  two")):
        document = encoded(encoder, {"prompt": prompt, "completion": completion})
        assert tokenizer.decode(document.ids) == tokenizer.decode(
            [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
        )
        boundary = document.supervised.index(True)
        assert document.ids[:boundary] == tokenizer(prompt)["input_ids"]
        assert document.supervised == [index >= boundary for index in range(len(document.ids))]


def test_a_word_across_the_border_is_learned_as_the_model_writes_it() -> None:
    tokenizer = families.build_tokenizer("bytelevel", None, "</s>")
    assert len(tokenizer("assistant", add_special_tokens=False)["input_ids"]) == 1
    document = encoded(Encoder(tokenizer, FORMATS["prompt_completion"]), {"prompt": "assis", "completion": "tant"})
    prompt, completion = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("assis", "tant"))
    assert document.ids == [*prompt, *completion, tokenizer.eos_token_id]
    assert document.supervised == [False] * len(prompt) + [True] * (len(completion) + 1)


def test_messages_as_a_json_string_are_the_same_document() -> None:
    """CSV and many Parquet files hold the list as text. Fields of its turns are checked in it, too."""
    encoder = Encoder(families.tokenizer("qwen3"), FORMATS["messages"])
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    expected, found = encoded(encoder, {"messages": turns}), encoded(encoder, {"messages": json.dumps(turns)})
    assert (found.ids, found.supervised) == (expected.ids, expected.supervised)
    assert "messages is not valid JSON" in reason(encoder, {"messages": json.dumps(turns)[:-2]})
    assert "'content' twice" in reason(encoder, {"messages": '[{"role": "user", "content": "a", "content": "b"}]'})
    turns[0]["afterthought"] = "a text that the model would not read"
    assert "afterthought is not read" in reason(encoder, {"messages": json.dumps(turns)})


@pytest.mark.parametrize(
    ("format", "row", "expected"),
    [
        ("tokens", {"input_ids": [1, 999999]}, "input_ids[1] is 999999, outside the tokenizer's vocabulary of"),
        ("tokens", {"input_ids": [-1]}, "input_ids[0] is -1, outside"),
        ("text", {"text": "x\udc00"}, "text holds the lone surrogate \\udc00 at character 1"),
        ("text", "two", "the row is a string, not an object"),
        ("messages", {"messages": [{"role": "user", "content": "a"}]}, "no assistant turn"),
        ("messages", {**CHAT, "tools": [{"name": "\ud800"}]}, "a lone surrogate in tools or tool_calls"),
    ],
)
def test_unusable_rows_return_a_reason(format: str, row: Any, expected: str) -> None:
    found = reason(Encoder(families.tokenizer("qwen3"), FORMATS[format]), row)
    assert expected in found


def test_results_keep_the_order_of_good_and_bad_rows() -> None:
    encoder = Encoder(families.tokenizer("gemma3"), FORMATS["messages"])
    other = {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "fox"}]}
    twice_user = {"messages": [CHAT["messages"][0], *CHAT["messages"]]}
    found = encoder.encode([CHAT, {"messages": 5}, other, twice_user, CHAT])
    assert found[0] == found[4] == encoder.encode([CHAT])[0]
    assert found[2] == encoder.encode([other])[0] != found[0]
    assert found[1] == "messages is a number, not a list of messages"
    assert found[3] == (
        "the chat template refuses this conversation: Conversation roles must alternate user/assistant/user/assistant/..."
    )
    assert encoder.encode([]) == []


def test_ids_equal_apply_chat_template() -> None:
    for family in families.FAMILIES:
        tokenizer = families.tokenizer(family)
        messages = [{"role": "system", "content": "s "}, *CHAT["messages"], {"role": "user", "content": " é 😀"}]
        document = encoded(Encoder(tokenizer, FORMATS["messages"]), {"messages": messages})
        assert document.ids == tokenizer.apply_chat_template(messages, return_dict=False)


def test_an_encoder_pickles() -> None:
    encoder = Encoder(families.tokenizer("llama31"), FORMATS["messages"])
    assert pickle.loads(pickle.dumps(encoder)).encode([CHAT]) == encoder.encode([CHAT])


def test_missing_chat_template_is_one_error() -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    for format in (FORMATS["messages"], FORMATS["sharegpt"], FORMATS["alpaca"]):
        with pytest.raises(DataError, match=r"has no chat template .* set data.chat_template=FILE"):
            Encoder(tokenizer, format)
    encoder = Encoder(tokenizer, FORMATS["prompt_completion"])
    encoded(encoder, {"prompt": "a", "completion": "b"})
    with pytest.raises(DataError, match=r"has no chat template"):
        encoder.encode([{"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}])


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match=r"Slow is not a fast tokenizer"):
        Encoder(Slow(), FORMATS["text"])


def test_hostile_template_stops_the_source() -> None:
    """The template is at fault and not a row, so rows must not be quarantined one by one."""
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    tokenizer.chat_template = (
        "{% if messages[0].content == 'two' %}{{ ''.__class__.__mro__ }}{% endif %}{{ messages[-1].content }}"
    )
    encoder = Encoder(tokenizer, FORMATS["messages"])
    with pytest.raises(DataError, match=r"leave its sandbox"):
        encoder.encode([CHAT])


def test_tools_select_the_named_template() -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    body = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    tokenizer.chat_template = {"default": body, "tool_use": "tools!{{ tools | tojson }}" + body}
    encoder = Encoder(tokenizer, FORMATS["messages"])
    assert tokenizer.decode(encoded(encoder, CHAT).ids).startswith("user:")
    assert tokenizer.decode(encoded(encoder, {**CHAT, "tools": [{"name": "f"}]}).ids).startswith(
        'tools![{"name": "f"}]user:'
    )


def test_template_without_end_of_turn_gets_a_remark() -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (remark,) = Encoder(tokenizer, FORMATS["messages"]).remarks()
    assert "no end-of-turn token" in remark
    assert Encoder(families.tokenizer("llama31"), FORMATS["messages"]).remarks() == []
    assert Encoder(tokenizer, FORMATS["text"]).remarks() == []


@pytest.mark.parametrize("style", STYLES)
def test_text_of_other_roles_is_never_learned(style: str) -> None:
    """Each role has its own alphabet, so that a single leaked or lost token is visible. Whitespace is left out: a newline at the
    start of an answer may share a token with the newline that ends the header."""
    tokenizer = families.build_tokenizer(style, "<s>", "</s>", ("<|im_start|>", "<|im_end|>"))
    tokenizer.chat_template = families.template("chatml", marks=False)
    encoder = Encoder(tokenizer, FORMATS["messages"])
    theirs = st.text("wxyz \n日", max_size=6)
    ours = st.text("0123 \n😀", max_size=6).filter(str.strip)
    turns = st.lists(
        st.tuples(st.sampled_from(["system", "user", "tool"]), theirs) | st.tuples(st.just("assistant"), ours),
        min_size=1,
    )

    @settings(max_examples=30)
    @given(turns)
    def check(turns: list[tuple[str, str]]) -> None:
        answers = [content for role, content in turns if role == "assistant"]
        (found,) = encoder.encode([{"messages": [{"role": role, "content": content} for role, content in turns]}])
        if not answers:
            assert found == "no assistant turn"
            return
        assert isinstance(found, Document)
        kept = [token for token, learn in zip(found.ids, found.supervised, strict=True) if learn]
        assert "".join(tokenizer.decode(kept).split()) == "".join(
            "".join(f"{one}<|im_end|>" for one in answers).split()
        )
        rest = tokenizer.decode([token for token, learn in zip(found.ids, found.supervised, strict=True) if not learn])
        assert not set(rest) & set("0123😀")

    check()


KEYS = """
messages conversations role from content value text prompt completion instruction input output input_ids labels train
assistant_masks tools tool_calls function arguments weight type chosen rejected rejected_response rejected_messages
system question history margin score_chosen score_rejected label kto_tag documents chat_template_kwargs
""".split()  # noqa: SIM905 - a table to read
WORDS = ["", "\ud800", "[]", '[{"role": "user"}]', '[{"from": "gpt"}]', "\n\nHuman: a\n\nAssistant: b", "{}", "["]
WORDS += ["user", "assistant", "system", "tool", "human", "gpt", "text", "<|im_end|>", "</think>"]
LEAVES = st.none() | st.booleans() | st.integers(-2, 600) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=4)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON, "content": st.text(max_size=4) | JSON},
    optional={"tool_calls": JSON, "reasoning_content": JSON, "weight": JSON, "train": JSON, "name": JSON},
)
ROW = (
    JSON
    | st.fixed_dictionaries({"messages": st.lists(TURN, max_size=4)}, optional={"tools": JSON, "system": JSON})
    | st.dictionaries(st.sampled_from(KEYS), LEAVES | st.lists(TURN, max_size=3), max_size=7)
)


@pytest.mark.parametrize("family", slow_but(["qwen3", "llama31", "mistral"], "qwen3"))
def test_no_row_crashes_the_encoder(family: str) -> None:
    encoders = [Encoder(families.tokenizer(family), format) for format in FORMATS.values()]

    @settings(max_examples=40)
    @given(ROW)
    def check(row: Any) -> None:
        for encoder in encoders:
            (found,) = encoder.encode([row])
            if isinstance(found, Document):
                assert len(found.ids) == len(found.supervised) > 0
                assert all(type(token) is int for token in found.ids)
            else:
                assert found

    check()


@pytest.mark.parametrize("family", ["chatml", "llama31", "qwen3", "phi3", "zephyr", "gptoss"])
def test_system_of_the_config_is_added_to_chats_without_one(family: str) -> None:
    tokenizer = families.tokenizer(family)
    encoder = Encoder(tokenizer, FORMATS["messages"], system="the quick brown fox")
    own = {"messages": [{"role": "system", "content": "the quick brown fox"}, *CHAT["messages"]]}
    other = {"messages": [{"role": "system", "content": "two"}, *CHAT["messages"]]}
    plain = Encoder(tokenizer, FORMATS["messages"])
    added = encoded(encoder, CHAT)
    assert (added.ids, added.supervised) == (encoded(plain, own).ids, encoded(plain, own).supervised)
    assert added.ids != encoded(plain, CHAT).ids
    assert encoded(encoder, other).ids == encoded(plain, other).ids, "a chat's own system message stays"
    assert learned(added, tokenizer) == learned(encoded(plain, CHAT), tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{% if m.role != 'system' %}{{ m.content + '</s>' }}{% endif %}{% endfor %}",
            "not write",
        ),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}x", "no system"),
    ],
    ids=["dropped", "refused"],
)
def test_system_that_the_template_does_not_write_is_refused(template: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    with pytest.raises(DataError, match=rf"data.system: .*{reason}.*data.chat_template"):
        Encoder(tokenizer, FORMATS["messages"], str(tmp_path / "chat.jinja"), system="two")
    Encoder(tokenizer, FORMATS["messages"], str(tmp_path / "chat.jinja"))


def test_system_prompt_for_text_is_reported_as_unused() -> None:
    tokenizer = families.build_tokenizer("bytelevel", None, None)
    assert "data.system" in Encoder(tokenizer, FORMATS["text"], system="two").remarks()[0]


@pytest.mark.parametrize(
    ("format", "eos", "said"),
    [
        (FORMATS["prompt_completion"], None, True),
        (FORMATS["text"], None, True),
        (FORMATS["prompt_completion"], "</s>", False),
        (FORMATS["tokens"], None, False),
    ],
)
def test_a_tokenizer_without_an_end_of_text_token_is_said(format: RowFormat, eos: str | None, said: bool) -> None:
    remarks = Encoder(families.build_tokenizer("bytelevel", "<s>", eos), format).remarks()
    assert any("does not learn where to stop" in remark and "model.tokenizer" in remark for remark in remarks) == said


def test_group_has_the_documents_of_its_rows_in_order_with_their_labels() -> None:
    tokenizer = families.tokenizer("chatml")
    rows = [
        CHAT,
        {"question": "two", "answer": "four"},
        {"text": "two and two"},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, -100]},
    ]
    formats = [FORMATS["messages"], FORMATS["prompt_completion"], FORMATS["text"], FORMATS["tokens"]]
    encoder = Encoder(tokenizer, FORMATS["group"])
    (group,) = pickle.loads(pickle.dumps(encoder)).encode([{"documents": rows, "labels": [1, 0.5, None, 0]}])
    assert isinstance(group, EncodedGroup)
    for document, row, format in zip(group.documents, rows, formats, strict=True):
        row = {"prompt": row["question"], "completion": row["answer"]} if "question" in row else row
        assert document == encoded(Encoder(tokenizer, format), row)
    assert group.labels[:2] == [1, 0.5]
    assert math.isnan(group.labels[2])
    (unlabelled,) = encoder.encode([{"documents": rows}])
    assert isinstance(unlabelled, EncodedGroup)
    assert all(map(math.isnan, unlabelled.labels))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"documents": [{"text": "two"}, {"body": "two"}]}, "documents[1]: no format"),
        ({"documents": [{"text": "two"}, {"text": " "}]}, "documents[1]: text is empty"),
        ({"documents": [{"text": "two", "note": "lost"}]}, "documents[0]: column 'note' is not read"),
        ({"documents": [{"documents": [{"text": "two"}]}]}, "documents[0]: no format"),
        ({"documents": [{"text": "two"}], "title": "lost"}, "column 'title' is not read"),
    ],
)
def test_group_that_cannot_be_used_has_a_reason(row: Any, said: str) -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    assert said in reason(Encoder(tokenizer, FORMATS["group"]), row)
