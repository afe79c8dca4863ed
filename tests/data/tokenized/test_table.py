"""A tokenized source on disk: arrays, bad rows, counts."""

import json
import pickle
from hashlib import blake2b

import numpy as np
import pytest
from support.rows import numbered_chat, token_folders, write_jsonl

from fxtune.data.chat.encode import Encoder
from fxtune.data.config import OnBadRow
from fxtune.data.read.formats import RowFormat
from fxtune.errors import DataError


def test_table_holds_ids_mask_and_digest_of_each_document(table_of, tokenizer, tmp_path):
    rows = [numbered_chat(i) for i in range(300)]
    table = table_of(write_jsonl(tmp_path / "a.jsonl", rows))
    expected = Encoder(tokenizer, RowFormat.messages).encode(rows)
    assert len(table) == 300
    assert table.format is RowFormat.messages
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
