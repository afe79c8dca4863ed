"""Both documents of a pair begin with the same tokens, the prompt, and each answer is learned whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.rows import write_jsonl

from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.chat.pairs import shortened
from fxtune.data.config import DataConfig, OnBadRow, OnRewritten, SourceConfig
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError

FAMILIES = list(families.FAMILIES)
ASK = {"role": "user", "content": "two and two?"}
# Few words, so that answers often begin alike, or one is the beginning of the other.
words = st.lists(st.sampled_from(["it", "is", "four", " ", "\n", "é", "<think>"]), min_size=1, max_size=4).map(
    " ".join
)
spoken = words.filter(lambda text: text.strip() and "<think>" not in text)


@st.composite
def pairs(draw: st.DrawFn, reasons: bool = False) -> dict[str, Any]:
    """A row of two whole chats that share at least one question."""
    turns: list[dict[str, Any]] = []
    if draw(st.booleans()):
        turns.append({"role": "system", "content": draw(spoken)})
    for _ in range(draw(st.integers(0, 2))):
        turns += [{"role": "user", "content": draw(spoken)}, answer(draw, reasons)]
    turns.append({"role": "user", "content": draw(spoken)})
    return {"chosen": [*turns, answer(draw, reasons)], "rejected": [*turns, answer(draw, reasons)]}


def answer(draw: st.DrawFn, reasons: bool) -> dict[str, Any]:
    turn = {"role": "assistant", "content": draw(spoken)}
    return turn | ({"reasoning_content": draw(spoken)} if reasons and draw(st.booleans()) else {})


def encoded(encoder: Encoder, row: Any) -> EncodedGroup | str:
    (found,) = encoder.encode([row])
    assert not isinstance(found, Document)
    return found


ENCODERS = {
    family: (
        Encoder(families.tokenizer(family), FORMATS["preference_chats"]),
        Encoder(families.tokenizer(family), FORMATS["messages"], learn=LearnConfig(last_turn_only=True)),
    )
    for family in FAMILIES
}


def require_pair(family: str, row: dict[str, Any]) -> None:
    """Fail unless both documents are those of two supervised chats whose last answer is learned, with one prompt."""
    pair, single = ENCODERS[family]
    found = encoded(pair, row)
    alone = single.encode([{"messages": row[name]} for name in ("chosen", "rejected")])
    if reasons := [result for result in alone if isinstance(result, str)]:  # the template takes no system prompt
        assert isinstance(found, str)
        assert reasons[0] in found or "identical" in found
        return
    chosen, rejected = (result for result in alone if isinstance(result, Document))
    if chosen.ids == rejected.ids:
        assert isinstance(found, str)
        assert "identical" in found or "the same tokens" in found
        return
    assert isinstance(found, EncodedGroup), found
    prompts = []
    for document, expected in zip(found.documents, (chosen, rejected), strict=True):
        assert (document.ids, document.supervised) == (expected.ids, expected.supervised)
        border = document.supervised.index(True)
        prompts.append(document.ids[:border])
        last = len(document.supervised) - document.supervised[::-1].index(True)
        assert all(document.supervised[border:last]), "no token of the answer is left out"
    assert prompts[0] == prompts[1]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FAMILIES), pairs())
def test_pairs_have_one_prompt_and_whole_answers(family: str, row: dict[str, Any]) -> None:
    require_pair(family, row)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["qwen3", "gptoss", "chatml"]), pairs(reasons=True))
def test_answers_with_and_without_reasoning_have_one_prompt(family: str, row: dict[str, Any]) -> None:
    """trl#6433: a prompt that shrinks for one answer takes `<think>` from the other one."""
    if family == "chatml":
        row = {
            name: [
                {
                    "role": turn["role"],
                    "content": f"<think>\n{turn['reasoning_content']}\n</think>\n\n{turn['content']}",
                }
                if "reasoning_content" in turn
                else turn
                for turn in chat
            ]
            for name, chat in row.items()
        }
    require_pair(family, row)


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["bytelevel", "metaspace_prefixed"]), words, words, words)
def test_texts_have_one_prompt_and_one_end(style: str, prompt: str, chosen: str, rejected: str) -> None:
    """trl#4908: an end-of-text token, and not two."""
    tokenizer = families.build_tokenizer(style, "<s>", "</s>")
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    found = encoded(Encoder(tokenizer, FORMATS["preference"]), row)
    if not (chosen.strip() and rejected.strip()) or chosen == rejected:
        assert isinstance(found, str)
        return
    if isinstance(found, str):
        assert "a token lies across its end" in found or "the same tokens" in found
        return
    borders = [document.supervised.index(True) for document in found.documents]
    first, second = found.documents
    assert first.ids[: borders[0]] == second.ids[: borders[1]]
    for document, border in zip(found.documents, borders, strict=True):
        assert document.ids.count(tokenizer.eos_token_id) == 1
        assert document.ids[-1] == tokenizer.eos_token_id
        assert all(document.supervised[border:])


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.integers(1, 40), min_size=1, max_size=2),
    st.integers(2, 90),
    st.booleans(),
    st.booleans(),
)
def test_shorter_prompts_lose_as_little_as_fits(
    prompt: int, answers: list[int], longest: int, packing: bool, has_beginning: bool
) -> None:
    beginning, size = [-1], max(prompt, 1)
    head = (beginning if has_beginning else [0]) + list(range(1, size))
    documents = [
        Document(head + [100 * (at + 1)] * count, [False] * size + [True] * count) for at, count in enumerate(answers)
    ]
    found = shortened(documents, longest, packing, beginning)
    lengths = [1 + count for count in answers]  # of a prompt of one token
    assert (found is None) == ((sum if packing else max)(lengths) > longest)
    if found is None:
        return
    used = [len(document.ids) for document in found]
    total = (sum if packing else max)(used)
    assert total <= longest
    lost = {len(whole.ids) - len(part.ids) for whole, part in zip(documents, found, strict=True)}
    assert len(lost) == 1
    assert lost == {0} or total > longest - (len(used) if packing else 1), "no token more than needed"
    for whole, part, count in zip(documents, found, answers, strict=True):
        assert part.ids[-count:] == whole.ids[-count:]
        assert part.supervised == [False] * (len(part.ids) - count) + [True] * count
        assert not has_beginning or part.ids[0] == -1


