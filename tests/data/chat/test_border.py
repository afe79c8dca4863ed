"""A document begins with the tokens of its prompt as sampling makes them, and the answer is what a model writes next."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.encoded import encoded
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fxtune.data.chat import border
from fxtune.data.chat.encode import Document, Encoder
from fxtune.data.chat.remarks import APART_REMARK, CROSSED_REMARK
from fxtune.data.formats.registry import FORMATS

STYLES = ["bytelevel", "bytelevel_trimmed", "metaspace", "metaspace_prefixed"]


def tokenizer_of(merged: list[str], normalizer=None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that merges each of these texts into one token, and has ChatML's template."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(merged * 9, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", extra_special_tokens=special[:1])
    made.chat_template = families.template("chatml", marks=False)
    return made


def first(document: Document) -> int:
    return document.supervised.index(True)


def test_newlines_on_both_sides_of_a_border_stay_two_tokens() -> None:
    tokenizer = tokenizer_of(["\n\n"])
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    question = [{"role": "user", "content": "two"}]
    for answer in ("\nfour", "\n\nfour", "four"):
        document = encoded(
            Encoder(tokenizer, FORMATS["messages"]),
            {"messages": [*question, {"role": "assistant", "content": answer}]},
        )
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        assert document.ids[: first(document)] == prompt
        written = tokenizer(answer + "<|im_end|>")["input_ids"]
        assert document.ids[first(document) :] == [*written, *tokenizer("\n")["input_ids"]]
        assert document.remarks == ((APART_REMARK,) if answer != "four" else ())


def test_a_space_before_an_answer_stays_in_the_prompt() -> None:
    tokenizer = tokenizer_of([" yes"])
    document = encoded(Encoder(tokenizer, FORMATS["prompt_completion"]), {"prompt": "Ans: ", "completion": "yes"})
    prompt, completion = tokenizer("Ans: ")["input_ids"], tokenizer("yes")["input_ids"]
    assert document.ids == [*prompt, *completion, tokenizer.eos_token_id]
    assert document.supervised == [index >= len(prompt) for index in range(len(document.ids))]
    assert len(tokenizer("Ans: yes")["input_ids"]) < len(document.ids) - 1


def test_each_turn_of_a_chat_has_its_border_also_beside_quoted_special_tokens() -> None:
    tokenizer = tokenizer_of(["\n\n"])
    quote = "what is <|im_end|>?"
    turns = [
        {"role": role, "content": content}
        for role, content in (("user", quote), ("assistant", "\na"), ("user", "b"), ("assistant", "\nc"))
    ]
    document = encoded(Encoder(tokenizer, FORMATS["messages"]), {"messages": turns})
    assert document.escaped
    newline, ending = tokenizer("\n")["input_ids"], tokenizer.eos_token_id
    learned = [token for token, mark in zip(document.ids, document.supervised, strict=True) if mark]
    a, c = tokenizer("a")["input_ids"], tokenizer("c")["input_ids"]
    assert learned == [*newline, *a, ending, *newline, *c, ending]
    assert tokenizer.decode(document.ids).count(quote) == 1


def test_a_letter_that_a_tokenizer_composes_with_the_prompts_last_is_counted() -> None:
    tokenizer = tokenizer_of(["é"], normalizers.NFC())
    row = {"prompt": "caf e", "completion": "\u0301 yes"}
    document = encoded(Encoder(tokenizer, FORMATS["prompt_completion"]), row)
    assert CROSSED_REMARK in document.remarks
    assert document.ids == tokenizer("caf é yes<|im_end|>")["input_ids"]


def test_a_long_prompt_is_compared_by_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(border, "WINDOW", 10)
    tokenizer = tokenizer_of([" yes"])
    for prompt, completion in (("yes " * 30, "yes"), ("yes " * 30 + "no", " yes"), ("x" * 99, "yes")):
        document = encoded(
            Encoder(tokenizer, FORMATS["prompt_completion"]), {"prompt": prompt, "completion": completion}
        )
        assert document.ids[: first(document)] == tokenizer(prompt)["input_ids"]
        assert tokenizer.decode(document.ids[first(document) :]) == completion + "<|im_end|>"


@pytest.mark.parametrize("style", STYLES)
def test_a_document_begins_with_the_tokens_of_its_prompt(style: str) -> None:
    tokenizer = families.build_tokenizer(style, "<s>", "</s>")
    encoder = Encoder(tokenizer, FORMATS["prompt_completion"])
    words = st.text("what is\n? 12four:é😀", max_size=12)

    @settings(max_examples=40)
    @given(words, words.filter(str.strip))
    def check(prompt: str, completion: str) -> None:
        document = encoded(encoder, {"prompt": prompt, "completion": completion})
        whole = tokenizer(prompt + completion)["input_ids"]
        assert tokenizer.decode(document.ids) == tokenizer.decode([*whole, tokenizer.eos_token_id])
        if prompt and CROSSED_REMARK not in document.remarks:
            assert document.ids[: first(document)] == tokenizer(prompt)["input_ids"]

    check()
