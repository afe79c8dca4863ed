"""A row of preferences that is too long loses the beginning of its prompt, the same tokens in both documents."""

from __future__ import annotations

import numpy as np
import pytest
from support import families
from support.rows import write_jsonl

from fxtune.data.batches.build import plan_training
from fxtune.data.config import DataConfig, OnLong, SourceConfig
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError


@pytest.fixture
def table_of(tokenizer, tmp_path):
    """Tokenize a path with settings of `data`, with a cache in tmp_path."""

    def call(path, **settings):
        data = DataConfig(cache_dir=str(tmp_path / "cache"), **{"workers": 1, **settings})
        return tokenize(SourceConfig(path=str(path)), data, tokenizer, progress=False)

    return call


def pair(number: int, question: int = 1, answer: int = 1) -> dict:
    ask = [{"role": "user", "content": f"{number}: " + "one " * question}]
    return {"prompt": ask, "chosen": f"{number} " + "two " * answer, "rejected": f"{number} " + "six " * answer}


ROWS = [pair(0), pair(1, question=120), pair(2, question=40, answer=90), pair(3, question=4)]


def plan_of(table, data: DataConfig):
    return plan_training([table], data, micro_batch_size=2, global_batch_size=2)


def groups_of(table) -> list[list[tuple[list[int], list[bool]]]]:
    documents = [
        (table.ids[begin:end].tolist(), table.supervised[begin:end].tolist())
        for begin, end in zip(table.offsets[:-1], table.offsets[1:], strict=True)
    ]
    return [documents[begin:end] for begin, end in zip(table.groups[:-1], table.groups[1:], strict=True)]


@pytest.mark.parametrize(("packing", "workers"), [(True, 1), (True, 2), (False, 1)])
def test_prompts_lose_their_beginning_and_answers_stay_whole(packing, workers, table_of, tmp_path, many_shards):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    length = 150 if packing else 100
    options = dict(sequence_length=length, packing=packing, on_long=OnLong.truncate)
    table, whole = table_of(path, workers=workers, **options), table_of(path)
    before, after = groups_of(whole), groups_of(table)
    sizes = [sum(len(ids) for ids, _ in group) if packing else max(len(ids) for ids, _ in group) for group in before]
    assert [size > length for size in sizes] == [False, True, True, False]
    kept = [before[0], before[1], before[3]]  # the answers of the third row do not fit
    assert len(after) == 3
    for group, shorter in zip(kept, after, strict=True):
        lost = {len(ids) - len(short) for (ids, _), (short, _) in zip(group, shorter, strict=True)}
        assert len(lost) == 1, "both documents lose the same"
        for (ids, supervised), (short, learned) in zip(group, shorter, strict=True):
            assert (short, learned) == (ids[len(ids) - len(short) :], supervised[len(ids) - len(short) :])
            assert sum(learned) == sum(supervised)
            assert not learned[0]
        used = [len(short) for short, _ in shorter]
        assert (sum(used) if packing else max(used)) <= length
    counts = table.split
    assert (counts.chats, counts.truncated, counts.dropped) == (2, 1, 1)
    assert counts.lost_tokens == sum(len(ids) for ids, _ in before[1]) - sum(len(ids) for ids, _ in after[1])
    assert set(table.digests) < set(whole.digests), "a row is held out whatever its row's length"
    assert table.whole.fingerprint == whole.fingerprint != table.fingerprint
    rows = [row.value for row in usable_rows(SourceConfig(path=str(path)), table, DataConfig())]
    assert rows == ROWS

    data = DataConfig(sources=[SourceConfig(path="a.jsonl")], **options)
    notes = " ".join(plan_of(table, data).notes())
    assert f"1 pair longer than {length} tokens lost the beginning of their prompts" in notes
    assert f"{counts.lost_tokens:,} tokens left out" in notes
    assert "1 pair was left out, because the answers alone are too long" in notes
    assert "are copies of others" not in notes


def test_copies_of_a_long_row_are_copies(table_of, tmp_path):
    options = dict(sequence_length=150, on_long=OnLong.truncate)
    table = table_of(write_jsonl(tmp_path / "a.jsonl", [*ROWS[:2], ROWS[1]]), **options)
    notes = " ".join(plan_of(table, DataConfig(sources=[SourceConfig(path="a.jsonl")], **options)).notes())
    assert "1 of 3 pairs are copies of others; the most frequent occurs 2 times" in notes


def test_beginning_of_text_stays(tmp_path):
    tokenizer = families.build_tokenizer("bytelevel", "<s>", "</s>")
    row = {"prompt": "one " * 50, "chosen": "two", "rejected": "six"}
    source = SourceConfig(path=str(write_jsonl(tmp_path / "a.jsonl", [row])))
    data = DataConfig(sequence_length=40, on_long=OnLong.truncate, cache_dir=str(tmp_path), workers=1)
    table = tokenize(source, data, tokenizer, progress=False)
    for ids, supervised in groups_of(table)[0]:
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.decode([token for token, on in zip(ids, supervised, strict=True) if on]) in (
            "two</s>",
            "six</s>",
        )


@pytest.mark.parametrize("on_long", [OnLong.split, OnLong.error])
def test_other_choices_refuse_a_long_row_and_name_the_way(on_long, table_of, tmp_path):
    options = dict(sequence_length=100, on_long=on_long)
    table = table_of(write_jsonl(tmp_path / "a.jsonl", ROWS), **options)
    assert table.whole is None
    with pytest.raises(DataError, match=r"pair 2 has .* tokens.*set data.on_long to drop, or to trun"):
        plan_of(table, DataConfig(sources=[SourceConfig(path="a.jsonl")], **options))


def test_drop_leaves_a_long_row_out_whole(table_of, tmp_path):
    options = dict(sequence_length=150, on_long=OnLong.drop)
    table = table_of(write_jsonl(tmp_path / "a.jsonl", ROWS), **options)
    plan = plan_of(table, DataConfig(sources=[SourceConfig(path="a.jsonl")], **options))
    assert plan.summary()["dropped"] == 2
    assert sum(plan.groups(step) for step in range(plan.steps)) == 2


def test_rows_without_one_that_fits_are_refused(table_of, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [pair(0, answer=200)])
    with pytest.raises(DataError, match=r"the answers.* are longer than data\.sequence_length=100"):
        table_of(path, sequence_length=100, on_long=OnLong.truncate)


def test_a_judged_answer_loses_the_beginning_of_its_prompt(table_of, tmp_path):
    rows = [
        {"prompt": "one " * 80, "completion": "two " * 10, "label": True},
        {"prompt": "one ", "completion": "two " * 90, "label": False},
        {"prompt": "one ", "completion": "six", "label": False},
    ]
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows), sequence_length=50, on_long=OnLong.truncate)
    assert np.diff(table.offsets).max() == 50
    assert table.labels.tolist() == [1.0, 0.0]
    assert (table.split.truncated, table.split.dropped) == (1, 1)
