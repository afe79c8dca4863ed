"""Tokenizes a source into a `TokenTable`: in parallel, in bounded memory, once for the same content and settings.

Shards go to worker processes and come back as arrays, which are written to disk in order. Only a few are in memory at
a time. The table's folder is named by a hash of the rows' bytes and of every other setting that the tokens depend on.
`data.sequence_length` is not one of them: documents are split later.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.data.chat.encode import Encoder, read_template
from fxtune.data.config import DataConfig, OnBadRow, SourceConfig
from fxtune.data.read.formats import RowFormat
from fxtune.data.read.row import Row, row_shards
from fxtune.data.read.sources import Shard, Source, open_source
from fxtune.data.tokenized import cache
from fxtune.data.tokenized.process_pool import WorkerDied, map_in_order
from fxtune.data.tokenized.table import DATA_FILES, EncodedShard, TableWriter, TokenTable, read_meta
from fxtune.errors import DataError, HardwareError, StorageError
from fxtune.system.host import cores

ENCODING_VERSION = 3
"""Part of every fingerprint. Raise it when the code makes other tokens of the same row."""
IN_PROCESS_BYTES = 4 << 20
"""Sources smaller than this are tokenized in this process, because starting workers would take longer."""
BATCH_ROWS = 256
BATCH_BYTES = 512 << 10


def tokenize(
    source: SourceConfig, data: DataConfig, tokenizer: Any, quarantine: Path | None = None, progress: bool = True
) -> TokenTable:
    """Tokenize a source, or take it from the cache.

    Args:
        tokenizer: a fast tokenizer.
        quarantine: with data.on_bad_row=quarantine, the file to which bad rows are added, each as {where, error, row}.
        progress: print a line about the result, and show a bar on a terminal.

    Raises:
        DataError: the source cannot be read, a row is bad (on_bad_row=error), no row is
            usable, or nothing is supervised.
        StorageError: the cache cannot be written, or has pipes, sockets or devices under the names of its files.
    """
    started = time.perf_counter()
    root = cache.cache_root(data)
    opened = open_source(source, root / "datasets" if data.cache_dir else None)
    format = opened.format()
    encoder = Encoder(tokenizer, format, data.chat_template)
    fingerprint = _fingerprint(opened, data, format, tokenizer)
    folder = root / "tokens" / fingerprint
    cached = True
    cache.require_own(folder, [cache.META, *DATA_FILES])
    try:
        with cache.locked(folder, opened.name):
            if read_meta(folder) is None:
                cached = False
                _build(folder, fingerprint, opened, encoder, data, progress)
            table = TokenTable(folder, opened.name)
        if not cached and data.cache_days is not None:
            removed, freed = cache.remove_unused(folder.parent, data.cache_days)
            if removed:
                print(
                    f"Removed from {folder.parent}: the tokens of {removed:,} sources that no run used for "
                    f"{data.cache_days} days, {freed / 1e6:,.1f} MB (data.cache_days).",
                    flush=True,
                )
    except OSError as problem:
        raise StorageError(
            f"Tokens of {opened.name} cannot be stored in {folder.parent}: {problem.strerror or problem}. Free space "
            "there, or set data.cache_dir to a folder that can be written."
        ) from problem
    if table.bad_rows:
        _report_bad_rows(table, opened, data, quarantine)
    if progress:
        how = "from the cache" if cached else f"tokenized in {time.perf_counter() - started:,.1f} s"
        _print_result(table, encoder, how, quarantine)
    return table


def _fingerprint(source: Source, data: DataConfig, format: RowFormat, tokenizer: Any) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("padding", "truncation"):  # set by earlier calls; the encoder sets its own
        backend.pop(state, None)
    settings = [
        ENCODING_VERSION,
        source.content_key(),
        format.value,
        sorted(source.config.columns.items()),
        source.config.limit,
        source.config.text_unit.value,
        backend,
        read_template(data.chat_template) if data.chat_template else tokenizer.chat_template,
        tokenizer.special_tokens_map,
    ]
    return blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _build(folder: Path, fingerprint: str, source: Source, encoder: Encoder, data: DataConfig, progress: bool) -> None:
    """Make the table in `folder`. The caller holds its lock, so files that exist were left by a process that died."""
    staging = cache.staging_folder(folder)
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with TableWriter(staging, source.file_names) as writer, _progress_bar(source, progress) as advance:
            for part, size in _encoded_shards(source, encoder, data):
                if part.bad and data.on_bad_row is OnBadRow.error:
                    raise _bad_row_error(part.bad[0].where, part.bad[0].error)
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
            "the chat template marks no token of an assistant turn, or the chats have no such turn; "
            f"the template is {data.chat_template or 'the one that comes with the tokenizer'}",
        )
        raise DataError(
            f"{source.name}: not one of {writer.tokens:,} tokens in {writer.documents:,} documents of format "
            f"{encoder.format.value} is supervised: {reason}. A model would learn nothing from it."
        )


def _encoded_shards(source: Source, encoder: Encoder, data: DataConfig) -> Iterator[tuple[EncodedShard, int]]:
    """(tokens of a shard, its size in bytes) for each shard in order, made in this process or in workers."""
    workers = data.workers or cores()
    if workers == 1 or source.size < IN_PROCESS_BYTES:
        try:
            for shard in source.shards():
                yield encode_shard(shard, encoder), shard.size
        except MemoryError as problem:
            raise HardwareError(
                f"There is not enough memory to tokenize {source.name}. A row needs 300 times its size: split "
                "the longest rows."
            ) from problem
        return
    sizes: deque[int] = deque()

    def shards() -> Iterator[Shard]:
        for shard in source.shards():
            sizes.append(shard.size)
            yield shard

    try:
        for part in map_in_order(_worker_setup, pickle.dumps(encoder), shards(), workers):
            yield part, sizes.popleft()
    except (WorkerDied, MemoryError) as problem:
        raise HardwareError(
            f"A process that tokenized {source.name} was killed, most likely because memory ran out. Use fewer: "
            f"data.workers={max(1, workers // 2)} (now {workers})."
        ) from problem


def _worker_setup(encoder: bytes) -> Callable[[Shard], EncodedShard]:
    """Set up a worker. It never imports torch, so it starts in about a second and stays small."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a process
    if b"transformers_modules" in encoder:  # the tokenizer's code came with the model: make it importable here
        from transformers.dynamic_module_utils import init_hf_modules

        init_hf_modules()
    return partial(encode_shard, encoder=pickle.loads(encoder))


