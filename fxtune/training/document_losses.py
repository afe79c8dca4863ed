"""Measures the loss of each document under a run's weights, for the statistical tests of training/refresh.py."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fxtune.config.root import Config
from fxtune.data.batches.batch import IGNORE_INDEX, Batch, BatchSpec
from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.loader import Loader
from fxtune.data.batches.plan import Plan
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.parallel import ParallelConfig
from fxtune.errors import HardwareError, NumbersError
from fxtune.models.load import resolve_dtype, starting_from
from fxtune.models.weights import bytes_of
from fxtune.objectives.language_model import LanguageModel
from fxtune.system import console
from fxtune.system.oom import RowsPerPass, out_of_memory_message
from fxtune.system.progress import phase
from fxtune.system.units import GIB
from fxtune.techniques.precision import Precision
from fxtune.training.builder import RunBuilder
from fxtune.training.oom_advice import MemoryPhase


@dataclass(frozen=True)
class MeasuredDocuments:
    """Documents of `tables`, chosen by their digests. Rows with the same digest are one document: copies, and the
    pieces of a chat."""

    tables: Sequence[TokenTable]
    digests: np.ndarray
    """uint64 [documents], each once."""

    def plan(self, config: Config, pad_id: int) -> Plan:
        """The plan of an evaluation on these documents."""
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
    """float64 [documents]: nats of all supervised tokens."""
    tokens: np.ndarray
    """float64 [documents]: number of supervised tokens."""

    @property
    def means(self) -> np.ndarray:
        """float64 [documents]: nats per supervised token."""
        return self.summed / self.tokens

    def only(self, digests: np.ndarray) -> DocumentLosses:
        """The losses of some of the documents."""
        kept = np.isin(self.digests, digests)
        return DocumentLosses(self.digests[kept], self.summed[kept], self.tokens[kept])


def measure(
    config: Config, weights: Path, documents: Sequence[MeasuredDocuments], pad_id: int
) -> list[DocumentLosses]:
    """The losses of each group of `documents` in this process, under the model of `config` with the weights in the
    folder `weights`, an export of a run.

    Raises NumbersError if a loss is not finite, otherwise as RunBuilder and its methods do.
    """
    gc.collect()  # frees the model of an earlier call
    alone = ParallelConfig()  # the run may divide its weights over ranks
    model_config, techniques = starting_from(config.model, weights), config.techniques.of_evaluation()
    builder = RunBuilder(replace(config, model=model_config, parallel=alone, techniques=techniques))
    if config.parallel != alone or builder.world.device.type == "cuda":
        _require_weights_fit(builder)
    config = builder.config
    language_model, _ = builder.proven_model()

    def out_of_memory(part: str, rows: int, why: str) -> HardwareError:
        return builder.out_of_memory(out_of_memory_message(part, rows, why), MemoryPhase.forward, rows)

    sizes = RowsPerPass(builder.world.device, note=console.say, error=out_of_memory)
    found = []
    for group in documents:
        plan = group.plan(config, pad_id)

        def losses(rows: int, plan: Plan = plan) -> DocumentLosses:
            loader = Loader(plan.with_micro_batch_size(rows), config.loader, builder.world.device)
            with closing(loader):
                return document_losses(language_model, loader, builder.techniques.precision)

        found.append(sizes.run("evaluation", config.train.micro_batch_size, losses, plan.stream.rows_of_group))
        if not np.isfinite(found[-1].summed).all():
            raise NumbersError(
                f"{weights}: the loss of {int((~np.isfinite(found[-1].summed)).sum()):,} documents is not finite. Use "
                "another copy of these weights, or model.dtype=float32."
            )
    return found


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
def document_losses(model: LanguageModel, loader: Loader, precision: Precision) -> DocumentLosses:
    """The loss of each document of the loader's plan, without dropout."""
    plan, training = loader.plan, model.model.training
    digests, parts = list[np.ndarray](), list[torch.Tensor]()
    try:
        model.model.eval()
        with phase("Measuring documents", plan.steps, "batches", announce=False) as work:
            for step in work.over(loader.steps()):
                for micro, batch in enumerate(step.micro_batches):
                    with precision.context(loader.device):
                        losses = -model.segment_log_probs(batch)
                    slots = torch.from_numpy(_slots(plan.batch_spec(step.index, micro))).to(loader.device)
                    parts.append(torch.stack([losses.double(), _supervised_tokens(batch)])[:, slots].cpu())
                    pieces = plan.documents(step.index, micro)
                    digests.append(
                        np.array([plan.tables[table].digests[document] for table, document in pieces], np.uint64)
                    )
    finally:
        model.model.train(training)
    distinct, documents = np.unique(np.concatenate(digests), return_inverse=True)
    summed, tokens = (np.bincount(documents, values, len(distinct)) for values in torch.cat(parts, dim=1).numpy())
    return DocumentLosses(distinct, summed, tokens)


def _slots(spec: BatchSpec) -> np.ndarray:
    """The slot of each segment in `Batch.cu_seqlens`, int64 [segments]. The padding of a packed row is a slot, too."""
    segments = np.diff(spec.offsets)
    used = np.add.reduceat(spec.length, spec.offsets[:-1])
    padded = (used < spec.width) & spec.packed
    return np.arange(len(spec.length)) + np.repeat(np.cumsum(padded) - padded, segments)


def _supervised_tokens(batch: Batch) -> torch.Tensor:
    """The number of supervised tokens in each slot of `batch.cu_seqlens`, float64."""
    return batch.document_sums((batch.labels != IGNORE_INDEX).double())
