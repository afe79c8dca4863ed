"""From a source to a `TokenTable`: in parallel, in bounded memory, once for each content and settings.

Shards go to worker processes and come back as arrays, in order, straight to disk; only a few are on their way at a time.
The table is written to a staging folder under a lock and renamed when it is whole, so that of two runs that start at
once one works and the other waits, and a kill at any moment leaves either the whole table or none. Its folder is named
by a hash of the rows' bytes and of everything else the tokens depend on. `data.sequence_length` is not part of that:
documents are cut later.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.data.chat.encode import Encoder, read_template
from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.read.formats import RowFormat
from fxtune.data.read.jsonl import Row, Shard
from fxtune.data.read.sources import Source, open_source
from fxtune.data.tokenized.process_pool import WorkerDied, in_order
from fxtune.data.tokenized.table import (
    BadRow,
    Encoded,
    TableWriter,
    TokenTable,
    lock_of,
    read_meta,
    require_own,
    staging_of,
    tidy,
)
from fxtune.errors import ConfigError, DataError, HardwareError, StorageError
from fxtune.system.host import cache_home, cores

__all__ = ["TokenTable", "tokenize"]

ENCODING_VERSION = 3
"""Part of every table's key: raise it when chat.py, template.py or this file would make other tokens of the same row."""
IN_PROCESS_BYTES = 4 << 20
"""Sources below this size are tokenised in this process: starting workers would take longer."""
BATCH_ROWS = 256
BATCH_BYTES = 512 << 10


def tokenize(
    source: SourceConfig, data: DataConfig, tokenizer: Any, quarantine: Path | None = None, progress: bool = True
) -> TokenTable:
    """Tokenise a source, or take it from the cache.

    Args:
        tokenizer: a fast tokenizer.
        quarantine: with data.on_bad_row=quarantine, the file that bad rows are added to, each as {where, error, row}.
        progress: print one line about the result, and a bar while working on a terminal.

    Raises:
        ConfigError: a setting of the source or data.workers makes no sense.
        DataError: the source cannot be read, a row is bad (on_bad_row=error), no row is usable, or nothing is supervised.
        StorageError: the cache cannot be written, or has pipes, sockets or devices by the names of its files.
    """
    if data.workers < 0:
        raise ConfigError(f"data.workers={data.workers}: give a number of processes, or 0 for one a core.")
    started = time.perf_counter()
    root = cache_root(data)
    opened = open_source(source, root / "datasets" if data.cache_dir else None)
    format = opened.format()
    encoder = Encoder(tokenizer, format, data.chat_template)
    fingerprint = _fingerprint(opened, data, format, tokenizer)
    folder = root / "tokens" / fingerprint
    cached = True
    require_own(folder)
    try:
        with _locked(folder, opened.name):
            if read_meta(folder) is None:
                cached = False
                _build(folder, fingerprint, opened, encoder, data, progress)
            table = TokenTable(folder, opened.name)
        if not cached and data.cache_days is not None:
            _tidy(folder.parent, data.cache_days)
    except OSError as problem:
        raise StorageError(
            f"Tokens of {opened.name} cannot be kept in {folder.parent}: {problem.strerror or problem}. Make room "
            "there, or set data.cache_dir to a folder that can be written."
        ) from problem
    if table.bad_rows:
        _report_bad_rows(table, opened, data, quarantine)
    if progress:
        _say(table, encoder, cached, time.perf_counter() - started, quarantine)
    return table


def _tidy(root: Path, days: int) -> None:
    removed, freed = tidy(root, days)
    if removed:
        print(
            f"Removed from {root}: the tokens of {removed:,} sources that no run used for {days} days, {freed / 1e6:,.1f} MB "
            "(data.cache_days).",
            flush=True,
        )


def cache_root(data: DataConfig) -> Path:
    if data.cache_dir:
        return Path(os.path.expanduser(data.cache_dir)).absolute()
    return cache_home()


