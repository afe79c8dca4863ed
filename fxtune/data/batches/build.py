"""Builds what a run reads from the data config: token tables, and the plans of training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from fxtune.data.batches.epochs import EpochStream, StreamSettings
from fxtune.data.batches.length_mix import LengthMix
from fxtune.data.batches.overlap import require_no_overlap
from fxtune.data.batches.plan import BatchSizes, Plan
from fxtune.data.batches.ramp import Stages
from fxtune.data.batches.segments import Side
from fxtune.data.config import DataConfig
from fxtune.data.tokenized.tokenize import TokenTable, tokenize
from fxtune.errors import ConfigError


def plan_training(
    tables: Sequence[TokenTable],
    data: DataConfig,
    *,
    micro_batch_size: int,
    global_batch_size: int,
    max_steps: Optional[int] = None,
    epochs: Optional[float] = None,
    seed: int = 0,
    pad_id: int = 0,
    excluded: Optional[np.ndarray] = None,
    ramp: Stages = (),
) -> Plan:
    """The plan of a training run on `tables`, one for each of `data.sources`.

    The run ends after `max_steps` or `epochs`, whichever comes first; if both are None, after one epoch. `excluded`:
    digests of documents that are left out. `ramp`: stages of a growing global batch. Raises ConfigError if settings
    contradict each other, DataError if a table has nothing to learn from.
    """
    assert len(tables) == len(data.sources)
    data.validate()
    if global_batch_size % micro_batch_size:
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} must be a multiple of "
            f"train.micro_batch_size={micro_batch_size}."
        )
    side, held_out = Side.train if data.held_out_share else Side.all, data.held_out_share
    mix = LengthMix(data.mix.long_share, data.mix.threshold) if data.mix.long_share is not None else None
    settings = StreamSettings(
        data.sequence_length, data.packs, data.on_long, held_out, side, data.source_weights(), seed, mix
    )
    sizes = BatchSizes(micro_batch_size, global_batch_size, max_steps, epochs, data.row_lengths(), pad_id, ramp=ramp)
    return Plan(EpochStream(tables, settings, excluded), sizes)


def plan_evaluation(
    tables: Sequence[TokenTable], data: DataConfig, *, micro_batch_size: int, pad_id: int = 0, held_out: bool
) -> Plan:
    """The plan of an evaluation: each segment exactly once, always in the same order, one micro-batch a step.

    `held_out`: `tables` are the training sources, and the documents held out by `data.eval_fraction` are used.
    Otherwise they are `data.eval_sources`, and all documents are used.
    """
    data.validate()
    fraction, side, limit = (data.eval_fraction, Side.held_out, data.eval_limit) if held_out else (0.0, Side.all, None)
    settings = StreamSettings(
        data.sequence_length, data.packs, data.on_long, fraction, side, weights=None, seed=None, limit=limit
    )
    sizes = BatchSizes(micro_batch_size, micro_batch_size, row_lengths=data.row_lengths(), pad_id=pad_id)
    return Plan(EpochStream(tables, settings), sizes)


@dataclass(frozen=True)
class PreparedData:
    tables: list[TokenTable]
    training: Plan
    evaluation: Optional[Plan]
    """None if the config holds nothing out."""


def prepare_data(
    data: DataConfig,
    tokenizer: Any,
    *,
    micro_batch_size: int,
    quarantine: Optional[Path] = None,
    progress: bool = True,
    **sizes: Any,
) -> PreparedData:
    """Tokenize every source, or take it from the cache, and plan the run. `sizes`: as plan_training() takes them."""
    data.validate()
    if not data.sources:
        raise ConfigError(
            "data.sources is empty: name at least one file, folder, glob or hub id to train on, "
            "for instance data.sources=[{path: chats.jsonl}]."
        )
    tables = [tokenize(source, data, tokenizer, quarantine, progress) for source in data.sources]
    pad_id = tokenizer.pad_token_id or 0
    evaluation = prepare_evaluation(data, tokenizer, micro_batch_size, tables, quarantine, progress)
    excluded = require_no_overlap(data, tables, evaluation.tables if evaluation else (), tokenizer)
    training = plan_training(
        tables, data, micro_batch_size=micro_batch_size, pad_id=pad_id, excluded=excluded, **sizes
    )
    return PreparedData(tables, training, evaluation)


def prepare_evaluation(
    data: DataConfig,
    tokenizer: Any,
    micro_batch_size: int,
    tables: Optional[list[TokenTable]] = None,
    quarantine: Optional[Path] = None,
    progress: bool = True,
) -> Optional[Plan]:
    """The plan of the held-out data; None if the config holds nothing out. `tables`: those of data.sources, if they
    are tokenized already.
    """
    sources = data.eval_sources or (data.sources if data.eval_fraction else [])
    if not sources:
        return None
    if data.eval_sources or tables is None:
        tables = [tokenize(source, data, tokenizer, quarantine, progress) for source in sources]
    return plan_evaluation(
        tables,
        data,
        micro_batch_size=micro_batch_size,
        pad_id=tokenizer.pad_token_id or 0,
        held_out=not data.eval_sources,
    )
