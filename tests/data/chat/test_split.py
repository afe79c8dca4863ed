"""A chat that is longer than a row is split at its turns: nothing that is learned is lost without being counted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.encoded import runs

from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.chat.split import SplitChat, SplitCounts
from fxtune.data.formats.registry import FORMATS

FAMILIES = ["chatml", "llama31", "gemma3", "phi3"]
"""The families whose templates write a turn in the same way at each place of a chat."""
ENCODERS = {family: Encoder(families.tokenizer(family), FORMATS["messages"]) for family in [*FAMILIES, "qwen3"]}


def encode(family: str, messages: list[dict]) -> Document:
    (document,) = ENCODERS[family].encode([{"messages": messages}])
    assert isinstance(document, Document), document
    return document


def split(family: str, messages: list[dict], longest: int) -> SplitChat:
    ENCODERS[family].longest = longest
    return ENCODERS[family].split({"messages": messages}, encode(family, messages))


def text(family: str, document: Document) -> str:
    return families.tokenizer(family).decode(document.ids)


def message(role: str, words: int, number: int, **more) -> dict:
    return {"role": role, "content": f"{role} {number} " + "x " * words + "end", **more}


@st.composite
def chats(draw) -> list[dict]:
    """System or not, then exchanges with answers of any length, some of them not learned."""
    length = st.integers(0, 30)
    messages = [message("system", draw(length), 0)] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 7))):
        messages.append(message("user", draw(length), number))
        more = {"train": False} if number and draw(st.integers(0, 4)) == 0 else {}
        messages.append(message("assistant", draw(length), number, **more))
    return messages


@settings(max_examples=60)
@given(messages=chats(), longest=st.integers(20, 250), family=st.sampled_from(FAMILIES))
def test_no_supervised_token_is_lost_but_those_counted_and_no_turn_is_cut_but_those_counted(messages, longest, family):
    whole = encode(family, messages)
    found = split(family, messages, longest)
    counts, learned = found.counts, runs(whole)
    assert counts.pieces == len(found.pieces)
    assert all(len(piece.ids) <= longest for piece in found.pieces)
    assert sum(sum(piece.supervised) for piece in found.pieces) + counts.lost_supervised == sum(whole.supervised)
    kept = [run for piece in found.pieces for run in runs(piece)]
    cut = [run for run in kept if run not in learned]
    assert all(any(turn[: len(run)] == run for turn in learned) for run in cut), "a cut turn keeps its beginning"
    missing = Counter(learned) - Counter(kept)
    assert len(cut) == counts.truncated
    assert counts.truncated + counts.dropped >= missing.total()
    assert counts.lost_supervised == sum(map(len, missing.elements())) - sum(map(len, cut))
    if not counts.truncated + counts.dropped:
        assert kept == learned, "in their order, each once"
        assert counts.lost_tokens == 0


@settings(max_examples=12)
@given(messages=chats(), longest=st.integers(60, 250), family=st.sampled_from([*FAMILIES, "qwen3"]))
def test_each_piece_is_a_chat_of_whole_exchanges_with_the_system_prompt(messages, longest, family):
    head, body = ([messages[0]], messages[1:]) if messages[0]["role"] == "system" else ([], messages)
    exchanges = [body[at : at + 2] for at in range(0, len(body), 2)]
    possible = {
        text(family, encode(family, [*head, *itertools.chain.from_iterable(exchanges[a:b])]))
        for a, b in itertools.combinations(range(len(exchanges) + 1), 2)
        if any(turn.get("train", True) for turns in exchanges[a:b] for turn in turns if turn["role"] == "assistant")
    }
    found = split(family, messages, longest)
    uncut = [text(family, piece) for piece in found.pieces]
    assert sum(piece not in possible for piece in uncut) <= found.counts.truncated
    for piece in uncut:
        assert not head or head[0]["content"][:10] in piece


def test_as_many_exchanges_as_fit_are_in_a_piece():
    messages = [message("system", 1, 0)]
    for number in range(10):
        messages += [message("user", 2, number), message("assistant", 2, number)]
    two = len(encode("chatml", messages[:5]).ids)
    found = split("chatml", messages, two)
    assert [len(runs(piece)) for piece in found.pieces] == [2] * 5
    assert found.counts == SplitCounts(chats=1, pieces=5)


def test_an_answer_that_is_learned_alone_has_the_context_before_it_that_fits():
    messages = [message("system", 1, 0)]
    for number in range(9):
        learned = {"train": number in (3, 8)}
        messages += [message("user", 2, number), message("assistant", 2, number, **learned)]
    three = len(encode("chatml", messages[:7]).ids)
    found = split("chatml", messages, three + 3)
    shown = [[number for number in range(9) if f"user {number} " in text("chatml", piece)] for piece in found.pieces]
    assert shown == [[1, 2, 3], [6, 7, 8]]
    assert [len(runs(piece)) for piece in found.pieces] == [1, 1]


def test_the_steps_of_an_agent_stay_whole_and_each_piece_repeats_the_question():
    messages = [message("system", 3, 0), message("user", 5, 0)]
    for number in range(6):
        messages += [message("assistant", 8, number), message("tool", 8, number)]
    messages.append(message("assistant", 4, 6))
    longest = len(encode("chatml", messages[:6]).ids)
    found = split("chatml", messages, longest)
    assert [run for piece in found.pieces for run in runs(piece)] == runs(encode("chatml", messages))
    assert found.counts.truncated == 0
    assert len(found.pieces) > 2
    for piece in found.pieces:
        shown = text("chatml", piece)
        assert shown.index("system 0") < shown.index("user 0") < shown.index("assistant ")
        assert shown.count("tool ") == shown.count("assistant\nassistant ") - (piece is found.pieces[-1])


def test_an_answer_that_is_too_long_alone_is_cut_and_counted():
    messages = [message("user", 3, 0), message("assistant", 100, 0), message("user", 2, 1), message("assistant", 2, 1)]
    found, whole = split("chatml", messages, 60), encode("chatml", messages)
    long, short = runs(whole)
    first, second = found.pieces
    assert (len(first.ids), runs(second)) == (60, [short])
    assert runs(first)[0] == long[: len(runs(first)[0])]
    assert found.counts.truncated == 1
    assert found.counts.lost_supervised == len(long) - len(runs(first)[0])


def test_a_question_that_fills_the_row_leaves_nothing_to_learn():
    messages = [message("user", 100, 0), message("assistant", 3, 0)]
    found = split("chatml", messages, 50)
    assert found.pieces == []
    assert found.counts.lost_supervised == sum(encode("chatml", messages).supervised)


def test_a_template_that_refuses_to_begin_in_the_middle_has_its_chats_cut(monkeypatch):
    made = families.tokenizer("chatml")
    refusing = "{% if messages[0].content[:6] != 'user 0' %}{{ raise_exception('begin at the beginning') }}{% endif %}"
    monkeypatch.setattr(made, "chat_template", refusing + made.chat_template)
    encoder = Encoder(made, FORMATS["messages"])
    messages = [turn for n in range(4) for turn in (message("user", 5, n), message("assistant", 5, n))]
    (whole,) = encoder.encode([{"messages": messages}])
    encoder.longest = 50
    found = encoder.split({"messages": messages}, whole)
    assert [piece.ids for piece in found.pieces] == [whole.ids[:50]]
    assert found.counts.lost_tokens == len(whole.ids) - 50


@pytest.mark.parametrize("row", [{"prompt": "two " * 5, "completion": "four " * 60}])
def test_a_plain_completion_is_cut_at_its_end(row):
    encoder = Encoder(families.tokenizer("chatml"), FORMATS["prompt_completion"])
    (whole,) = encoder.encode([row])
    encoder.longest = 40
    found = encoder.split(row, whole)
    assert [piece.ids for piece in found.pieces] == [whole.ids[:40]]
    assert found.counts.lost_supervised == sum(whole.supervised[40:])
