"""Numbers of a frozen model for each supervised token, computed once before the first step and kept beside the token
table.

A reference gives the log-probability of the token. So a run of several epochs needs one pass of the reference, and
full fine-tuning needs no second copy of the weights. A teacher gives its k likeliest tokens, their log-probabilities
in float16, and the logarithm of the probability of all other tokens: 6 k + 4 bytes. This logarithm comes from the
log-sum-exp over the whole vocabulary, so the likeliest tokens are not renormalised.

The file has an entry for each token of the table. Entries of tokens that are not supervised are never written, and
take no room where the file system has sparse files. The file's name is a hash of everything that the numbers depend
on: the frozen weights, the options of techniques that change the numbers, and how documents fit into rows. The folder
is named by a hash of the tokens. So a stale file is never read, and a sweep over learning rates or objectives computes
the numbers once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import nn

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, Dedup
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.chunks import local
from fxtune.distributed.world import World
from fxtune.errors import StorageError, not_written
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.terminal.console import say
from fxtune.system.terminal.progress import phase
from fxtune.system.terminal.units import format_bytes
from fxtune.techniques.precision import Precision
from fxtune.training.visits import visit

COLUMNS = 1024
"""The number of columns in which the checksum of a tensor adds up its 32-bit words."""


class StoredFile(Protocol):
    """A file beside each token table, computed before the first step."""

    field: ClassVar[str] = "stored"
    """The attribute of TokenTable."""
    kind: ClassVar[str]
    title: ClassVar[str]
    key: ClassVar[str]

    @property
    def record(self) -> np.dtype:
        """The dtype of an entry."""

    def entries_in(self, table: TokenTable) -> tuple[int, int]:
        """(entries of the table's file, entries that are written)"""
        return len(table.ids), table.supervised_tokens

    def is_read(self, table: TokenTable, name: str) -> bool:
        """Give the table its file. False if the file is missing or damaged."""
        with suppress(OSError, ValueError, EOFError):
            table.read_stored(self.field, name)
            return True
        return False


@dataclass(frozen=True)
class ReferenceNumbers(StoredFile):
    """The log-probability of each supervised token."""

    kind: ClassVar[str] = "reference"
    title: ClassVar[str] = "the reference's log-probabilities"
    key: ClassVar[str] = "objective.reference"

    @property
    def record(self) -> np.dtype:
        """The dtype of an entry of the file. Its fields are fields of Batch."""
        return np.dtype([("reference", "<f4")])

    def entries(self, model: LanguageModel, batch: Batch) -> np.ndarray:
        """The entries of the tokens at `batch.supervised_at`."""
        return model.log_probs(batch).float().cpu().numpy().view(self.record)


@dataclass(frozen=True)
class TeacherNumbers(StoredFile):
    """The teacher's likeliest tokens in the place of each supervised token."""

    kind: ClassVar[str] = "teacher"
    title: ClassVar[str] = "the teacher's likeliest tokens"
    key: ClassVar[str] = "objective.store"
    tokens: int
    """How many of the likeliest tokens."""
    temperature: float
    vocabulary: int
    """The number of rows that teacher and student both have. Ids beyond it are padding of the teacher's table."""

    @property
    def record(self) -> np.dtype:
        size = (self.tokens,)
        return np.dtype([("teacher_ids", "<i4", size), ("teacher_log_probs", "<f2", size), ("teacher_tail", "<f4")])

    def entries(self, model: LanguageModel, batch: Batch) -> np.ndarray:
        return model.prepared.with_head(lambda: self._likeliest(model, batch))

    def _likeliest(self, model: LanguageModel, batch: Batch) -> np.ndarray:
        hidden, head = model.head_input(batch)
        entries, done = np.empty(len(hidden), self.record), 0
        for part in hidden.split(model.chunk_rows):
            log_probs = (head(part)[:, : self.vocabulary].float() / self.temperature).log_softmax(-1)
            found = log_probs.topk(self.tokens)
            rest = log_probs.scatter(1, found.indices, -torch.inf).logsumexp(-1)
            rows = entries[done : done + len(part)]
            for name, values in zip(self.record.names or (), (found.indices, found.values, rest), strict=True):
                rows[name] = values.cpu().numpy()
            done += len(part)
        return entries


Numbers = ReferenceNumbers | TeacherNumbers
Files = dict[Path, Any]


def store(
    model: LanguageModel,
    plans: Sequence[Plan],
    data: DataConfig,
    loader: LoaderConfig,
    precision: Precision,
    world: World,
    options: Mapping[str, Any],
    numbers: Numbers,
    only: np.ndarray | None = None,
) -> None:
    """Give each table of `plans` its `stored`: the `numbers` that `model` gives to the table's supervised tokens.

    Call this before a checkpoint is loaded, while `model` has its first weights. `options`: whatever else changes the
    numbers, beside weights, tokens and `data`. `only`: digests of the documents that need numbers, uint64, each once;
    None: all documents. Raises StorageError if the files do not fit on the disk or cannot be written.
    """
    tables = list({table.folder: table for plan in plans for table in plan.tables}.values())
    weights = sorted(set(world.gather(weights_checksum(model.model), "comparing weights")))
    # Packing and shared prompts are in the hash because they also decide which pairs are too long for a row.
    parts = [
        weights,
        options,
        data.sequence_length,
        data.on_long,
        data.packing,
        data.shares_prompts,
        *astuple(numbers),
    ]
    others = None
    if only is not None:
        parts.append(hashlib.sha256(np.sort(only).tobytes()).hexdigest())
        others = np.setdiff1d(np.concatenate([table.digests for table in tables]), only)

    def compute(files: Files) -> None:
        rows, pad = plans[0].sizes.micro_batch_size, plans[0].sizes.pad_id
        # Duplicates are computed, too: one table may drop a document that the held-out part of another table keeps.
        every = replace(data, dedup=Dedup.off)
        plan = plan_evaluation(tables, every, micro_batch_size=rows, pad_id=pad, excluded=others)
        own = plan.dealt_out(world.data_rank, world.data_ranks)

        def write(batch: Batch, step: int, position: int, is_counted: bool) -> None:
            entries = numbers.entries(model, batch)[(batch.labels != IGNORE_INDEX).cpu().numpy()]
            spec, done = own.batch_spec(step, position), 0
            for source, start, length in zip(spec.source, spec.start, spec.length, strict=True):
                at = start + 1 + np.flatnonzero(tables[source].supervised[start + 1 : start + length])
                if is_counted and (file := files.get(tables[source].folder)) is not None:
                    file[at] = entries[done : done + len(at)]
                done += len(at)
            assert done == len(entries)

        with closing(Loader(own, loader, world.device)) as batches:
            visit(model, batches, precision, world, f"Computing {numbers.title}", write, shown=True)

    keep([table for plan in plans for table in plan.tables], numbers, parts, world, compute)


@phase("Looking for stored numbers", announce=False, part="stored numbers")
def keep(
    tables: Sequence[TokenTable], stored: StoredFile, parts: Any, world: World, compute: Callable[[Files], None]
) -> None:
    """Give each table its file. `parts`: everything that the entries depend on beside the table. `compute`: takes an
    array for each folder of `tables` without a complete file, and writes this rank's share of the entries. Raises
    StorageError if the files do not fit on the disk or cannot be written."""
    key = json.dumps(parts, default=str, sort_keys=True)
    name = f"{stored.kind}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
    absent = {table.folder for table in tables if not stored.is_read(table, name)}
    absent = absent.union(*world.gather(absent, f"looking for {stored.title}"))  # all ranks compute the same files
    if missing := [*{table.folder: table for table in tables if table.folder in absent}.values()]:
        world.main_first(partial(_reserve, missing, name, stored), f"making room for {stored.title}")
        files = {table.folder: np.lib.format.open_memmap(_staging(table, name), "r+") for table in missing}
        compute(files)
        for file in files.values():
            file.flush()
        world.gather(None, f"storing {stored.title}")

        def finish() -> None:
            for table in missing:
                with suppress(FileNotFoundError):
                    os.replace(_staging(table, name), table.folder / name)

        world.main_first(finish, f"waiting for rank 0 to store {stored.title}")
    for table in tables:
        table.read_stored(stored.field, name)


def _staging(table: TokenTable, name: str) -> str:
    return str(table.folder / f"{name}.staging")


def _reserve(tables: Sequence[TokenTable], name: str, numbers: StoredFile) -> None:
    """Make the files, with entries of zeros, and say their sizes. A file that another rank, or a killed run, has made
    stays: all its entries are computed."""
    for table in tables:
        file, (entries, written) = Path(_staging(table, name)), numbers.entries_in(table)
        size, free = written * numbers.record.itemsize, shutil.disk_usage(table.folder).free
        try:
            try:
                np.load(file, mmap_mode="r")
            except (FileNotFoundError, ValueError, EOFError):
                say(f"{numbers.key}: {numbers.title} take {format_bytes(size)} beside {table.name}, in {table.folder}")
                if size > free:
                    raise StorageError(
                        f"{numbers.key}: {table.folder} has {format_bytes(free)} left, and {numbers.title} take "
                        f"{format_bytes(size)}. Set another {numbers.key} or another data.cache_dir."
                    ) from None
                np.lib.format.open_memmap(file, "w+", numbers.record, (entries,)).flush()
            if written == entries and hasattr(os, "posix_fallocate"):  # a full disk would end the writer with SIGBUS
                with open(file, "rb+") as opened:
                    os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
        except OSError as problem:
            file.unlink(missing_ok=True)
            where = f"{numbers.title[0].upper()}{numbers.title[1:]} cannot be written to {table.folder}"
            raise not_written(where, problem, "or set data.cache_dir") from problem


def weights_checksum(model: nn.Module, trained: bool = False) -> str:
    """A hash of the weights and buffers that this rank holds. `trained`: of the trained weights alone."""
    found = hashlib.sha256()
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    tensors = [(name, tensor) for name, tensor in tensors if tensor.requires_grad or not trained]
    for name, tensor in sorted(tensors, key=lambda entry: entry[0]):
        chunk = local(tensor)
        data = chunk.contiguous().flatten().view(torch.uint8)
        words = nn.functional.pad(data, (0, -len(data) % (4 * COLUMNS))).view(torch.int32)
        sums = words.view(-1, COLUMNS).sum(0, dtype=torch.int64)
        found.update(f"{name} {tuple(chunk.shape)} {chunk.dtype}".encode())
        found.update(sums.cpu().numpy().tobytes())
    return found.hexdigest()
