"""Tokenizes a source into a `TokenTable`: in parallel, in bounded memory, once for the same content and settings.

Worker processes turn shards of rows into arrays, which are written to disk in order. Only a few shards are in memory
at a time. The table's folder is named by a hash of the rows' bytes and of all settings that the tokens depend on. The
table does not depend on `data.sequence_length`. If chats must be split or prompts shortened, a second table is made.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.data.chat.encode import Document, EncodedGroup, Encoder
from fxtune.data.chat.pairs import prompt_tokens
from fxtune.data.chat.remarks import TEXT_REMARK
from fxtune.data.chat.split import SplitCounts
from fxtune.data.config import DataConfig, OnBadRow, OnLong, OnRewritten, SourceConfig
from fxtune.data.formats.row_format import LearnConfig
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.read.row import Row, file_and_place, row_shards
from fxtune.data.read.sources import Shard, Source, open_source
from fxtune.data.tokenized import cache
from fxtune.data.tokenized.process_pool import WorkerDied, map_in_order
from fxtune.data.tokenized.table import DATA_FILES, EncodedShard, ShardBuilder, TableWriter, TokenTable, is_intact
from fxtune.errors import DataError, HardwareError, writing
from fxtune.plugins import ROW_FORMATS, require_unchanged, tool_schemas
from fxtune.system.machine.host import cores
from fxtune.system.terminal.console import say
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.units import counted
from fxtune.upstream.transformers import import_code_of_models

ENCODING_VERSION = 13
"""Part of the cache's key. Raise it when the code makes other tokens or labels of a row, or refuses other rows."""
SPLIT_VERSION = 2
"""Part of the cache's key for tables of split chats. Raise it when the code splits chats differently."""
SHORTEN_VERSION = 1
"""Part of the cache's key for tables with shorter prompts. Raise it when the code shortens prompts differently."""
IMAGES_VERSION = 2
"""Part of the cache's key for models that read images. Raise it for the same reasons as ENCODING_VERSION."""
IN_PROCESS_BYTES = 4 << 20
"""Sources smaller than this are tokenized in this process, because starting workers would take longer."""
IN_PROCESS_SECONDS = 20.0
"""If the rest of a small source with images would take longer than this in this process, workers take the rest."""
BATCH_ROWS = 256
BATCH_BYTES = 512 << 10


def tokenize(
    source: SourceConfig,
    data: DataConfig,
    tokenizer: Any,
    quarantine: Path | None = None,
    progress: bool = True,
    images: ImageProcessor | None = None,
) -> TokenTable:
    """Tokenize a source, or take it from the cache. `images`: the processor of a model that reads images.

    `quarantine`: with data.on_bad_row=quarantine, the file to which bad rows are added, each as {where, error, row}.
    `progress`: print a line about the result.

    Raises:
        DataError: the source cannot be read, a row is bad (on_bad_row=error), or no row is usable or supervised.
        StorageError: the cache cannot be written, or has a pipe, socket or device under the name of one of its files.
        HardwareError: there is not enough memory.
    """
    started = time.perf_counter()
    root = cache.cache_root(data)
    opened = open_source(source, root / "datasets" if data.cache_dir else None)
    opened.keeps_images = images is not None
    options = dict(
        learn=data.learn, unused=source.unused, on_rewritten=data.on_rewritten, instruction=source.instruction or ""
    )
    if source.instruction and not opened.format().is_compared:
        raise DataError(
            f"{opened.name}: its rows are {opened.format().name}, and only rows of objective=embedding have queries "
            "for the source's `instruction`. Remove it."
        )
    encoder = Encoder.of(data, tokenizer, opened.format(), images, **options)
    encoder.folders = opened.folders
    if source.environment:
        if opened.format().name != "prompt":
            raise DataError(f"{opened.name}: the source's `environment` is for objective=policy. Remove it.")
        encoder.tools = tool_schemas(source.environment)
    settings, folder = _settings(opened, encoder, tokenizer), root / "tokens"
    place = "or set data.cache_dir to a folder that can be written"
    with writing(f"Tokens of {opened.name} cannot be stored in {folder}", place):
        whole, cached = _open_or_build(folder, settings, opened, encoder, data)
        table = whole
        if change := _change_documents(whole, encoder, data):
            # A second table is made. The first one does not depend on data.sequence_length, so other lengths reuse it.
            table, found = _open_or_build(folder, [*settings, change], opened, encoder, data)
            table.whole, cached = whole, cached and found
        if not cached and data.cache_days is not None:
            removed, freed = cache.remove_unused(folder, data.cache_days)
            if removed:
                say(
                    f"Removed from {folder}: the tokens of {removed:,} sources that no run used for "
                    f"{data.cache_days} days, {freed / 1e6:,.1f} MB (data.cache_days)."
                )
    if table.bad_rows:
        _report_bad_rows(table, opened, data, quarantine)
    if progress:
        if opened.remark:
            print(f"{opened.name}: {opened.remark}.", flush=True)
        how = "from the cache" if cached else f"tokenized in {time.perf_counter() - started:,.1f} s"
        _print_result(table, encoder, how, quarantine)
    return table


