"""A chat template from a file in place of the tokenizer's own, and the time that a template writes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from support import families
from support.encoded import encoded, learned

from fxtune.data.chat.encode import Encoder
from fxtune.data.formats.registry import FORMATS
from fxtune.errors import DataError

CHAT = {"messages": [{"role": "user", "content": "two"}, {"role": "assistant", "content": "four"}]}


def test_template_file_replaces_the_tokenizers_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    turns = "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}{{ eos_token }}{% endfor %}"
    file.write_text(turns + "{% if add_generation_prompt %}[assistant]\n{% endif %}")
    tokenizer = families.tokenizer("chatml")
    document = encoded(Encoder(tokenizer, FORMATS["messages"], str(file)), CHAT)
    assert tokenizer.decode(document.ids) == "[user]\ntwo<|im_end|>[assistant]\nfour<|im_end|>"
    assert learned(document, tokenizer) == "four<|im_end|>"
    # Without a generation prompt the model must write its own header, so it learns the header.
    file.write_text(turns)
    document = encoded(Encoder(tokenizer, FORMATS["messages"], str(file)), CHAT)
    assert learned(document, tokenizer) == "[assistant]\nfour<|im_end|>"
    with pytest.raises(DataError, match=r"data.chat_template=.*absent.jinja: there is no such file"):
        Encoder(tokenizer, FORMATS["messages"], str(tmp_path / "absent.jinja"))
    file.write_text(" \n")
    with pytest.raises(DataError, match=r"the file is empty"):
        Encoder(tokenizer, FORMATS["messages"], str(file))
    file.write_text("{% for %}")
    with pytest.raises(DataError, match=r"does not compile: line 1"):
        Encoder(tokenizer, FORMATS["messages"], str(file))


TIMED = (
    "{%- if strftime_now is defined %}{{ strftime_now('%d %b %Y %H:%M:%S') }}\n{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{%- endfor %}"
)


def test_the_time_in_a_template_is_that_of_the_run(tmp_path: Path) -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<|im_start|>", "<|im_end|>")
    template = tmp_path / "timed.jinja"
    template.write_text(TIMED)
    encoder = Encoder(tokenizer, FORMATS["messages"], str(template), template_time="2024-02-29T07:08:09")
    for again in (encoder, pickle.loads(pickle.dumps(encoder))):
        assert tokenizer.decode(encoded(again, CHAT).ids).startswith("29 Feb 2024 07:08:09")
    assert encoder.written_times() == ["29 Feb 2024 07:08:09"]
    assert any("29 Feb 2024 07:08:09" in remark and "data.template_time" in remark for remark in encoder.remarks())
    present = Encoder(tokenizer, FORMATS["messages"], str(template))
    assert encoded(present, CHAT).ids == encoded(present, CHAT).ids != encoded(encoder, CHAT).ids


@pytest.mark.parametrize(
    ("call", "texts"),
    [
        ("strftime_now('%Y')", ["2024"]),
        ('strftime_now( "%d %b" ) + strftime_now("%Y")', ["2024", "29 Feb"]),
        ("'no time'", []),
    ],
)
def test_what_a_template_writes_of_the_time(tmp_path: Path, call: str, texts: list[str]) -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<|im_start|>", "<|im_end|>")
    template = tmp_path / "timed.jinja"
    template.write_text("{# strftime_now #}{{ " + call + " }}" + TIMED[TIMED.index("{%- for") :])
    encoder = Encoder(tokenizer, FORMATS["messages"], str(template), template_time="2024-02-29T07:08:09")
    assert encoder.written_times() == texts
    assert all(text in tokenizer.decode(encoded(encoder, CHAT).ids) for text in texts)


def test_a_time_that_cannot_be_fixed_is_refused(tmp_path: Path) -> None:
    tokenizer = families.build_tokenizer("bytelevel", "<|im_start|>", "<|im_end|>")
    template = tmp_path / "timed.jinja"
    template.write_text("{% set format = '%H' %}{{ strftime_now(format) }}" + TIMED)
    with pytest.raises(DataError, match=r"data\.chat_template"):
        Encoder(tokenizer, FORMATS["messages"], str(template))
