"""Token tables from real files: the same from one process or several, from the cache or not, after crashes and beside rivals."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fxtune.data.chat.encode import Encoder
from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.read import sources
from fxtune.data.read.formats import RowFormat
from fxtune.data.tokenized import tokenize as tokens
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import ConfigError, DataError, StorageError

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        ["what is the colour of answer number"] * 9,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    return fast


def chat(number, answer=None):
    return {
        "messages": [
            {"role": "user", "content": f"what is {number}"},
            {"role": "assistant", "content": answer or f"answer number {number} é" * (number % 4 + 1)},
        ]
    }


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def table_of(tokenizer, tmp_path):
    """Tokenise a path with the given settings, in a cache of the test's own."""

    def call(
        path, quarantine=None, progress=False, workers=1, on_bad_row=OnBadRow.error, chat_template=None, **source
    ):
        data = DataConfig(
            cache_dir=str(tmp_path / "cache"), workers=workers, on_bad_row=on_bad_row, chat_template=chat_template
        )
        return tokenize(SourceConfig(path=str(path), **source), data, tokenizer, quarantine, progress)

    return call


@pytest.fixture
def many_shards(monkeypatch):
    """Files of a few kilobytes go through worker processes, in many shards."""
    monkeypatch.setattr(sources, "SHARD_BYTES", 500)
    monkeypatch.setattr(tokens, "IN_PROCESS_BYTES", 0)


def tables(tmp_path):
    return sorted(path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir())


def test_a_table_holds_each_document_its_mask_and_its_hash(table_of, tokenizer, tmp_path):
    rows = [chat(i) for i in range(300)]
    table = table_of(write(tmp_path / "a.jsonl", rows))
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


def test_workers_make_the_same_files_as_this_process(table_of, tmp_path, many_shards):
    rows = [chat(i) for i in range(150)]
    rows[20] = "not json"
    rows[77] = {"messages": []}
    alone, shared = write(tmp_path / "a.jsonl", rows), tmp_path / "a.jsonl"
    first = table_of(alone, workers=1, on_bad_row=OnBadRow.quarantine)
    content = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    first.folder.rename(tmp_path / "moved")
    second = table_of(shared, workers=2, on_bad_row=OnBadRow.quarantine)
    assert {path.name: path.read_bytes() for path in second.folder.iterdir()} == content
    assert second.bad_rows == 2


def test_what_workers_import_has_no_torch_in_it():
    """A worker must start in about a second and stay small."""
    code = "import sys, fxtune.data.tokenized.tokenize; sys.exit(bool({'torch', 'datasets', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_row_in_file_order_is_the_error(table_of, tmp_path, many_shards, workers):
    rows = [chat(i) for i in range(120)]
    rows[97] = "{broken"
    rows[61] = {"messages": "none"}
    rows[99] = "also broken"
    rows.insert(5, "")
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:63: .*messages.*data\.on_bad_row=quarantine"):
        table_of(path, workers=workers)
    assert tables(tmp_path) == []


def test_bad_rows_are_quarantined_also_when_the_table_comes_from_the_cache(table_of, tmp_path):
    rows = [chat(0), "{broken", chat(1), {"messages": []}, [1], chat(2)]
    path, copy = write(tmp_path / "a.jsonl", rows), write(tmp_path / "copies" / "b c.jsonl", rows)
    for source in (path, copy, copy):  # made, from the cache under another name, and once more as a resumed run does
        out = tmp_path / f"{source.stem}.quarantine"
        if out.exists():
            out.write_text(out.read_text()[:-9])  # as a kill leaves it
        table = table_of(source, quarantine=out, on_bad_row=OnBadRow.quarantine)
        held = [json.loads(line) for line in out.read_text().splitlines()]
        assert (len(table), table.bad_rows) == (3, 3)
        assert [entry["where"] for entry in held] == [f"{source}:2", f"{source}:4", f"{source}:5"]
        assert [entry["row"] for entry in held] == ["{broken", {"messages": []}, [1]]
        assert all(entry["error"] for entry in held)
    assert len(tables(tmp_path)) == 1
    with pytest.raises(DataError, match=r"b c\.jsonl:2: not JSON"):
        table_of(copy)