def _change_documents(whole: TokenTable, encoder: Encoder, data: DataConfig) -> list[Any]:
    """Set the encoder to split chats or to shorten prompts if rows of `whole` need this. Returns what the change adds
    to the cache's key; empty if there is no change."""
    format, length = encoder.format, data.sequence_length
    encoder.by_question = bool(whole.rewritten) and data.on_rewritten is OnRewritten.split
    is_cut = format.is_chat and data.on_long is OnLong.split
    if encoder.by_question or (is_cut and whole.longest > length):
        encoder.longest = length if is_cut else None
        return ["split at turns", SPLIT_VERSION, encoder.longest, *["by question"] * encoder.by_question]
    if format.as_tokenized and data.on_long in (OnLong.split, OnLong.truncate) and whole.longest > length:
        encoder.longest = length
        return ["cut texts", length]
    if format.answers and data.on_long is OnLong.truncate:
        encoder.packing = data.packs
        if (whole.by_group if data.packs else whole).longest > length:
            encoder.longest = length
            return ["shorter prompts", SHORTEN_VERSION, length, data.packs]
    return []


def _open_or_build(
    tables: Path, settings: list[Any], source: Source, encoder: Encoder, data: DataConfig
) -> tuple[TokenTable, bool]:
    """Open the table of these settings. Build it if it does not exist or its images have changed. `tables`: the folder
    of all tables. Returns (the table, whether it was in the cache)."""
    folder = tables / _hash([ENCODING_VERSION, *settings, sorted(source.config.unused)])
    cache.require_usable_paths(folder, [cache.META, *DATA_FILES])
    with cache.locked(folder, source.name):
        if not (cached := is_intact(folder, source.name)):
            _build(folder, settings, source, encoder, data)
        table = TokenTable(folder, source.name, image_processor=encoder.images)
        if table.has_changed_images():
            _build(folder, settings, source, encoder, data)
            table, cached = TokenTable(folder, source.name, image_processor=encoder.images), False
        return table, cached


def _settings(source: Source, encoder: Encoder, tokenizer: Any) -> list[Any]:
    """All settings that the tokens depend on, without the version. Newer settings are added only if they are not the
    default, so that the keys of older tables stay valid."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("padding", "truncation"):  # earlier calls set them; the encoder sets its own
        backend.pop(state, None)
    settings = [
        source.content_key(),
        encoder.format.name,
        sorted(source.config.columns.items()),
        source.config.limit,
        source.config.text_unit.value,
        backend,
        encoder.template,
        tokenizer.special_tokens_map,
    ]
    learn = {name: value for name, value in asdict(encoder.learn).items() if value or name != "since_last_question"}
    converter, images = source.config.plugin_format, encoder.images
    newer = {
        "row format": [converter, ROW_FORMATS.added()[converter].identity] if converter else None,
        "system": encoder.system,
        "strftime_now": encoder.written_times() or None,
        "learn": learn if encoder.learn != LearnConfig() else None,
        "chat template kwargs": encoder.variables or None,
        "digests of prompts": bool(encoder.format.answers) or None,
        "images": [IMAGES_VERSION, images.identity, sorted({*map(os.path.realpath, encoder.folders.values())})]
        if images
        else None,
        "instruction": encoder.instruction or None,
        "tools": encoder.tools or None,
        "on rewritten": None if encoder.on_rewritten is OnRewritten.split else encoder.on_rewritten.value,
    }
    settings += [name if value is True else {name: value} for name, value in newer.items() if value is not None]
    return settings


def _hash(settings: list[Any]) -> str:
    return blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _build(folder: Path, settings: list[Any], source: Source, encoder: Encoder, data: DataConfig) -> None:
    """Build the table in `folder`. The caller holds the table's lock."""
    verb = "Tokenizing" if encoder.longest is None and not encoder.by_question else "Dividing"  # a second table
    reading = phase(f"{verb} {source.describe()}", round(source.size / 1e6, 1), "MB")
    # closing() ends the worker processes, which an error's traceback would keep alive.
    shards = closing(_encoded_shards(source, encoder, data))
    with (
        cache.staged(folder) as staging,
        TableWriter(staging, source.file_names) as writer,
        reading as work,
        shards as encoded,
    ):
        for part, size in encoded:
            if part.bad and data.on_bad_row is OnBadRow.error:
                raise bad_row_error(part.bad[0].where, part.bad[0].error, source.config.columns)
            writer.append(part)
            work.advance(size / 1e6)
        for file in source.files:
            file.require_unchanged()
        if converter := source.config.plugin_format:
            require_unchanged(ROW_FORMATS.added()[converter])
        _require_targets(writer, source, encoder, data)
        beginning = {"beginning": encoder.beginning} if encoder.format.answers else {}
        writer.finish(name=source.name, format=encoder.format.name, **beginning)