def _fingerprint(source: Source, data: DataConfig, format: RowFormat, tokenizer: Any) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("padding", "truncation"):  # left behind by the last call; the encoder sets its own
        backend.pop(state, None)
    template = read_template(data.chat_template) if data.chat_template else tokenizer.chat_template
    config = source.config
    settings = [
        ENCODING_VERSION,
        source.content_key(),
        format.value,
        sorted(config.columns.items()),
        config.limit,
        config.text_unit.value,
        backend,
        template,
        tokenizer.special_tokens_map,
    ]
    return blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _build(folder: Path, fingerprint: str, source: Source, encoder: Encoder, data: DataConfig, progress: bool) -> None:
    """Make the table in `folder`. The caller holds its lock, so whatever lies in the way was left by a process that died."""
    staging = staging_of(folder)
    shutil.rmtree(staging, ignore_errors=True)
    names = [file.name for file in source.files] if source.kind != "hub" else [source.name]
    try:
        with TableWriter(staging, names) as writer, _bar(source, progress) as advance:
            for part, size in _encoded(source, encoder, data):
                if part.bad and data.on_bad_row is OnBadRow.error:
                    raise _bad_row_error(source.name, part.bad[0].where, part.bad[0].error)
                writer.append(part)
                advance(size, len(part.ids))
            source.require_unchanged()
            _require_targets(writer, source, encoder, data)
            writer.finish(fingerprint=fingerprint, name=source.name, format=encoder.format.value)
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _require_targets(writer: TableWriter, source: Source, encoder: Encoder, data: DataConfig) -> None:
    first = writer.first_bad
    if not writer.documents and first is not None:
        raise DataError(
            f"{source.name}: none of the {writer.bad_rows:,} rows can be used as {encoder.format.value}; the first, "
            f"{first.where}: {first.error}. Set the source's format, or rename its columns."
        )
    if not writer.documents:
        raise DataError(f"{source.name} has no rows.")
    if not writer.supervised:
        reason = {
            RowFormat.tokens: "its labels are all -100, or its assistant_masks all 0",
            RowFormat.text: "no text has a token",
        }.get(
            encoder.format,
            "the chat template marks no token of an assistant's turn, or the chats have no such turn; "
            f"the template is {data.chat_template or 'the one that comes with the tokenizer'}",
        )
        raise DataError(
            f"{source.name}: not one of {writer.tokens:,} tokens in {writer.documents:,} documents of format "
            f"{encoder.format.value} is supervised: {reason}. A model would learn nothing from it."
        )


# --- Encoding, here or in workers -------------------------------------------------------------------------------------


def _encoded(source: Source, encoder: Encoder, data: DataConfig) -> Iterator[tuple[Encoded, int]]:
    """Each shard's tokens, in order, with the shard's size in bytes."""
    workers = data.workers or cores()
    if workers == 1 or source.size < IN_PROCESS_BYTES:
        try:
            for shard in source.shards():
                yield encode_shard(shard, encoder), shard.size
        except MemoryError as problem:
            raise HardwareError(
                f"There is not enough memory to tokenise {source.name}. A row takes 300 times its size: make "
                "several of the longest."
            ) from problem
        return
    sizes: deque[int] = deque()

    def shards() -> Iterator[Shard]:
        for shard in source.shards():
            sizes.append(shard.size)
            yield shard

    try:
        for part in in_order(_encoding, pickle.dumps(encoder), shards(), workers):
            yield part, sizes.popleft()
    except (WorkerDied, MemoryError) as problem:
        raise HardwareError(
            f"A process that tokenised {source.name} was killed, most likely for want of memory. Use fewer: "
            f"data.workers={max(1, workers // 2)} (now {workers})."
        ) from problem


