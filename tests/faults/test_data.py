"""Broken or missing data gives an error or a quarantined row, and a killed process an error or the same batches."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import signal
import socket
import sys
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support import harness
from support.cases import pairs, slow_but
from support.processes import children
from transformers import AutoTokenizer

from fxtune.data.batches.build import plan_training
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.chat.encode import Encoder
from fxtune.data.config import DataConfig, OnBadRow, SourceConfig, TextUnit
from fxtune.data.read import sources
from fxtune.data.read.row import MAX_ROW_BYTES
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError, StorageError

TINY = harness.ROOT / "fxtune" / "assets" / "tiny"
GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def read(tokenizer, tmp_path):
    """Tokenize a file as a run does. A call of 300 s fails, because it would block forever."""

    def too_late(*_):
        raise AssertionError("the call blocks")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(300)

    def call(path, on_bad_row=OnBadRow.quarantine, chat_template=None, **source):
        data = DataConfig(
            cache_dir=str(tmp_path / "cache"), workers=1, on_bad_row=on_bad_row, chat_template=chat_template
        )
        return tokenize(
            SourceConfig(path=str(path), **source), data, tokenizer, tmp_path / "quarantine.jsonl", progress=False
        )

    yield call
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def lines(*rows) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def quarantined(tmp_path) -> dict[int, str]:
    entries = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    return {int(re.findall(r"\d+$", entry["where"])[0]): entry["error"] for entry in entries}


def parquet(count: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([GOOD] * count), sink, row_group_size=max(1, count // 4))
    return sink.getvalue().to_pybytes()


BROKEN = {
    "empty.jsonl": (b"", "is empty"),
    "blank.jsonl": (b"\n \n", "has no rows"),
    "header.csv": (b"prompt,completion\n", "has no rows"),
    "none.json": (b"[]", "has no rows"),
    "cut.json": (json.dumps([GOOD] * 9).encode()[:-30], r"cut\.json: not JSON after row 8"),
    "cut.jsonl.gz": (
        gzip.compress(lines(*[GOOD] * 999))[:-40],
        r"cut\.jsonl\.gz:\d+: the file cannot be read past here",
    ),
    "no.jsonl.gz": (b"not gzip", r"no\.jsonl\.gz:1: the file cannot be read past here .*Not a gzipped file"),
    "cut.parquet": (parquet(99)[:-9], r"cut\.parquet cannot be read as Parquet"),
    "no.parquet": (b"PAR1" + b"x" * 99, r"no\.parquet cannot be read as Parquet"),
    "rows.jsonl.zst": (b"\x28\xb5\x2f\xfd", r"no file that fxtune reads \(found \.zst\)"),
    "quote.csv": (
        b'prompt,completion\na,b\nc,"d\n' + b"e,f\n" * (MAX_ROW_BYTES // 4),
        r"quote\.csv:3: a cell of more than 16 MiB",
    ),
    "list.json": (json.dumps({"a": 1}).encode(), "an object without a list of rows"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_file_is_an_error_with_its_reason(read, tmp_path, name):
    content, said = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read(tmp_path / name)


def test_special_file_is_an_error_and_never_blocks(read, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.json")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.jsonl"))
        (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
        (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
        for name in ("pipe.jsonl", "pipe.json", "socket.jsonl", "zero.jsonl"):
            with pytest.raises(DataError, match=rf"{name} is a pipe, a socket or a device, not a file"):
                read(tmp_path / name)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="empty folder"):
        read(tmp_path / "folder.jsonl")
    with pytest.raises(DataError, match="a broken link to"):
        read(tmp_path / "loop.jsonl")
    for odd in (f"{'x' * 5000}.jsonl", "a\0b.jsonl", "~nobody_of_that_name/a.jsonl"):
        with pytest.raises(DataError, match="no such file or folder"):
            read(odd)
    (tmp_path / "good.jsonl").write_bytes(lines(GOOD))
    for template in ("pipe.jsonl", "zero.jsonl", "folder.jsonl"):
        with pytest.raises(DataError, match=r"(zero|pipe|folder)\.jsonl is a .*, not a file"):
            read(tmp_path / "good.jsonl", chat_template=str(tmp_path / template))


@pytest.mark.parametrize(
    ("odd", "name"),
    pairs(["pipe", "socket", "device"], ["table.json", "ids.npy", "bad_rows.jsonl", "", ".lock", ".staging"]),
)
def test_special_file_in_the_token_cache_is_an_error_and_never_blocks(odd, name, read, tmp_path):
    (tmp_path / "good.jsonl").write_bytes(lines(GOOD))
    folder = read(tmp_path / "good.jsonl").folder
    place = folder / name if name[:1] not in ("", ".") else folder.with_name(folder.name + name)
    if place.exists():
        place.rename(tmp_path / "before")
    with socket.socket(socket.AF_UNIX) as listener:
        {
            "pipe": lambda: os.mkfifo(place),
            "device": lambda: place.symlink_to("/dev/zero"),
            "socket": lambda: (listener.bind(str(tmp_path / "s")), (tmp_path / "s").rename(place)),
        }[odd]()
        message = rf"{re.escape(str(place))} is a pipe, a socket or a device, but the token cache needs a (file|folder) there\. Remove"
        with pytest.raises(StorageError, match=message):
            read(tmp_path / "good.jsonl")
    place.unlink()
    assert len(read(tmp_path / "good.jsonl")) == 1


def test_pipe_in_an_unused_old_table_does_not_block(read, tmp_path):
    old = tmp_path / "cache" / "tokens" / "old"
    old.mkdir(parents=True)
    os.mkfifo(old / "table.json")
    for path in (old / "table.json", old):
        os.utime(path, (1, 1))
    (tmp_path / "good.jsonl").write_bytes(lines(GOOD))
    assert len(read(tmp_path / "good.jsonl")) == 1
    assert old.exists()


def test_each_unusable_row_is_quarantined_with_its_reason(read, tmp_path):
    def turns(*contents):
        roles = zip(("user", "assistant"), contents, strict=True)
        return {"messages": [{"role": role, "content": content} for role, content in roles]}

    cases = {
        b'{"messages": [': "not JSON",
        b"\xff\xfe": "not UTF-8",
        b"[1]": "a list",
        b"12": "a number",
        b"null": "null",
        b'{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "b"}]}': "half a surrogate pair",
        b"[" * 900 + b"]" * 900: "nested more than 100 deep",
        b"[" * 90_000: "cannot be read as JSON",
        lines({**GOOD, "x": json.loads("[" * 300 + "]" * 300)}).strip(): "nested more than 100 deep",
        lines({**GOOD, "tools": "[" * 300 + "]" * 300}).strip(): "nested more than 100 deep",
        b'{"messages": [], "n": ' + b"9" * 5000 + b"}": "cannot be read as JSON",
        lines(turns(None, "b")).strip(): r"messages\[0\].content is null",
        lines(turns("a", None)).strip(): "content is null",
        lines(turns(7, "b")).strip(): r"messages\[0\].content is a number",
        lines(turns({"a": 1}, "b")).strip(): "is an object",
        lines({"messages": None}).strip(): "no list of messages",
        lines({"messages": "hi"}).strip(): "messages is not valid JSON",
        lines({"messages": [GOOD["messages"][0]]}).strip(): "no assistant turn",
        lines({"messages": [{"role": "x" * 9_000_000, "content": "a"}]}).strip(): r"role 'xxx.{30}",
    }
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD, *cases, GOOD))
    table = read(tmp_path / "rows.jsonl")
    found = quarantined(tmp_path)
    assert (len(table), sorted(found)) == (2, list(range(2, 2 + len(cases))))
    for reason, expected in zip(found.values(), cases.values(), strict=True):
        assert re.search(expected, reason), (expected, reason)
        assert len(reason) < 300
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not JSON .*data\.on_bad_row=quarantine"):
        read(tmp_path / "rows.jsonl", on_bad_row=OnBadRow.error)


@pytest.mark.parametrize("packed", slow_but([False, True], True))
def test_row_of_100_mb_is_quarantined_and_not_held_in_memory(read, tmp_path, packed):
    path = tmp_path / ("rows.jsonl.gz" if packed else "rows.jsonl")
    with gzip.open(path, "wb", compresslevel=1) if packed else open(path, "wb") as file:
        file.write(lines(GOOD) + b'{"messages": [{"role": "user", "content": "')
        for _ in range(100):
            file.write(b"a" * 1_000_000)
        file.write(b'"}]}\n' + lines(GOOD))
    tracemalloc.start()
    table = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(table) == 2
    assert quarantined(tmp_path) == {2: "a row of 95.4 MiB; the limit is 16 MiB. Split it into several rows"}
    assert peak < 80e6


@pytest.mark.parametrize("unit", TextUnit)
def test_text_of_40_mb_error_names_text_unit(read, tmp_path, unit):
    (tmp_path / "book.txt").write_bytes(b"word " * 8_000_000 + b"\n\nthe end\n")
    if unit is TextUnit.document:
        with pytest.raises(DataError, match=r"a row of 38\.1 MiB.*text_unit to paragraph or line"):
            read(tmp_path / "book.txt", text_unit=unit)
    else:
        assert len(read(tmp_path / "book.txt", text_unit=unit)) == 1
        assert "text_unit" in quarantined(tmp_path)[1]


@pytest.mark.parametrize("kind", slow_but(["jsonl", "csv", "parquet"], "csv"))
def test_late_type_change_makes_one_bad_row(read, tmp_path, kind):
    """A reader that infers a schema from the first rows fails at such a row, or makes all numbers strings."""
    count, path = 20_000, tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_bytes(lines(*[PAIR] * (count - 1), {"prompt": "a", "completion": 7}, PAIR))
    elif kind == "csv":
        path.write_bytes(b"prompt,completion\n" + b"a,b\n" * (count - 2) + b'a,b,c\n"a"x,"b"\na,7\n')
    else:
        pq.write_table(
            pa.table({"prompt": ["a"] * (count + 1), "completion": ["b"] * (count - 1) + [None, "b"]}), path
        )
    table = read(path)
    found = quarantined(tmp_path)
    assert len(table) + len(found) == count + 1
    expected = {
        "jsonl": {count: "completion is a number"},
        "parquet": {count: "completion is null"},
        "csv": {count: "3 cells under a header of 2 columns", count + 1: "not CSV ('\\,' expected after '\"')"},
    }[kind]
    reasons = {place: reason.partition(", not a text")[0] for place, reason in found.items()}
    assert {place: reason.replace("','", "'\\,'") for place, reason in reasons.items()} == expected


@pytest.mark.parametrize(
    ("kind", "how"),
    slow_but(
        itertools.product(
            ("jsonl", "jsonl.gz", "json", "csv", "txt", "parquet"), ("grows", "shrinks", "is removed", "is replaced")
        ),
        ("jsonl", "grows"),
        ("jsonl", "shrinks"),
        ("jsonl", "is removed"),
        ("jsonl", "is replaced"),
        ("jsonl.gz", "shrinks"),
        ("json", "is replaced"),
        ("csv", "is removed"),
        ("txt", "shrinks"),
        ("parquet", "is replaced"),
    ),
)
def test_file_that_changes_while_read_is_an_error(read, tmp_path, kind, how, monkeypatch):
    path, rows, draw = tmp_path / f"rows.{kind}", 1000, random.Random(0)
    chats = [{"messages": [{"role": "user", "content": str(draw.random())}, GOOD["messages"][1]]} for _ in range(rows)]
    path.write_bytes(
        {
            "jsonl": lambda: lines(*chats),
            "jsonl.gz": lambda: gzip.compress(lines(*chats)),
            "json": lambda: json.dumps(chats).encode(),
            "csv": lambda: b"prompt,completion\n" + b"a,b\n" * rows,
            "txt": lambda: b"a text\n" * rows,
            "parquet": lambda: parquet(rows),
        }[kind]()
    )
    monkeypatch.setattr(sources, "SHARD_BYTES", 5000)
    encode = Encoder.encode

    def meddle(self, *arguments):
        if how == "grows":
            with path.open("ab") as file:
                file.write(b"\n")
        elif how == "shrinks" and path.stat().st_size > 1000:
            os.truncate(path, path.stat().st_size // 3)
        elif how == "is removed":
            path.unlink(missing_ok=True)
        elif how == "is replaced":
            (tmp_path / "other").write_bytes(path.read_bytes()[:-5])
            (tmp_path / "other").rename(path)
        return encode(self, *arguments)

    monkeypatch.setattr(Encoder, "encode", meddle)
    with pytest.raises(
        DataError, match=rf"rows\.{kind}.*(changed while it was|became shorter|cannot be read|not JSON)"
    ):
        read(path, text_unit=TextUnit.line)
    assert not list((tmp_path / "cache").glob("tokens/*/table.json"))


@pytest.mark.slow
def test_full_disk_is_a_storage_error(tokenizer, tmp_path):
    good = {"prompt": "a " * 200, "completion": "b " * 200}
    (tmp_path / "rows.jsonl").write_bytes(lines(*[good] * 2000, *[b"{broken" * 99] * 999))
    source = SourceConfig(path=str(tmp_path / "rows.jsonl"))
    with harness.small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(StorageError, match=r"rows\.jsonl cannot be stored in .*No space left.*data\.cache_dir"):
            tokenize(
                source,
                DataConfig(cache_dir=str(disk / "cache"), on_bad_row=OnBadRow.quarantine),
                tokenizer,
                progress=False,
            )
        assert not list(disk.glob("cache/tokens/*/")), "no partial file may stay"
        with pytest.raises(StorageError, match=r"Bad rows cannot be written to .*quarantine\.jsonl: No space left"):
            tokenize(
                source,
                DataConfig(cache_dir=str(tmp_path / "cache"), on_bad_row=OnBadRow.quarantine),
                tokenizer,
                disk / "quarantine.jsonl",
                progress=False,
            )


@pytest.mark.slow
def test_killed_loader_workers_change_no_batch(tokenizer, tmp_path, capsys):
    """Only the loader, with the built-in tokenizer. test_kills.py tests a complete run."""
    (tmp_path / "rows.jsonl").write_bytes(
        lines(
            *(
                {
                    "messages": [
                        {"role": "user", "content": f"say {number}"},
                        {"role": "assistant", "content": f"{number} " * 9},
                    ]
                }
                for number in range(200)
            )
        )
    )
    data = DataConfig(
        sources=[SourceConfig(path=str(tmp_path / "rows.jsonl"))],
        cache_dir=str(tmp_path / "cache"),
        sequence_length=64,
    )
    table = tokenize(data.sources[0], data, tokenizer, progress=False)
    plan = plan_training([table], data, micro_batch_size=2, global_batch_size=4)
    before, found = loaders(), []
    loader = Loader(plan, LoaderConfig(num_workers=4, prefetch_factor=1), torch.device("cpu"))
    for step in loader.steps():
        if step.index == 3:
            victim = min(loaders() - before)
            os.kill(victim, signal.SIGKILL)
        found.append([batch.input_ids for batch in step.micro_batches])
    loader.close()
    expected = [
        [plan.batch(step, micro).input_ids for micro in range(plan.micro_batches(step))] for step in range(plan.steps)
    ]
    assert [len(step) for step in found] == [len(step) for step in expected]
    assert all(
        torch.equal(a, b)
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    assert "A process that builds batches died before step" in capsys.readouterr().out


def loaders() -> set[int]:
    """The processes that this process's fork server started. Other test workers have fork servers, too."""
    return {worker for server in children(os.getpid(), "forkserver") for worker in children(server)}


