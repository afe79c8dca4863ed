"""The token cache: tables that are unused are removed, damaged ones are made again, and an unwritable cache is an error."""

import os
import pickle
import time

import numpy as np
import pytest
from support.rows import numbered_chat, token_folders, write_jsonl

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.tokenized import cache
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import StorageError


def test_unused_tables_are_removed_after_cache_days(table_of, tmp_path, capsys):
    """Tables in use stay, however old. Staging folders of dead processes are removed when they are as old."""

    def aged(folder):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, time.time() - 31 * 86400))

    folders = [
        table_of(write_jsonl(tmp_path / f"{name}.jsonl", [numbered_chat(0, name)])).folder
        for name in ("unused", "used", "read_again")
    ]
    held = table_of(tmp_path / "used.jsonl")
    (leftover := folders[0].with_name("abc.staging")).mkdir()
    (leftover / "ids.npy").write_bytes(b"x" * 2_000_000)
    for folder in (*folders, leftover):
        aged(folder)
    table_of(tmp_path / "read_again.jsonl")
    capsys.readouterr()
    assert set(token_folders(tmp_path)) == {*folders, leftover}, "nothing new was made"
    table_of(write_jsonl(tmp_path / "new.jsonl", [numbered_chat(1)]))
    assert leftover not in token_folders(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert "the tokens of 2 sources that no run used for 30 days, 2.0 MB (data.cache_days)" in capsys.readouterr().out
    assert len(pickle.loads(pickle.dumps(held))) == 1


@pytest.mark.parametrize("damage", ["shorter", "json", "missing", "staging"])
def test_damaged_table_is_rebuilt(table_of, tmp_path, damage):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(9)])
    table = table_of(path)
    whole = np.array(table.ids)
    if damage == "shorter":
        (table.folder / "ids.npy").write_bytes((table.folder / "ids.npy").read_bytes()[:-4])
    elif damage == "json":
        (table.folder / "table.json").write_text('{"sizes": ')
    elif damage == "missing":
        (table.folder / "supervised.npy").unlink()
    else:  # a process died while it wrote the table
        table.folder.rename(table.folder.with_name(table.folder.name + ".staging"))
        (table.folder.with_name(table.folder.name + ".staging") / "table.json").unlink()
    assert np.array_equal(table_of(path).ids, whole)
    assert [folder.suffix for folder in token_folders(tmp_path)] == [""]


@pytest.mark.parametrize("name", ["offsets.npy", "ids.npy", "supervised.npy", "digests.npy", "table.json"])
def test_table_with_a_changed_byte_is_rebuilt(table_of, tmp_path, capsys, name):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(9)])
    file = table_of(path).folder / name
    whole = file.read_bytes()
    # In the JSON a digit changes, so that the file is still JSON.
    at = whole.index(b'"tokens": ') + 10 if name == "table.json" else len(whole) - 5
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    capsys.readouterr()
    table_of(path)
    assert file.read_bytes() == whole
    assert name in capsys.readouterr().out
    table_of(path)
    assert "made again" not in capsys.readouterr().out


def test_large_files_are_checked_in_part(tmp_path, monkeypatch):
    """Each file has at most BLOCKS blocks with a checksum, from its first bytes to near its end."""
    monkeypatch.setattr(cache, "BLOCK", 10)
    file, meta = tmp_path / "ids.npy", {"sizes": {"ids.npy": 1000}}

    def checked(at):
        file.write_bytes(bytes(at) + b"x" + bytes(999 - at))
        return cache.checksums(tmp_path, meta)["ids.npy"]

    file.write_bytes(bytes(1000))
    whole = cache.checksums(tmp_path, meta)["ids.npy"]
    changed = [checked(at) != whole for at in range(1000)]
    assert len(whole) <= cache.BLOCKS
    assert sum(changed) == 10 * len(whole)
    assert changed[0], "the first bytes"
    assert any(changed[-100:])


def test_unwritable_cache_is_a_storage_error(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(0)])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"data\.cache_dir"):
        tokenize(SourceConfig(path=str(path)), DataConfig(cache_dir=str(tmp_path / "file")), tokenizer, progress=False)
