"""The profile of documents: each counted once, lengths, scripts and the distance of their tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fxtune.data.tokenized.profile import profile, script


def chats(path, *answers: str):
    path.write_text(
        "".join(json.dumps({"prompt": "what", "completion": answer}) + "\n" for answer in answers), encoding="utf-8"
    )
    return path


def test_profile_counts_each_document_once(table_of, tokenizer, tmp_path):
    latin = table_of(chats(tmp_path / "a.jsonl", "colour", "colour", "number number"))
    greek = table_of(chats(tmp_path / "b.jsonl", "λόγος λόγος"))
    one, two = (profile([each], each.digests, tokenizer) for each in (latin, greek))
    assert one.documents == 2
    assert one.scripts == {"Latin": 1.0}
    assert set(two.scripts) == {"Greek", "Latin"}
    assert one.tokens.sum() == pytest.approx(1)
    assert one.distance(one) == 0
    assert 0 < one.distance(two) == two.distance(one) < 1
    both = profile([latin, greek], np.concatenate([latin.digests, greek.digests]), tokenizer)
    assert both.documents == 3
    assert both.lengths[0] == one.lengths[0]
    assert both.lengths[-1] == two.lengths[-1]


def test_scripts_are_those_of_unicode_names():
    assert [script(letter) for letter in "aéжλ中ก한ע"] == [
        "Latin",
        "Latin",
        "Cyrillic",
        "Greek",
        "Cjk",
        "Thai",
        "Hangul",
        "Hebrew",
    ]