def _require_targets(writer: TableWriter, source: Source, encoder: Encoder, data: DataConfig) -> None:
    first = writer.first_bad
    if not writer.documents and first is not None:
        raise DataError(
            f"{source.name}: none of the {writer.bad_rows:,} rows can be used as {encoder.format.name}; the first, "
            f"{first.where}: {first.error}. Set the source's format, or rename its columns."
        )
    if not writer.documents and writer.split.dropped and encoder.format.answers:
        raise DataError(
            f"{source.name}: in each of its {writer.split.dropped:,} rows the answers, with the images of the "
            f"prompt, are longer than data.sequence_length={data.sequence_length:,}. Raise it."
        )
    if not writer.documents and writer.split.chats:
        raise DataError(
            f"{source.name}: none of its {writer.split.chats:,} chats has an answer in the first "
            f"{data.sequence_length:,} tokens. Raise data.sequence_length."
        )
    if not writer.documents:
        raise DataError(f"{source.name} has no rows.")
    if not writer.supervised and not writer.labelled:
        raise DataError(
            f"{source.name}: not one of {writer.tokens:,} tokens in {writer.documents:,} documents of format "
            f"{encoder.format.name} is supervised: {encoder.format.nothing_learned}. A model would learn nothing from "
            "it."
        )


def _encoded_shards(source: Source, encoder: Encoder, data: DataConfig) -> Generator[tuple[EncodedShard, int]]:
    """Yield (tokens of a shard, its size in bytes) for each shard in order. The tokens are made in this process or in
    workers. Raises HardwareError if there is not enough memory."""
    workers, left = data.workers or cores(), source.shards()
    if workers == 1 or source.size < IN_PROCESS_BYTES:
        began, done = time.perf_counter(), 0
        try:
            for shard in left:
                yield encode_shard(shard, encoder), shard.size
                done += shard.size
                # Rows that name images are short, and the images take most of the time.
                rest = (time.perf_counter() - began) * (source.size - done) / max(done, 1)
                if encoder.images is not None and workers > 1 and rest > IN_PROCESS_SECONDS:
                    break
            else:
                return
        except MemoryError as problem:
            raise HardwareError(
                f"There is not enough memory to tokenize {source.name}. A row needs 300 times its size: split "
                "the longest rows."
            ) from problem
    sizes: deque[int] = deque()

    def shards() -> Iterator[Shard]:
        for shard in left:
            sizes.append(shard.size)
            yield shard

    try:
        with closing(map_in_order(_worker_setup, pickle.dumps(encoder), shards(), workers)) as parts:
            for part in parts:
                yield part, sizes.popleft()
    except (WorkerDied, MemoryError) as problem:
        raise HardwareError(
            f"A process that tokenized {source.name} was killed, most likely because memory ran out. Use fewer: "
            f"data.workers={max(1, workers // 2)} (now {workers})."
        ) from problem


