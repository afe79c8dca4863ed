"""The teacher's likeliest tokens, computed once before the first step and kept beside the token table.

For each supervised token the file has k ids, their log-probabilities in float16, and the logarithm of the probability
of all other tokens: 6 k + 4 bytes. This logarithm comes from the log-sum-exp over the whole vocabulary, so the
likeliest tokens are not renormalised. The name of the file is a hash of all on which the numbers depend: the teacher's
weights, the temperature, and the options of techniques that change the numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, Dedup
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import StorageError, not_written
from fxtune.objectives.language_model import LanguageModel
from fxtune.system.terminal.console import say
from fxtune.system.terminal.units import format_bytes
from fxtune.techniques.precision import Precision
from fxtune.training.data.stored_reference import weights_checksum
from fxtune.training.visits import visit


@dataclass(frozen=True)
class StoredTokens:
    """What is stored for each supervised token."""

    tokens: int
    """How many of the likeliest tokens."""
    temperature: float
    vocabulary: int
    """The number of rows of the student's table. Ids beyond it are padding of the teacher's table, and left out."""

    @property
    def record(self) -> np.dtype:
        """The dtype of an entry of the file."""
        return np.dtype([("ids", "<i4", (self.tokens,)), ("log_probs", "<f2", (self.tokens,)), ("tail", "<f4")])

    def entries(self, logits: torch.Tensor) -> np.ndarray:
        """The entries of the teacher's `logits` [rows, its vocabulary]."""
        log_probs = (logits[:, : self.vocabulary].float() / self.temperature).log_softmax(-1)
        found = log_probs.topk(self.tokens)
        rest = log_probs.scatter(1, found.indices, -torch.inf).logsumexp(-1)
        entries = np.empty(len(logits), self.record)
        entries["ids"], entries["log_probs"] = found.indices.cpu().numpy(), found.values.cpu().numpy()
        entries["tail"] = rest.cpu().numpy()
        return entries


def store_teacher(
    model: LanguageModel,
    plans: Sequence[Plan],
    data: DataConfig,
    loader: LoaderConfig,
    precision: Precision,
    world: World,
    options: Mapping[str, Any],
    stored: StoredTokens,
) -> None:
    """Give each table of `plans` its `teacher`: the likeliest tokens of `model` at each supervised token.

    `options`: whatever else changes the numbers, beside weights and tokens. Raises StorageError if the files do not
    fit on the disk or cannot be written.
    """
    tables = list({table.folder: table for plan in plans for table in plan.tables}.values())
    most = min(stored.vocabulary, model.model.config.get_text_config().vocab_size)
    stored = replace(stored, tokens=min(stored.tokens, most))
    parts = [weights_checksum(model.model), options, data.sequence_length, data.on_long, data.packing]
    key = json.dumps([*parts, *astuple(stored)], default=str, sort_keys=True)
    name = f"teacher-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
    if not all(world.gather(all(_is_read(table, name) for table in tables), "looking for the stored teacher")):
        world.main_first(partial(_reserve, tables, name, stored.record), "making room for the teacher's tokens")
        sizes = plans[0].sizes
        every = replace(data, dedup=Dedup.off)
        plan = plan_evaluation(tables, every, micro_batch_size=sizes.micro_batch_size, pad_id=sizes.pad_id)
        own = plan.dealt_out(world.data_rank, world.data_ranks)
        with closing(Loader(own, loader, world.device)) as batches:
            _compute(model, batches, precision, world, name, stored)
        world.gather(None, "storing the teacher")

        def finish() -> None:
            for table in tables:
                with suppress(FileNotFoundError):
                    os.replace(table.folder / f"{name}.staging", table.folder / name)

        world.main_first(finish, "waiting for rank 0 to store the teacher")
    for plan in plans:
        for table in plan.tables:
            table.read_teacher(name)


def _is_read(table: TokenTable, name: str) -> bool:
    with suppress(OSError, ValueError, EOFError):
        table.read_teacher(name)
        return True
    return False


def _reserve(tables: Sequence[TokenTable], name: str, entry: np.dtype) -> None:
    """Make the missing files, with entries of zeros, and say their sizes."""
    for table in tables:
        file, size = table.folder / f"{name}.staging", table.supervised_tokens * entry.itemsize
        if _is_read(table, name) or file.exists():  # another rank has made it
            continue
        say(f"objective.store: the teacher's likeliest tokens take {format_bytes(size)} beside {table.name}")
        free = shutil.disk_usage(table.folder).free
        if size > free:
            raise StorageError(
                f"objective.store: {table.folder} has {format_bytes(free)} left, and the teacher's likeliest tokens "
                f"take {format_bytes(size)}. Set a smaller objective.store, another data.cache_dir, or "
                "objective.store=null."
            )
        try:
            np.lib.format.open_memmap(file, "w+", entry, (table.supervised_tokens,)).flush()
        except OSError as problem:
            raise not_written(
                f"The teacher's tokens cannot be written to {file}", problem, "or set data.cache_dir"
            ) from problem


def _compute(
    model: LanguageModel, loader: Loader, precision: Precision, world: World, name: str, stored: StoredTokens
) -> None:
    """Write this rank's share of the entries into the tables' files."""
    plan = loader.plan
    files = [
        None if _is_read(table, name) else np.lib.format.open_memmap(table.folder / f"{name}.staging", "r+")
        for table in plan.tables
    ]

    def compute(batch: Batch, step: int, position: int, is_counted: bool) -> None:
        entries = _entries(model, batch, stored)
        spec, done = plan.batch_spec(step, position), 0
        for source, start, length in zip(spec.source, spec.start, spec.length, strict=True):
            places, before = plan.tables[source].supervised_in(start, length)
            file = files[source]
            if is_counted and file is not None:
                file[before : before + len(places)] = entries[done : done + len(places)]
            done += len(places)

    visit(model, loader, precision, world, "Computing the teacher's likeliest tokens", compute, shown=True)
    for file in files:
        if file is not None:
            file.flush()


def _entries(model: LanguageModel, batch: Batch, stored: StoredTokens) -> np.ndarray:
    """The entries of the supervised tokens of `batch`, in the order of its labels."""
    hidden, head = model.head_input(batch)
    found = [stored.entries(head(part)) for part in hidden.split(model.chunk_rows)]
    return np.concatenate([np.empty(0, stored.record), *found])[(batch.labels != IGNORE_INDEX).cpu().numpy()]