def encode_shard(shard: Shard, encoder: Encoder) -> EncodedShard:
    """Tokenize the rows of a shard. Rows that cannot be read or encoded are in `bad`, in order."""
    ids: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    bad: list[Row] = []
    escaped = 0
    # In batches, so that their Python lists of ids need little memory.
    for batch in (part.held for part in row_shards(shard.rows(), BATCH_BYTES, BATCH_ROWS)):
        documents = iter(encoder.encode([row.value for row in batch if row.value is not None]))
        for row in batch:
            if row.value is None:
                bad.append(row)
                continue
            document = next(documents)
            if isinstance(document, str):
                bad.append(Row(row.where, None, document, row.value))
                continue
            assert len(document.ids) == len(document.supervised) > 0
            ids.append(np.asarray(document.ids, np.int32))
            supervised.append(np.asarray(document.supervised, np.bool_))
            escaped += document.escaped
    return EncodedShard(
        ids=_concatenated(ids, np.int32),
        supervised=_concatenated(supervised, np.bool_),
        lengths=np.array([len(one) for one in ids], np.int64),
        digests=np.array([_digest(one) for one in ids], np.uint64),
        bad=bad,
        escaped=escaped,
    )


def _concatenated(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _digest(ids: np.ndarray) -> int:
    return int.from_bytes(blake2b(ids.astype("<i4", copy=False).tobytes(), digest_size=8).digest(), "little")


def _report_bad_rows(table: TokenTable, source: Source, data: DataConfig, quarantine: Path | None) -> None:
    """Add the bad rows to the quarantine file, or raise DataError for the first (on_bad_row=error)."""
    entries = table.read_bad_rows(source.file_names)
    if data.on_bad_row is OnBadRow.error:
        first = next(entries)
        raise _bad_row_error(first["where"], first["error"])
    if quarantine is None:
        return
    try:
        quarantine.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run finds the same rows again: write each only once. A kill may have cut the last line short.
        text = quarantine.read_text() if quarantine.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        present = set(complete.splitlines())
        with open(quarantine, "w", encoding="utf-8") as file:
            file.write(complete)
            for entry in entries:
                line = json.dumps(entry)
                if line not in present:
                    file.write(line + "\n")
    except OSError as problem:
        raise StorageError(
            f"Bad rows cannot be written to {quarantine}: {problem.strerror or problem}. Free space there, or set "
            "run.dir to another disk."
        ) from problem


def _bad_row_error(where: str, reason: str | None) -> DataError:
    return DataError(
        f"{where}: {reason}. Correct or remove this row; or set data.on_bad_row=quarantine, which writes such rows to "
        "quarantine.jsonl in the run folder and goes on."
    )


@contextmanager
def _progress_bar(source: Source, progress: bool) -> Iterator[Callable[[int, int], None]]:
    """A function (bytes, tokens) that advances a bar, which is shown on a terminal only; a log gets one line."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if progress and not console.is_terminal and source.size >= IN_PROCESS_BYTES:
        print(f"Tokenizing {source.describe()}", flush=True)  # a log must not be silent for minutes
    columns = (
        TextColumn("tokenizing {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task(source.name, total=max(1, source.size), tokens=0)
        total = 0

        def advance(size: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            bar.update(task, advance=size, tokens=total)

        yield advance


def _print_result(table: TokenTable, encoder: Encoder, how: str, quarantine: Path | None) -> None:
    tokens = len(table.ids)
    rows = "1 bad row" if table.bad_rows == 1 else f"{table.bad_rows:,} bad rows"
    bad = f", {rows} quarantined{f' in {quarantine}' if quarantine else ''}" if table.bad_rows else ""
    lines = [
        f"{table.format.value}, {len(table):,} documents, {tokens:,} tokens, "
        f"{table.supervised_tokens / tokens:.0%} supervised{bad} ({how})"
    ]
    if table.escaped:
        documents = "1 document quotes" if table.escaped == 1 else f"{table.escaped:,} documents quote"
        lines.append(f"{documents} special tokens in a message; they are tokenized as plain text.")
    for line in [*lines, *encoder.remarks()]:
        print(f"{table.name}: {line}", flush=True)