def test_prompts_that_a_template_writes_otherwise_are_a_bad_row(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ messages | length }} turns: "
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = Encoder(
        families.tokenizer("chatml"),
        FORMATS["preference"],
        chat_template=str(template),
        on_rewritten=OnRewritten.keep,
    )
    row = {"prompt": [ASK], "chosen": "four", "rejected": "five"}
    asking = [{"role": "assistant", "content": "five?"}, ASK, {"role": "assistant", "content": "five"}]
    found = encoded(encoder, {**row, "rejected": asking})
    assert isinstance(found, str)
    assert "the prompt has other tokens before chosen" in found
    assert "the chat template writes it otherwise" in found
    assert isinstance(encoded(encoder, row), EncodedGroup)
    same = encoded(encoder, {**row, "chosen": "five\n"})
    assert same == "chosen and rejected have the same tokens, so there is nothing to prefer"


def test_a_reason_of_the_template_names_the_answer() -> None:
    encoder = Encoder(families.tokenizer("gemma3"), FORMATS["preference"])
    doubled = [{"role": "assistant", "content": "five"}, {"role": "assistant", "content": "six"}]
    found = encoded(encoder, {"prompt": [ASK], "chosen": "four", "rejected": doubled})
    assert isinstance(found, str)
    assert found.startswith("rejected: the chat template refuses this conversation")


def test_parts_of_a_row_that_no_answer_has_are_bad_rows() -> None:
    encoder = Encoder(families.tokenizer("chatml"), FORMATS["preference"])
    row = {"prompt": [ASK], "chosen": "four", "rejected": "five"}
    assert "column 'facts' is not read" in str(encoded(encoder, {**row, "facts": "two is even"}))
    noted = [{"role": "assistant", "content": "five", "note": "wrong"}]
    assert "rejected[0].note is not read" in str(encoded(encoder, {**row, "rejected": noted}))
    assert isinstance(encoded(encoder, {**row, "question": "two and two?"}), EncodedGroup)


def test_bad_rows_have_their_file_and_line(tmp_path: Path) -> None:
    good = {"prompt": "two? ", "chosen": "four", "rejected": "five"}
    rows = [good, {**good, "rejected": "four"}, {**good, "chosen": ""}, {**good, "chosen": "six", "margin": 2}]
    source = SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", rows)))
    data = DataConfig(cache_dir=str(tmp_path), workers=1)
    tokenizer = families.tokenizer("chatml")
    with pytest.raises(DataError, match=r"a\.jsonl:2: chosen and rejected are identical"):
        tokenize(source, data, tokenizer, progress=False)
    data.on_bad_row = OnBadRow.quarantine
    table = tokenize(source, data, tokenizer, quarantine := tmp_path / "quarantine.jsonl", progress=False)
    bad = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert [entry["where"].rpartition("/")[2] for entry in bad] == ["a.jsonl:2", "a.jsonl:3"]
    assert (table.format.name, table.groups.tolist()) == ("preference", [0, 2, 4])
    assert table.labels is not None
    assert table.labels[2:].tolist() == [2.0, 0.0]
