"""Chats longer than a row become a table of pieces; other tables do not depend on the row's length."""

import itertools

import numpy as np
import pytest
from support.rows import write_jsonl

from fxtune.data.batches.build import plan_training
from fxtune.data.config import DataConfig, OnLong, SourceConfig
from fxtune.errors import DataError
from fxtune.system.terminal import progress


def long_chat(number: int, exchanges: int) -> dict:
    turns = [{"role": "system", "content": f"Count by {number}."}]
    for at in range(exchanges):
        turns += [{"role": "user", "content": f"{number}, {at} and?"}, {"role": "assistant", "content": f"{at + 1}."}]
    return {"messages": turns}


@pytest.mark.parametrize("workers", [1, 2])
def test_long_chats_are_tokenized_as_pieces_and_others_as_before(workers, table_of, tmp_path, tokenizer, many_shards):
    """The table without long chats does not depend on the row's length, so that its tokens stay cached."""
    rows = [long_chat(0, 1), long_chat(1, 12), long_chat(2, 2)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    whole = table_of(path)
    longest = int(np.diff(whole.offsets)[2])
    table = table_of(path, sequence_length=longest, workers=workers)
    texts = [tokenizer.decode(table.ids[a:b].tolist()) for a, b in itertools.pairwise(table.offsets)]
    assert texts[0] == tokenizer.decode(whole.ids[: whole.offsets[1]].tolist())
    assert len(texts) == table.split.pieces + 2
    assert all("Count by 1." in piece for piece in texts[1:-1])
    assert table.supervised.sum() == whole.supervised.sum()
    assert len(np.unique(table.digests)) == 3
    assert (table.split.chats, table.split.truncated) == (1, 0)
    assert table.whole.fingerprint == whole.fingerprint != table.fingerprint
    assert table_of(path, sequence_length=len(whole.ids)).fingerprint == whole.fingerprint


def test_a_run_says_what_was_split_and_cut_and_its_batches_hold_whole_turns(table_of, tmp_path):
    rows = [long_chat(number, 10) for number in range(4)]
    rows[0]["messages"][2]["content"] = "1, 2, 3, " * 200
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows), sequence_length=200)
    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], sequence_length=200)
    notes = plan_training([table], data, micro_batch_size=1, global_batch_size=2).notes()
    counts = table.split
    assert (counts.chats, counts.truncated) == (4, 1)
    assert f"4 documents longer than 200 tokens were split into {counts.pieces} pieces at their turns" in notes[0]
    assert "1 of these was cut, because an answer with its question is longer than 200 tokens" in notes[1]
    of = table.whole.ids.size  # all four chats are long
    assert f"{counts.lost_tokens:,} of {of:,} tokens left out ({counts.lost_supervised:,} supervised)" in notes[1]
    assert len(notes) == 2, "pieces of a chat are no copies"


def test_a_chat_that_is_only_cut_is_not_said_to_be_split(table_of, tmp_path, capsys):
    rows = [long_chat(0, 1), long_chat(1, 1)]
    rows[0]["messages"][2]["content"] = "1, 2, 3, " * 200
    with progress.shown("plain"):
        table = table_of(write_jsonl(tmp_path / "a.jsonl", rows), sequence_length=200)
    assert capsys.readouterr().out.count("Tokenizing") == 1
    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], sequence_length=200)
    (note,) = plan_training([table], data, micro_batch_size=1, global_batch_size=1).notes()
    whole = int(np.diff(table.whole.offsets)[0])
    assert "1 document was cut" in note
    assert f"{whole - 200:,} of {whole:,} tokens" in note


def test_chats_whose_answer_does_not_fit_are_said_to_be_unused(table_of, tmp_path):
    rows = [long_chat(number, 1) for number in range(4)]
    rows[0]["messages"][1]["content"] = "1, 2, 3, " * 200
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows), sequence_length=200)
    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], sequence_length=200)
    (note,) = plan_training([table], data, micro_batch_size=1, global_batch_size=2).notes()
    assert "1 document is not used" in note
    assert "data.sequence_length" in note
    assert len(table.by_group) == 3


def test_answers_behind_a_cut_name_the_key_that_cuts(table_of, tmp_path):
    rows = [long_chat(number, 12) for number in range(4)]
    for turn in (turn for row in rows for turn in row["messages"][:-1]):
        turn["train"] = False
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows))
    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], sequence_length=100, on_long=OnLong.truncate)
    with pytest.raises(DataError, match=r"4 cut at .*data\.on_long=split") as caught:
        plan_training([table], data, micro_batch_size=1, global_batch_size=2)
    assert " 0 " not in str(caught.value)


def test_copies_of_a_long_chat_are_copies(table_of, tmp_path):
    table = table_of(write_jsonl(tmp_path / "a.jsonl", [long_chat(1, 10)] * 3), sequence_length=200)
    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], sequence_length=200)
    notes = plan_training([table], data, micro_batch_size=1, global_batch_size=2).notes()
    assert any("2 of 3 documents are copies of others; the most frequent occurs 3 times." in note for note in notes)


def test_the_pieces_of_a_chat_are_on_one_side(table_of, tmp_path):
    table = table_of(write_jsonl(tmp_path / "a.jsonl", [long_chat(n, 12) for n in range(12)]), sequence_length=150)
    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], sequence_length=150, eval_fraction=0.4)
    plan = plan_training([table], data, micro_batch_size=1, global_batch_size=2)
    trained = set(table.digests[plan.stream.segments.group].tolist())
    assert 0 < len(trained) < 12
    assert len(plan.stream.segments) == sum(digest in trained for digest in table.digests.tolist())


def test_chats_whose_questions_fill_a_row_are_an_error(table_of, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [long_chat(1, 1)])
    with pytest.raises(DataError, match=r"none of its 1 chats has an answer in the first 8 tokens\. Raise"):
        table_of(path, sequence_length=8)
