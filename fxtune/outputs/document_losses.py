"""Measures the loss of each document under a run's weights, for the statistical tests of refresh_data.py.

An objective over groups has one loss for each group. With such an objective, a `document` in this file is a group. If
the objective compares the model with a reference, all models get one reference, so that their losses have one scale.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from fxtune.config.root import Config
from fxtune.data.batches.batch import IGNORE_INDEX, Batch
from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.parallel import ParallelConfig
from fxtune.distributed.world import World
from fxtune.errors import HardwareError, NumbersError
from fxtune.models.load import ModelConfig, resolve_dtype, starting_from
from fxtune.models.weights import bytes_of
from fxtune.objectives.base import GroupObjective, Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.reference import Reference, WithReference
from fxtune.system.process.oom import RowsPerPass
from fxtune.system.terminal import console
from fxtune.system.terminal.units import GIB
from fxtune.techniques.precision import Precision
from fxtune.training.builder import RunBuilder
from fxtune.training.forecast.oom_advice import MemoryPhase
from fxtune.training.visits import visit

Found = TypeVar("Found")
Place = tuple[TokenTable, int]
"""A document: its table and its number there."""


@dataclass(frozen=True)
class MeasuredDocuments:
    """Documents of `tables`, chosen by their digests. Rows with the same digest are one document: copies, and the
    pieces of a chat. The documents of a group have one digest."""

    tables: Sequence[TokenTable]
    digests: np.ndarray
    """uint64 [documents], without duplicates."""

    def plan(self, config: Config, pad_id: int) -> Plan:
        tables = [table for table in self.tables if np.isin(table.digests, self.digests).any()]
        others = np.unique(np.concatenate([table.digests for table in tables]))
        others = others[~np.isin(others, self.digests)]
        rows = config.train.micro_batch_size
        return plan_evaluation(tables, config.data, micro_batch_size=rows, pad_id=pad_id, excluded=others)


@dataclass(frozen=True)
class DocumentLosses:
    digests: np.ndarray
    """uint64 [documents], ascending. Documents without a supervised token have no loss and are left out."""
    summed: np.ndarray
    """float64 [documents]: nats of all supervised tokens. For groups: sum of the losses of a group's copies."""
    count: np.ndarray
    """float64 [documents]: number of supervised tokens. For groups: number of a group's copies."""

    @property
    def means(self) -> np.ndarray:
        """float64 [documents]: nats per supervised token. For groups: a group's loss."""
        return self.summed / self.count


def measure(
    config: Config, weights: Path, documents: Sequence[MeasuredDocuments], pad_id: int
) -> list[DocumentLosses]:
    """Measure the losses of each entry of `documents` in this process. The model is the model of `config` with the
    weights in the folder `weights`, an export of a run. If the objective has a reference, call
    store_common_reference() before this function.

    Raises NumbersError if a loss is not finite, and the errors of RunBuilder and its methods.
    """
    builder = _builder(config, starting_from(config.model, weights))
    config, objective = builder.config, builder.config.objective
    language_model, _ = builder.proven_model()
    precision = builder.techniques.precision

    error = partial(builder.out_of_memory, phase=MemoryPhase.forward)
    sizes = RowsPerPass(builder.world.device, note=console.say, error=error)
    plans = [group.plan(config, pad_id) for group in documents]

    def of_each_plan(read: Callable[[Loader], Found]) -> list[Found]:
        def of_plan(plan: Plan, rows: int) -> Found:
            with closing(Loader(plan.with_micro_batch_size(rows), config.loader, builder.world.device)) as loader:
                return read(loader)

        rows = config.train.micro_batch_size
        return [sizes.run("evaluation", rows, partial(of_plan, plan), plan.stream.rows_of_group) for plan in plans]

    parts = None
    if objective.needs.whole_step:  # all plans are one step, so that the losses of one model are comparable
        parts = document_parts(objective, of_each_plan(partial(document_values, language_model, objective, precision)))
    measured = partial(document_losses, language_model, objective, precision=precision, parts=parts)
    found = of_each_plan(measured)
    for losses in found:
        if not np.isfinite(losses.summed).all():
            raise NumbersError(
                f"{weights}: the loss of {int((~np.isfinite(losses.summed)).sum()):,} documents is not finite. Use "
                "another copy of these weights, or model.dtype=float32."
            )
    return found


def store_common_reference(
    config: Config, start: ModelConfig, documents: Sequence[MeasuredDocuments], pad_id: int
) -> None:
    """Store the reference's log-probabilities beside the tables of `documents`, for an objective with a reference. The
    reference is the model that a run of `config` from `start` begins with. Numbers that are stored already are read.

    Raises StorageError if the file cannot be written, and the errors of RunBuilder and its methods.
    """
    builder = _builder(config, start)
    plans = [group.plan(builder.config, pad_id) for group in documents]
    builder.compare_on(plans, documents=np.unique(np.concatenate([group.digests for group in documents])))
    builder.proven_model()