def _encoding(encoder: bytes) -> Callable[[Shard], Encoded]:
    """Set up one worker. torch is never imported here: a worker starts in about a second and stays small."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    if b"transformers_modules" in encoder:  # a tokenizer whose code came with the model: make that importable here too
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()
    return partial(encode_shard, encoder=pickle.loads(encoder))


def encode_shard(shard: Shard, encoder: Encoder) -> Encoded:
    """Tokenise the rows of a shard. Rows that cannot be read or encoded come out in `bad`, in order."""
    parts: list[Encoded] = []
    for batch in _batches(shard.rows()):
        results = iter(encoder.encode([row.value for row in batch if row.value is not None]))
        documents, bad = [], []
        for row in batch:
            if row.value is None:
                bad.append(BadRow(row.where, row.error or "", row.raw))
                continue
            result = next(results)
            if isinstance(result, str):
                bad.append(BadRow(row.where, result, row.value))
            elif not result.ids:
                bad.append(BadRow(row.where, "the row has no tokens", row.value))
            else:
                documents.append(result)
        ids = [np.asarray(document.ids, np.int32) for document in documents]
        parts.append(
            Encoded(
                ids=_joined(ids, np.int32),
                supervised=_joined([np.asarray(one.supervised, np.bool_) for one in documents], np.bool_),
                lengths=np.array([len(one) for one in ids], np.int64),
                digests=np.array([_digest(one) for one in ids], np.uint64),
                bad=bad,
                literal=sum(one.literal for one in documents),
            )
        )
        assert len(parts[-1].ids) == len(parts[-1].supervised), "a document needs one mask entry a token"
    return Encoded(
        ids=_joined([part.ids for part in parts], np.int32),
        supervised=_joined([part.supervised for part in parts], np.bool_),
        lengths=_joined([part.lengths for part in parts], np.int64),
        digests=_joined([part.digests for part in parts], np.uint64),
        bad=[bad for part in parts for bad in part.bad],
        literal=sum(part.literal for part in parts),
    )


def _joined(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=8).digest(), "little")


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows by the few hundred: what Python lists of ids cost in memory stays small beside the process itself."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += row.size
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# --- Bad rows, the lock, the display ----------------------------------------------------------------------------------


def _report_bad_rows(table: TokenTable, source: Source, data: DataConfig, quarantine: Path | None) -> None:
    files = [file.name for file in source.files] if source.kind != "hub" else [source.name]
    entries = table.bad(files)
    if data.on_bad_row is OnBadRow.error:
        first = next(entries)
        raise _bad_row_error(source.name, first["where"], first["error"])
    if quarantine is None:
        return
    try:
        quarantine.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run quarantines the same rows again: each stands in the file once.
        text = quarantine.read_text() if quarantine.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a kill may have cut the last line short
        there = set(whole.splitlines())
        with open(quarantine, "w", encoding="utf-8") as file:
            file.write(whole)
            for entry in entries:
                line = json.dumps(entry)
                if line not in there:
                    file.write(line + "\n")
    except OSError as problem:
        raise StorageError(
            f"Rows that cannot be used cannot be written to {quarantine}: {problem.strerror or problem}. Free "
            "space there, or set run.dir to another disk."
        ) from problem


def _bad_row_error(name: str, where: str, reason: str) -> DataError:
    return DataError(
        f"{where}: {reason}. Mend or remove this row; or set data.on_bad_row=quarantine, which writes such rows to "
        "quarantine.jsonl in the run folder and goes on."
    )


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_of(folder))
    try:
        lock.acquire(timeout=1)
    except Timeout:
        print(
            f"Another process is tokenising {name}; waiting for it. (With a data.cache_dir of its own a run waits for nobody.)",
            flush=True,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _bar(source: Source, progress: bool) -> Iterator[Any]:
    """A function (bytes, tokens) that moves a progress bar, which is there only on a terminal; a log gets one line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if progress and not console.is_terminal and source.size >= IN_PROCESS_BYTES:
        print(f"Tokenising {source.describe()}", flush=True)  # a log must not be silent for minutes
    columns = (
        TextColumn("tokenising {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task(source.name, total=max(1, source.size), tokens=0)
        tokens = 0

        def advance(size: int, more: int) -> None:
            nonlocal tokens
            tokens += more
            bar.update(task, advance=size, tokens=tokens)

        yield advance


def _say(table: TokenTable, encoder: Encoder, cached: bool, seconds: float, quarantine: Path | None) -> None:
    tokens = len(table.ids)
    rows = "1 bad row" if table.bad_rows == 1 else f"{table.bad_rows:,} bad rows"
    bad = f", {rows} quarantined{f' in {quarantine}' if quarantine else ''}" if table.bad_rows else ""
    how = "from the cache" if cached else f"tokenised in {seconds:,.1f} s"
    print(
        f"{table.name}: {table.format.value}, {len(table):,} documents, {tokens:,} tokens, "
        f"{table.supervised_tokens / tokens:.0%} supervised{bad} ({how})",
        flush=True,
    )
    if table.literal:
        documents = "1 document has" if table.literal == 1 else f"{table.literal:,} documents have"
        print(
            f"{table.name}: {documents} special tokens in a message, tokenised as the letters that they are.",
            flush=True,
        )
    for remark in encoder.remarks():
        print(f"{table.name}: {remark}", flush=True)