def test_the_cache_is_used_for_the_same_content_and_settings_only(table_of, tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [{**chat(i), "text": "plain"} for i in range(9)])
    base = table_of(path)
    stamp = (base.folder / "ids.npy").stat().st_mtime_ns
    assert (
        table_of(write(tmp_path / "copy.jsonl", [{**chat(i), "text": "plain"} for i in range(9)])).folder
        == base.folder
    )
    assert (base.folder / "ids.npy").stat().st_mtime_ns == stamp
    tokenizer("a", padding="max_length", max_length=9, truncation=True)  # leaves its traces in the backend
    assert table_of(path).fingerprint == base.fingerprint
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE.replace("user", "person").replace("'\n'", "' '"))
    seen = {
        base.fingerprint,
        table_of(path, chat_template=str(template)).fingerprint,
        table_of(path, limit=4).fingerprint,
        table_of(path, format=RowFormat.text).fingerprint,
        table_of(path, columns={"text": "note"}).fingerprint,
    }
    write(path, [{**chat(i), "text": "plain"} for i in range(10)])
    seen.add(table_of(path).fingerprint)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE.replace("'\n'", "' '"))
    seen.add(table_of(path).fingerprint)
    monkeypatch.setattr(tokens, "ENCODING_VERSION", -1)
    seen.add(table_of(path).fingerprint)
    assert len(seen) == len(tables(tmp_path)) == 8


def test_sequence_length_is_no_reason_to_tokenise_again(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [chat(i) for i in range(9)])
    one, two = (
        tokenize(
            SourceConfig(path=str(path)),
            DataConfig(cache_dir=str(tmp_path), sequence_length=length),
            tokenizer,
            progress=False,
        )
        for length in (64, 128)
    )
    assert one.folder == two.folder


def test_tokens_that_no_run_used_for_long_are_removed_and_it_is_said(table_of, tmp_path, capsys):
    """Those in use stay, however old; a leftover of a process that died goes with its time."""

    def aged(folder):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, time.time() - 31 * 86400))

    folders = [
        table_of(write(tmp_path / f"{name}.jsonl", [chat(0, name)])).folder
        for name in ("unused", "used", "read_again")
    ]
    held = table_of(tmp_path / "used.jsonl")
    (leftover := folders[0].with_name("abc.staging")).mkdir()
    (leftover / "ids.npy").write_bytes(b"x" * 2_000_000)
    for folder in (*folders, leftover):
        aged(folder)
    table_of(tmp_path / "read_again.jsonl")
    capsys.readouterr()
    assert set(tables(tmp_path)) == {*folders, leftover}, "nothing new was made"
    table_of(write(tmp_path / "new.jsonl", [chat(1)]))
    assert leftover not in tables(tmp_path)
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert "the tokens of 2 sources that no run used for 30 days, 2.0 MB (data.cache_days)" in capsys.readouterr().out
    assert len(pickle.loads(pickle.dumps(held))) == 1


@pytest.mark.parametrize("damage", ["shorter", "json", "missing", "staging"])
def test_a_damaged_cache_entry_is_made_again(table_of, tmp_path, damage):
    path = write(tmp_path / "a.jsonl", [chat(i) for i in range(9)])
    table = table_of(path)
    whole = np.array(table.ids)
    if damage == "shorter":
        (table.folder / "ids.npy").write_bytes((table.folder / "ids.npy").read_bytes()[:-4])
    elif damage == "json":
        (table.folder / "table.json").write_text('{"sizes": ')
    elif damage == "missing":
        (table.folder / "supervised.npy").unlink()
    else:  # a process died while it wrote
        table.folder.rename(table.folder.with_name(table.folder.name + ".staging"))
        (table.folder.with_name(table.folder.name + ".staging") / "table.json").unlink()
    assert np.array_equal(table_of(path).ids, whole)
    assert [folder.suffix for folder in tables(tmp_path)] == [""]