def _builder(config: Config, model: ModelConfig) -> RunBuilder:
    """A builder of the measured models, in this process. Raises HardwareError if the weights do not fit the device."""
    gc.collect()  # frees the model of an earlier call
    alone = ParallelConfig()  # this process has all weights, also if the run divides them over ranks
    objective = config.objective
    if isinstance(objective, WithReference):  # one reference for all models that are compared
        objective = replace(objective, reference=Reference.stored)
    techniques = config.techniques.of_evaluation()
    builder = RunBuilder(replace(config, model=model, parallel=alone, techniques=techniques, objective=objective))
    if config.parallel != alone or builder.world.device.type == "cuda":
        _require_weights_fit(builder)
    return builder


def _require_weights_fit(builder: RunBuilder) -> None:
    """Raise HardwareError if the weights do not fit one device."""
    model, facts = builder.config.model, builder.facts
    if builder.config.techniques.quantize.enabled:  # quantized weights need less than bytes_of()
        return
    needed = bytes_of(
        builder.settled.hf_config, resolve_dtype(model, builder.world.capability), model.trust_remote_code
    )
    if needed > facts.memory:
        raise HardwareError(
            f"The weights take {needed / GIB:.1f} GiB, and {facts.device_name} has {facts.memory / GIB:.1f} GiB: "
            "the models are compared on one card, although their runs may divide their weights. Use a larger card."
        )


@torch.no_grad()
def document_losses(
    model: LanguageModel,
    objective: Objective,
    loader: Loader,
    precision: Precision,
    parts: Mapping[Place, torch.Tensor] | None = None,
) -> DocumentLosses:
    """The loss of each document or group of the loader's plan, without dropout. `parts`: see document_parts()."""
    digests, measured = list[np.uint64](), list[torch.Tensor]()

    def read(batch: Batch, slots: torch.Tensor, places: list[Place]) -> None:
        if parts is not None:
            rows = torch.stack([parts[place] for place in places])
            part = rows.new_zeros(len(batch.cu_seqlens) - 1, rows.shape[1]).index_copy(0, slots, rows)
            batch = replace(batch, step_part=part)
        losses, counts = _losses(model, objective, batch)
        measured.append(torch.stack([losses.double(), counts.double()])[:, slots].cpu())
        digests.extend(table.digests[document] for table, document in places)

    _visit(model, read, loader, precision)
    distinct, documents = np.unique(np.array(digests, np.uint64), return_inverse=True)
    summed, count = (np.bincount(documents, values, len(distinct)) for values in torch.cat(measured, dim=1).numpy())
    return DocumentLosses(distinct, summed, count)


@torch.no_grad()
def document_values(
    model: LanguageModel, objective: Objective, precision: Precision, loader: Loader
) -> dict[Place, torch.Tensor]:
    """The row of Objective.step_values() of each document of the loader's plan, without dropout."""
    values = dict[Place, torch.Tensor]()

    def read(batch: Batch, slots: torch.Tensor, places: list[Place]) -> None:
        values.update(zip(places, objective.step_values(model, batch)[slots], strict=True))

    _visit(model, read, loader, precision)
    return values


@torch.no_grad()
def document_parts(objective: Objective, values: Sequence[Mapping[Place, torch.Tensor]]) -> dict[Place, torch.Tensor]:
    """The row of Objective.step_parts() of each document of several plans. `values`: the results of document_values()
    for these plans. A document of two plans counts once."""
    rows = {place: row for of_plan in values for place, row in of_plan.items()}
    return dict(zip(rows, objective.step_parts(torch.stack([*rows.values()])), strict=True))


def _visit(
    model: LanguageModel,
    read: Callable[[Batch, torch.Tensor, list[Place]], None],
    loader: Loader,
    precision: Precision,
) -> None:
    """Call `read` with each batch of the loader's plan, the slots of its documents, int64 [documents], and their
    places. The model does not apply dropout."""
    plan = loader.plan

    def place(batch: Batch, step: int, position: int, _: bool) -> None:
        spec = plan.batch_spec(step, position)
        # The slot of each segment in `Batch.cu_seqlens`. The padding of a packed row is a slot, too.
        padded = (np.add.reduceat(spec.length, spec.offsets[:-1]) < spec.width) & spec.packed
        slots = np.arange(len(spec.length)) + np.repeat(np.cumsum(padded) - padded, np.diff(spec.offsets))
        places = [(plan.tables[table], document) for table, document in plan.documents(step, position)]
        read(batch, torch.from_numpy(slots).to(loader.device), places)

    visit(model, loader, precision, World(loader.device), "Measuring documents", place)


def _losses(model: LanguageModel, objective: Objective, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """(`summed`, `count`) of DocumentLosses, for each slot of `batch.cu_seqlens`."""
    if isinstance(objective, GroupObjective):
        groups = objective.group_losses(model, batch)
        return torch.where(groups.counted, groups.losses, 0.0), groups.counted
    return -model.segment_log_probs(batch), batch.document_sums((batch.labels != IGNORE_INDEX).double())