def _worker_setup(encoder: bytes) -> Callable[[Shard], EncodedShard]:
    """Set up a worker. A worker never imports torch, so it starts fast and stays small."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker uses one core
    if b"transformers_modules" in encoder:  # the tokenizer's code came with the model and must be importable
        import_code_of_models()
    return partial(encode_shard, encoder=pickle.loads(encoder))


def encode_shard(shard: Shard, encoder: Encoder) -> EncodedShard:
    """Tokenize the rows of a shard. Rows that cannot be read or encoded are in `bad` of the result, in order."""
    built, bad = ShardBuilder(), list[Row]()
    escaped, rewritten, split = 0, 0, SplitCounts()
    remarks: Counter[str] = Counter()
    # Rows are encoded in batches, because Python lists of ids need much memory.
    for batch in (part.held for part in row_shards(shard.rows(), BATCH_BYTES, BATCH_ROWS)):
        usable = [row for row in batch if row.value is not None]
        folders = [encoder.folders.get(file_and_place(row.where)[0]) for row in usable]
        samples = iter(encoder.encode([row.value for row in usable if row.value is not None], folders))
        for row in batch:
            if row.value is None:
                bad.append(row)
                continue
            sample = next(samples)
            if isinstance(sample, str):
                bad.append(Row(row.where, None, sample, row.value))
                continue
            documents = sample.documents if isinstance(sample, EncodedGroup) else [sample]
            escaped += any(document.escaped for document in documents)
            rewritten += any(document.is_rewritten for document in documents)
            remarks.update(list(dict.fromkeys(remark for document in documents for remark in document.remarks)))
            if isinstance(sample, EncodedGroup):
                digest, first, prompt = _group_digest(documents), documents[0], None
                if encoder.format.answers:
                    end = prompt_tokens(first)
                    prompt = _digest(first.ids[:end], [image for image in first.images if image.start < end])
                cut = [document.lost for document in documents if document.lost]
                split += SplitCounts(chats=len(cut), truncated=len(cut), lost_tokens=sum(cut))
                if encoder.format.answers and encoder.is_long(documents):
                    found = encoder.shorten(documents)
                    documents, split = found.pieces, split + found.counts
                built.add(documents, digest, sample.labels, prompt)
                continue
            is_long = encoder.longest is not None and len(sample.ids) > encoder.longest
            if is_long or (encoder.by_question and sample.is_rewritten):
                found = encoder.split(row.value, sample, encoder.folders.get(file_and_place(row.where)[0]))
                documents, split = found.pieces, split + found.counts
            built.add(documents, _digest(sample.ids, sample.images))
    return built.shard(bad=bad, escaped=escaped, remarks=remarks, rewritten=rewritten, split=split)


def _group_digest(documents: list[Document]) -> int:
    images = [image for document in documents for image in document.images]
    if len(documents) == 1:
        return _digest(documents[0].ids, images)
    return _digest([part for document in documents for part in (len(document.ids), *document.ids)], images)


def _digest(ids: Sequence[int], images: Sequence[PlacedImage]) -> int:
    """A hash of token ids and of the content of the images among them."""
    digest = blake2b(np.asarray(ids, "<i4").tobytes(), digest_size=8)
    digest.update(np.array([image.image.digest for image in images], "<u8").tobytes())
    return int.from_bytes(digest.digest(), "little")


def _report_bad_rows(table: TokenTable, source: Source, data: DataConfig, quarantine: Path | None) -> None:
    """Add the bad rows to the quarantine file. With on_bad_row=error, raise DataError for the first bad row."""
    entries = table.read_bad_rows(source.file_names)
    if data.on_bad_row is OnBadRow.error:
        first = next(entries)
        raise bad_row_error(first["where"], first["error"], source.config.columns)
    if quarantine is None:
        return
    with writing(f"Bad rows cannot be written to {quarantine}", "or set run.dir to another disk"):
        quarantine.parent.mkdir(parents=True, exist_ok=True)
        # A resumed run finds the same rows again, and each is written only once. If an earlier process was killed, the
        # last line may be incomplete and is dropped.
        text = quarantine.read_text(encoding="utf-8") if quarantine.exists() else ""
        complete = text[: text.rfind("\n") + 1]
        present = set(complete.splitlines())
        with open(quarantine, "w", encoding="utf-8") as file:
            file.write(complete)
            for entry in entries:
                line = json.dumps(entry)
                if line not in present:
                    file.write(line + "\n")


def bad_row_error(where: str, reason: str | None, columns: Mapping[str, str]) -> DataError:
    """The error about a bad row. `columns`: the source's `columns`, by which the message names the file's columns."""
    renamed = [pair for pair in columns.items() if re.search(rf"\b{re.escape(pair[1])}\b", reason or "")]
    names = "".join(f"; `{new}` is the file's column `{old}`" for old, new in renamed)
    return DataError(
        f"{where}: {reason}{names}. Correct or remove this row; or set data.on_bad_row=quarantine, which writes such "
        "rows to quarantine.jsonl in the run folder and goes on."
    )


def _print_result(table: TokenTable, encoder: Encoder, how: str, quarantine: Path | None) -> None:
    tokens = len(table.ids)
    rows = f"{table.bad_rows:,} bad row{'s' * (table.bad_rows != 1)}"
    bad = f", {rows} quarantined{f' in {quarantine}' if quarantine else ''}" if table.bad_rows else ""
    groups = f" in {counted(len(table.by_group), table.format.noun)}" if len(table.by_group) < len(table) else ""
    lines = [
        f"{table.format.name}, {counted(len(table), 'documents')}{groups}, {tokens:,} tokens, "
        f"{table.supervised_tokens / tokens:.0%} supervised{bad} ({how})"
    ]
    if table.escaped:
        documents = "1 document quotes" if table.escaped == 1 else f"{table.escaped:,} documents quote"
        lines.append(f"{documents} special tokens in a message; they are tokenized as plain text.")
    chats = len(table.by_row)
    lines += [
        f"{remark} ({count:,} of {chats:,} documents)."
        for remark, count in table.remarks.items()
        if remark != TEXT_REMARK or count < chats
    ]
    if table.split.questions:
        lines.append(f"the questions of these chats are {table.split.questions:,} documents.")
    if table.split.refused:
        lines.append(f"the chat template refuses {table.split.refused:,} of their questions, which are left out.")
    for line in [*lines, *encoder.remarks()]:
        say(f"{table.name}: {line}")