def test_nothing_to_learn_from_is_an_error(table_of, tmp_path):
    with pytest.raises(DataError, match=r"none of the 2 rows can be used as text; the first, .*a\.jsonl:1:"):
        table_of(
            write(tmp_path / "a.jsonl", [{"text": ""}, {"text": 3}]),
            format=RowFormat.text,
            on_bad_row=OnBadRow.quarantine,
        )
    masked = write(tmp_path / "b.jsonl", [{"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    with pytest.raises(
        DataError, match=r"not one of 3 tokens in 1 documents .* is supervised: its labels are all -100"
    ):
        table_of(masked)
    assert tables(tmp_path) == []


def test_pre_tokenised_rows_keep_their_ids_and_masks(table_of, tmp_path):
    table = table_of(
        write(
            tmp_path / "a.jsonl",
            [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "assistant_masks": [0, 1]}],
        )
    )
    assert table.ids.tolist() == [5, 6, 7, 8, 9]
    assert table.supervised.tolist() == [False, True, True, False, True]
    assert table.offsets.tolist() == [0, 3, 5]


def test_a_cache_that_cannot_be_written_is_a_storage_error(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [chat(0)])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"data\.cache_dir"):
        tokenize(SourceConfig(path=str(path)), DataConfig(cache_dir=str(tmp_path / "file")), tokenizer, progress=False)
    with pytest.raises(ConfigError, match=r"data\.workers=-1"):
        tokenize(SourceConfig(path=str(path)), DataConfig(workers=-1), tokenizer, progress=False)


def test_a_file_that_changes_meanwhile_is_an_error(table_of, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [chat(i) for i in range(9)])
    encode = Encoder.encode

    def meddle(self, rows):
        with open(path, "a") as file:
            file.write(json.dumps(chat(99)) + "\n")
        return encode(self, rows)

    monkeypatch.setattr(Encoder, "encode", meddle)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        table_of(path)


def test_one_line_says_what_was_found(table_of, tmp_path, capsys):
    path = write(tmp_path / "a.jsonl", [chat(i) for i in range(9)] + ["x"])
    for how in ("tokenized in", "from the cache"):
        table_of(path, progress=True, on_bad_row=OnBadRow.quarantine, quarantine=tmp_path / "bad.jsonl")
        said = capsys.readouterr().out
        assert "a.jsonl: messages, 9 documents, " in said
        assert f"1 bad row quarantined in {tmp_path / 'bad.jsonl'}" in said
        assert how in said


SCRIPT = """
import os, sys
from pathlib import Path
from transformers import AutoTokenizer
from fxtune.data.read import sources
from fxtune.data.tokenized import tokenize as tokens
from fxtune.data.config import DataConfig, SourceConfig
if __name__ == "__main__":
    folder, go, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    tokens.IN_PROCESS_BYTES, sources.SHARD_BYTES = 0, 20_000
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    (folder / f"{os.getpid()}.ready").touch()
    while not go.exists():
        pass
    data = DataConfig(cache_dir=str(folder / "cache"), workers=workers)
    tokens.tokenize(SourceConfig(path=str(folder / "a.jsonl")), data, tokenizer)
"""


def start(tmp_path, go, workers):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), str(go), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_of_two_processes_that_start_at_once_one_works_and_one_waits(tokenizer, table_of, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a.jsonl", [chat(i) for i in range(1500)])
    rivals = [start(tmp_path, tmp_path / "go", 1) for _ in range(2)]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.ready"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    (tmp_path / "go").touch()
    said = [rival.communicate(timeout=60)[0] for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0], said
    assert sorted("from the cache" in output for output in said) == [False, True], said
    assert len(tables(tmp_path)) == 1
    table = table_of(path)
    assert len(table) == 1500
    assert table.folder == tables(tmp_path)[0]


def test_a_killed_run_leaves_no_workers_and_nothing_half_done(tokenizer, table_of, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write(tmp_path / "a.jsonl", [chat(i) for i in range(30_000)])
    (tmp_path / "go").touch()
    run = start(tmp_path, tmp_path / "go", 2)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("cache/tokens/*.staging/ids.npy")) or len(workers := _workers(run.pid)) < 2:
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    run.send_signal(signal.SIGKILL)
    run.wait()
    while any(map(_alive, workers)):
        assert time.monotonic() < deadline, "workers outlive the process that started them"
        time.sleep(0.02)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:50]))
    assert len(table_of(path)) == 50


def _workers(pid: int) -> list[int]:
    return [
        int(child)
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def _alive(pid: int) -> bool:
    try:
        return (
            os.stat(f"/proc/{pid}") is not None
            and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
        )
    except OSError:
        return False