@pytest.mark.slow
def test_killed_tokenize_worker_ends_the_command_with_advice(tmp_path, forks):
    (tmp_path / "rows.jsonl").write_bytes(
        lines(
            *[
                {
                    "messages": [
                        {"role": "user", "content": "a word " * 40},
                        {"role": "assistant", "content": "another " * 400},
                    ]
                }
            ]
            * 12_000
        )
    )
    words = [
        "preview",
        "model.path=builtin:tiny",
        "data.sources=[{path: rows.jsonl}]",
        "data.workers=2",
        "data.cache_dir=cache",
    ]
    run = forks.start(words, tmp_path)
    worker = harness.wait_for(lambda: run.ended() or next(iter(children(run.pid, "spawn_main")[-1:]), None))
    assert not run.ended(), (tmp_path / "log.txt").read_text()
    os.kill(worker, signal.SIGSTOP)  # so that the run cannot end before the worker is killed
    harness.wait_for(lambda: run.ended() or list(tmp_path.glob("cache/tokens/*.staging/ids.npy")))
    assert not run.ended(), (tmp_path / "log.txt").read_text()
    os.kill(worker, signal.SIGKILL)
    assert run.wait() == 4
    said = (tmp_path / "log.txt").read_text()
    assert "A process that tokenized rows.jsonl was killed" in " ".join(said.split())
    assert "data.workers=1 (now 2)" in " ".join(said.split())
    assert "Traceback" not in said
    assert not list(tmp_path.glob("cache/tokens/*/"))


@pytest.mark.slow
def test_two_thousand_fuzzed_inputs(tmp_path):
    sys.path.insert(0, str(harness.ROOT / "scripts" / "faults"))
    try:
        import fuzz
    finally:
        sys.path.pop(0)
    report = fuzz.Fuzzer(1, tmp_path, keep=None).go(2000)
    assert report.violations == []
    assert report.inputs == 2000
    assert min(report.documents, report.quarantined, report.escaped, report.supervised) > 150, report
    assert report.questions > 20


def test_fuzzer_finds_a_supervised_quoted_turn(tmp_path, monkeypatch):
    """The fuzzer can fail: without the escaping of special tokens it finds violations."""
    sys.path.insert(0, str(harness.ROOT / "scripts" / "faults"))
    try:
        import fuzz
    finally:
        sys.path.pop(0)
    from fxtune.data.chat.special_tokens import SpecialTokenEscaper

    monkeypatch.setattr(SpecialTokenEscaper, "is_quoted", lambda *_: False)
    report = fuzz.Fuzzer(0, tmp_path, keep=None).go(700)
    assert any("a supervised token outside an assistant's turn" in wrong for wrong in report.violations)
