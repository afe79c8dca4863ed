"""Documents that are too long, and documents that are held out."""

from __future__ import annotations

import pytest
from support.tables import table, training

from fxtune.data.config import OnLong
from fxtune.errors import DataError


def test_long_documents_are_counted_and_noted():
    long, short = (list(range(1, 26)), [True] * 25), (list(range(1, 6)), [True] * 5)
    mute, late = ([1, 2, 3], [True, False, False]), (list(range(1, 26)), [False] * 20 + [True] * 5)
    data = [table([short, long, mute, short, late, long], "chats.jsonl")]
    split = training(data, sequence_length=10)
    assert {
        name: split.summary()[name] for name in ("split", "pieces", "without_targets", "segments", "lost_tokens")
    } == dict(split=3, pieces=9, without_targets=3, segments=2 + 6 + 1, lost_tokens=0)
    truncated = training(data, sequence_length=10, on_long=OnLong.truncate)
    assert truncated.summary()["truncated"] == 3
    assert truncated.summary()["lost_tokens"] == 45
    assert truncated.summary()["segments"] == 4  # the late answer was cut off
    dropped = training(data, sequence_length=10, on_long=OnLong.drop)
    assert (dropped.summary()["dropped"], dropped.summary()["segments"]) == (3, 2)
    assert split.notes()[0] == "chats.jsonl: 3 documents longer than 10 tokens were split into 9 pieces."
    assert "3 documents longer than 10 tokens were truncated, 45 tokens left out" in truncated.notes()[0]
    assert "3 documents longer than 10 tokens were dropped" in dropped.notes()[0]
    assert "1 document or piece had nothing to learn" in dropped.notes()[1]
    assert training([table([short])], sequence_length=10).notes() == []
    with pytest.raises(
        DataError, match=r"chats.jsonl: document 2 has 25 tokens, data.sequence_length is 10, and 3 of 6"
    ):
        training(data, sequence_length=10, on_long=OnLong.error)
