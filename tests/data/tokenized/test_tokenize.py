"""Token tables are the same from one process or several, from the cache or not, after a kill and with two runs at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.harness import wait_for
from support.processes import alive, children
from support.rows import TOKENIZE_TEMPLATE, numbered_chat, token_folders, write_jsonl

from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.tokenized import tokenize as tokens
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import DataError

ROLES = {"prompt": "user", "completion": "assistant"}


def test_workers_write_the_same_table_as_one_process(table_of, tmp_path, many_shards):
    rows = [numbered_chat(i) for i in range(150)]
    rows[20] = "not json"
    rows[77] = {"messages": []}
    alone, shared = write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "a.jsonl"
    first = table_of(alone, workers=1, on_bad_row=OnBadRow.quarantine)
    content = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    first.folder.rename(tmp_path / "moved")
    second = table_of(shared, workers=2, on_bad_row=OnBadRow.quarantine)
    assert {path.name: path.read_bytes() for path in second.folder.iterdir()} == content
    assert second.bad_rows == 2


def test_tokenize_workers_do_not_import_torch():
    """So that a worker starts fast and stays small."""
    code = "import sys, fxtune.data.tokenized.tokenize; sys.exit(bool({'torch', 'datasets', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_error_names_the_first_bad_row_of_the_file(table_of, tmp_path, many_shards, workers):
    rows = [numbered_chat(i) for i in range(120)]
    rows[97] = "{broken"
    rows[61] = {"messages": "none"}
    rows[99] = "also broken"
    rows.insert(5, "")
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl:63: .*messages.*data\.on_bad_row=quarantine"):
        table_of(path, workers=workers)
    assert token_folders(tmp_path) == []


def test_cache_is_used_only_for_same_content_and_settings(table_of, tokenizer, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{**numbered_chat(i), "text": "what is"} for i in range(9)])
    base = table_of(path)
    stamp = (base.folder / "ids.npy").stat().st_mtime_ns
    assert (
        table_of(
            write_jsonl(tmp_path / "copy.jsonl", [{**numbered_chat(i), "text": "what is"} for i in range(9)])
        ).folder
        == base.folder
    )
    assert (base.folder / "ids.npy").stat().st_mtime_ns == stamp
    tokenizer("a", padding="max_length", max_length=9, truncation=True)  # changes the backend's state
    assert table_of(path).fingerprint == base.fingerprint
    template = tmp_path / "mine.jinja"
    template.write_text(TOKENIZE_TEMPLATE.replace("user", "person").replace("'\n'", "' '"))
    seen = {
        base.fingerprint,
        table_of(path, chat_template=str(template)).fingerprint,
        table_of(path, limit=4).fingerprint,
        table_of(path, format="text").fingerprint,
    }
    assert table_of(path, columns={"text": "tag"}).fingerprint == base.fingerprint, "a chat has no text"
    write_jsonl(path, [{**numbered_chat(i), "text": "what is"} for i in range(10)])
    seen.add(table_of(path).fingerprint)
    monkeypatch.setattr(tokenizer, "chat_template", TOKENIZE_TEMPLATE.replace("'\n'", "' '"))
    seen.add(table_of(path).fingerprint)
    monkeypatch.setattr(tokens, "ENCODING_VERSION", -1)
    assert table_of(path).fingerprint in seen, "the fingerprint is of the tokens"
    assert (len(seen), len(token_folders(tmp_path))) == (6, 8)


def test_another_sequence_length_uses_the_cache(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(9)])
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


def test_source_without_targets_is_an_error(table_of, tmp_path):
    with pytest.raises(DataError, match=r"none of the 2 rows can be used as text; the first, .*a\.jsonl:1:"):
        table_of(
            write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": 3}]),
            format="text",
            on_bad_row=OnBadRow.quarantine,
        )
    masked = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [5, 6, 7], "labels": [-100] * 3}])
    with pytest.raises(
        DataError, match=r"not one of 3 tokens in 1 documents .* is supervised: its labels are all -100"
    ):
        table_of(masked)
    assert token_folders(tmp_path) == []


def test_tokenize_prints_one_line_a_source(table_of, tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(9)] + ["x"])
    for how in ("tokenized in", "from the cache"):
        table_of(path, progress=True, on_bad_row=OnBadRow.quarantine, quarantine=tmp_path / "bad.jsonl")
        said = capsys.readouterr().out
        assert "a.jsonl: messages, 9 documents, " in said
        assert f"1 bad row quarantined in {tmp_path / 'bad.jsonl'}" in said
        assert how in said


def test_prompts_without_a_template_are_counted_beside_chats(table_of, tmp_path, capsys):
    texts = [{"prompt": f"{i} is ", "completion": "a number"} for i in range(3)]
    chats = [{name: [{"role": role, "content": row[name]}] for name, role in ROLES.items()} for row in texts]
    for rows, expected in ((texts + chats, True), (texts, False), (chats, False)):
        table_of(write_jsonl(tmp_path / "a.jsonl", rows), progress=True)
        assert ("chat template is written around it (3 of 6 documents)" in capsys.readouterr().out) == expected


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


@pytest.mark.slow
def test_second_process_waits_and_uses_the_first_ones_table(tokenizer, table_of, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(1500)])
    rival = start(tmp_path, tmp_path / "go", 1)
    while not list(tmp_path.glob("*.ready")):
        assert rival.poll() is None, rival.communicate()
        time.sleep(0.05)
    (tmp_path / "go").touch()
    table = table_of(path, progress=True)
    outputs = [rival.communicate()[0], capsys.readouterr().out]
    assert rival.returncode == 0, outputs
    assert sorted("from the cache" in output for output in outputs) == [False, True], outputs
    assert [table.folder] == token_folders(tmp_path)
    assert len(table) == 1500


@pytest.mark.slow
def test_killed_run_leaves_no_workers_and_no_partial_table(tokenizer, table_of, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(30_000)])
    (tmp_path / "go").touch()
    run = start(tmp_path, tmp_path / "go", 2)
    workers = wait_for(lambda: len(found := children(run.pid, "spawn_main")) == 2 and found, run)
    os.kill(workers[1], signal.SIGSTOP)  # so that the run cannot end before it is killed
    try:
        wait_for(lambda: list(tmp_path.glob("cache/tokens/*.staging/ids.npy")), run)
    finally:
        run.kill()
        run.wait()
        os.kill(workers[1], signal.SIGCONT)
    assert run.returncode == -signal.SIGKILL
    wait_for(lambda: not any(map(alive, workers)))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:50]))
    assert len(table_of(path)) == 50


def test_system_of_the_config_makes_other_tokens(tokenizer, tmp_path):
    rows = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(0)])
    tables = [
        tokenize(
            SourceConfig(path=str(rows)), DataConfig(cache_dir=str(tmp_path / "cache"), system=system), tokenizer, None
        )
        for system in (None, "the colour", "the number", None)
    ]
    assert len({table.fingerprint for table in tables}) == 3
    assert tables[0].fingerprint == tables[3].fingerprint
    assert "the colour" in tokenizer.decode(tables[1].ids)


def test_the_time_of_a_template_is_part_of_the_cache_and_of_the_tokens(tokenizer, tmp_path):
    template = tmp_path / "timed.jinja"
    template.write_text("{{ strftime_now('%Y-%m-%d') }}" + TOKENIZE_TEMPLATE)
    path = write_jsonl(tmp_path / "a.jsonl", [numbered_chat(i) for i in range(3)])

    def at(time, cache="cache"):
        data = DataConfig(chat_template=str(template), template_time=time, cache_dir=str(tmp_path / cache))
        return tokenize(SourceConfig(path=str(path)), data, tokenizer, progress=False)

    morning, evening, tomorrow = map(at, ("2026-11-25T09:00:00", "2026-11-25T21:00:00", "2026-11-26T09:00:00"))
    assert morning.folder == evening.folder, "it writes the day alone"
    assert morning.folder != tomorrow.folder
    assert morning.fingerprint != tomorrow.fingerprint
    assert at("2026-11-25T09:00:00", "empty").fingerprint == morning.fingerprint
