"""The reference's log-probabilities, computed once before the first step and kept beside the token table.

So a run of several epochs needs one pass of the reference, and full fine-tuning needs no second copy of the weights.
The file has one float32 for each token of the table: 0 for tokens that are not supervised. Its name is a hash of
everything that the numbers depend on: the weights at the run's start, the options of techniques that change the
numbers, and how documents fit into rows. The folder is named by a hash of the tokens. So a stale file is never read,
and a sweep over learning rates or objectives computes the numbers once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fxtune.data.batches.batch import IGNORE_INDEX, Batch, BatchSpec
from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader, LoaderConfig
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, Dedup
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.world import World
from fxtune.errors import not_written
from fxtune.objectives.language_model import LanguageModel
from fxtune.techniques.precision import Precision
from fxtune.training.visits import visit

COLUMNS = 1024
"""The number of columns in which the checksum of a tensor adds up its 32-bit words."""


def store_reference(
    model: LanguageModel,
    plans: Sequence[Plan],
    data: DataConfig,
    loader: LoaderConfig,
    precision: Precision,
    world: World,
    options: Mapping[str, Any],
    only: np.ndarray | None = None,
) -> None:
    """Give each table of `plans` its `reference`: the log-probabilities that `model` gives to the table's supervised
    tokens.

    Call this before a checkpoint is loaded, while `model` has its first weights. `options`: whatever else changes the
    log-probabilities, beside weights, tokens and `data`. `only`: digests of the documents that need log-probabilities,
    uint64, each once; None: all documents. Raises StorageError if the file cannot be written.
    """
    tables = list({table.folder: table for plan in plans for table in plan.tables}.values())
    weights = sorted(set(world.gather(weights_checksum(model.model), "comparing weights")))
    # Packing and shared prompts are in the hash because they also decide which pairs are too long for a row.
    parts = [weights, options, data.sequence_length, data.on_long, data.packing]
    if data.shares_prompts:
        parts.append("prompts once")
    others = None
    if only is not None:
        parts.append(hashlib.sha256(np.sort(only).tobytes()).hexdigest())
        others = np.setdiff1d(np.concatenate([table.digests for table in tables]), only)
    key = json.dumps(parts, default=str, sort_keys=True)
    name = f"reference-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npy"
    missing = [table for table in tables if not _is_read(table, name)]
    if any(world.gather(bool(missing), "looking for the stored reference")):
        sizes = plans[0].sizes
        # Duplicates are computed, too: one table may drop a document that the held-out part of another table keeps.
        every = replace(data, dedup=Dedup.off)
        rows = sizes.micro_batch_size
        plan = plan_evaluation(tables, every, micro_batch_size=rows, pad_id=sizes.pad_id, excluded=others)
        own = plan.dealt_out(world.data_rank, world.data_ranks)
        with closing(Loader(own, loader, world.device)) as batches:
            numbers = _computed(model, batches, precision, world)

        def write() -> None:
            for table, values in zip(tables, numbers, strict=True):
                if not _is_read(table, name):
                    _write(table, name, values)

        world.main_first(write, "waiting for rank 0 to store the reference")
    for plan in plans:
        for table in plan.tables:
            table.read_reference(name)


def _is_read(table: TokenTable, name: str) -> bool:
    with suppress(OSError, ValueError, EOFError):
        table.read_reference(name)
        return True
    return False


def _computed(model: LanguageModel, loader: Loader, precision: Precision, world: World) -> list[np.ndarray]:
    """Compute the numbers of each table of the loader's plan: float32 [tokens], on every rank. `loader` has this
    rank's share."""
    plan, device = loader.plan, loader.device
    numbers = [np.zeros(len(table.ids), np.float32) for table in plan.tables]

    def compute(batch: Batch, step: int, position: int, is_counted: bool) -> None:
        values = model.log_probs(batch)[batch.labels != IGNORE_INDEX].cpu().numpy()
        if is_counted:
            _scatter(plan.batch_spec(step, position), plan.tables, values, numbers)

    visit(model, loader, precision, world, "Computing the reference's log-probabilities", compute, shown=True)
    if world.size == 1:
        return numbers
    sums = (world.sum(torch.from_numpy(values).to(device), "adding up the reference") for values in numbers)
    return [total.cpu().numpy() for total in sums]


def _scatter(spec: BatchSpec, tables: Sequence[TokenTable], values: np.ndarray, numbers: Sequence[np.ndarray]) -> None:
    """Write `values` [targets], in the order of a batch's targets, to these tokens' places in `numbers`, which has an
    array for each table."""
    done = 0
    for source, start, length in zip(spec.source, spec.start, spec.length, strict=True):
        at = start + 1 + np.flatnonzero(tables[source].supervised[start + 1 : start + length])
        numbers[source][at] = values[done : done + len(at)]
        done += len(at)
    assert done == len(values)


def _write(table: TokenTable, name: str, values: np.ndarray) -> None:
    path = table.folder / name
    staging = path.with_name(f"{name}.{os.getpid()}.staging")
    try:
        with open(staging, "wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as problem:
        with suppress(OSError):
            staging.unlink()
        raise not_written(
            f"The reference's log-probabilities cannot be written to {path}", problem, "or set data.cache_dir"
        ) from problem


def weights_checksum(model: nn.Module) -> str:
    """A hash of the weights and buffers that this rank holds."""
    found = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda entry: entry[0]):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        data = local.detach().contiguous().flatten().view(torch.uint8)
        words = nn.functional.pad(data, (0, -len(data) % (4 * COLUMNS))).view(torch.int32)
        sums = words.view(-1, COLUMNS).sum(0, dtype=torch.int64)
        found.update(f"{name} {tuple(local.shape)} {local.dtype}".encode())
        found.update(sums.cpu().numpy().tobytes())
    return found.hexdigest()
