"""A tokenized source on disk: arrays, bad rows, counts."""

import json
import pickle
from hashlib import blake2b

import numpy as np
import pytest
from support.rows import numbered_chat, token_folders, write_jsonl

from fxtune.data.chat.encode import Encoder
from fxtune.data.config import OnBadRow
from fxtune.data.formats.registry import FORMATS
from fxtune.errors import DataError


def test_table_holds_ids_mask_and_digest_of_each_document(table_of, tokenizer, tmp_path):
    rows = [numbered_chat(i) for i in range(300)]
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows))
    expected = Encoder(tokenizer, FORMATS["messages"]).encode(rows)
    assert len(table) == 300
    assert table.format is FORMATS["messages"]
    assert (table.ids.dtype, table.supervised.dtype, table.digests.dtype) == (np.int32, np.bool_, np.uint64)
    for index, document in enumerate(expected):
        here = slice(table.offsets[index], table.offsets[index + 1])
        assert table.ids[here].tolist() == document.ids
        assert table.supervised[here].tolist() == document.supervised
        digest = blake2b(np.array(document.ids, "<i4").tobytes(), digest_size=8).digest()
        assert table.digests[index].tobytes() == digest
    assert table.supervised_tokens == table.supervised.sum() > 0
    again = pickle.loads(pickle.dumps(table))
    assert len(pickle.dumps(table)) < 1000
    assert (again.name, again.fingerprint) == (table.name, table.fingerprint)
    assert np.array_equal(again.ids, table.ids)


def test_cached_table_quarantines_its_bad_rows_again(table_of, tmp_path):
    rows = [numbered_chat(0), "{broken", numbered_chat(1), {"messages": []}, [1], numbered_chat(2)]
    path, copy = write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "copies" / "b c.jsonl", rows)
    for source in (path, copy, copy):  # built, from the cache under another name, and again as by a resumed run
        out = tmp_path / f"{source.stem}.quarantine"
        if out.exists():
            out.write_text(out.read_text()[:-9])  # as after a kill
        table = table_of(source, quarantine=out, on_bad_row=OnBadRow.quarantine)
        held = [json.loads(line) for line in out.read_text().splitlines()]
        assert (len(table), table.bad_rows) == (3, 3)
        assert [entry["where"] for entry in held] == [f"{source}:2", f"{source}:4", f"{source}:5"]
        assert [entry["row"] for entry in held] == ["{broken", {"messages": []}, [1]]
        assert all(entry["error"] for entry in held)
    assert len(token_folders(tmp_path)) == 1
    with pytest.raises(DataError, match=r"b c\.jsonl:2: not JSON"):
        table_of(copy)


def test_table_of_groups_holds_their_bounds_and_labels(table_of, tokenizer, tmp_path):
    texts = [["a", "b", "c"], ["d"], ["e", "f"]]
    labels = [[1, 0, None], [2], [0.5, -3]]
    rows = [
        {"documents": [{"text": text} for text in group], "labels": numbers}
        for group, numbers in zip(texts, labels, strict=True)
    ]
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows))
    reopened = pickle.loads(pickle.dumps(table))
    for found in (table, reopened):
        assert found.format is FORMATS["group"]
        assert found.groups.tolist() == [0, 3, 4, 6]
        assert [None if np.isnan(one) else one for one in found.labels.tolist()] == [
            *labels[0],
            *labels[1],
            *labels[2],
        ]
        assert [found.ids[a] for a in found.offsets[:-1].tolist()] == [
            tokenizer(text)["input_ids"][0] for group in texts for text in group
        ]
    assert len({*table.digests[:3].tolist()}) == 1, "a group has one digest"
    by_group = table.by_group
    assert len(by_group) == 3
    assert by_group.offsets.tolist() == table.offsets[[0, 3, 4, 6]].tolist()
    assert table.by_row.digests.tolist() == table.digests[[0, 3, 5]].tolist()
    prints = {table.fingerprint}
    for change in ([[1, 0, 0], [2], [0.5, -3]], None):
        for row, numbers in zip(rows, change or labels, strict=True):
            row["labels"] = numbers
        if change is None:
            rows = [{"documents": [document]} for row in rows for document in row["documents"]]
        prints.add(table_of(write_jsonl(tmp_path / "b.jsonl", rows)).fingerprint)
    assert len(prints) == 3


def test_groups_of_one_document_without_labels_are_stored_as_text(table_of, tmp_path):
    texts = [{"text": f"text {number}"} for number in range(9)]
    plain = table_of(write_jsonl(tmp_path / "a.jsonl", texts))
    groups = table_of(write_jsonl(tmp_path / "b.jsonl", [{"documents": [text]} for text in texts]))
    assert sorted(path.name for path in groups.folder.iterdir()) == sorted(
        path.name for path in plain.folder.iterdir()
    )
    assert not {"groups.npy", "labels.npy"} & {path.name for path in plain.folder.iterdir()}
    assert groups.fingerprint == plain.fingerprint
    assert groups.groups.tolist() == list(range(10))
    assert groups.labels is None
    assert groups.by_group is groups
