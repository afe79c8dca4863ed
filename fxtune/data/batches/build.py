"""Builds the data of a run from its data config: token tables, and the plans of training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from fxtune.data.batches.duplicates import describe, find_duplicates
from fxtune.data.batches.epochs import EpochStream, StreamSettings
from fxtune.data.batches.layout import BatchSizes
from fxtune.data.batches.length_mix import LengthMix
from fxtune.data.batches.overlap import require_no_overlap
from fxtune.data.batches.plan import Plan
from fxtune.data.batches.segments import Side
from fxtune.data.config import DataConfig, Dedup
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.stages import stages
from fxtune.data.tokenized.tokenize import TokenTable, tokenize
from fxtune.errors import ConfigError
from fxtune.system.terminal.console import say


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
    near_copies: Optional[np.ndarray] = None,
    ramp: Sequence[Sequence[Any]] = (),
) -> Plan:
    """The plan of a training run on `tables`, one for each of `data.sources`.

    The run ends after `max_steps` or `epochs`, whichever comes first; if both are None, after one epoch. `excluded`:
    digests of documents to leave out. `near_copies`: digests of documents that data.dedup leaves out. `ramp`:
    train.batch_ramp. Raises ConfigError if settings contradict each other. Raises DataError if a table has nothing to
    learn from, or if a document must not be cut and is longer than the rows of all stages of its epoch.
    """
    assert len(tables) == len(data.sources)
    data.validate()
    if global_batch_size % micro_batch_size:
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} must be a multiple of "
            f"train.micro_batch_size={micro_batch_size}."
        )
    side = Side.train if any(data.held_out_shares) else Side.all
    mix = LengthMix(data.mix.long_share, data.mix.threshold) if data.mix.long_share is not None else None
    settings = _settings(data, data.held_out_shares, side, weights=data.source_weights(), seed=seed, mix=mix)
    grown = stages(global_batch_size, data.sequence_length, ramp, data.length_schedule)
    sizes = BatchSizes(
        micro_batch_size, global_batch_size, max_steps, epochs, data.row_lengths(), pad_id, stages=grown
    )
    return Plan(EpochStream(tables, settings, excluded, near_copies), sizes)


def plan_evaluation(
    tables: Sequence[TokenTable],
    data: DataConfig,
    *,
    micro_batch_size: int,
    pad_id: int = 0,
    shares: Sequence[float] | None = None,
    excluded: Optional[np.ndarray] = None,
    near_copies: Optional[np.ndarray] = None,
) -> Plan:
    """The plan of an evaluation: each segment exactly once, always in the same order, one micro-batch a step.

    `shares`: for each table, the share of its documents that data.eval_fraction holds out. At most data.eval_limit of
    these documents are evaluated. None: all documents of all tables are evaluated. `excluded`: digests of documents to
    leave out. `near_copies`: digests of documents that data.dedup leaves out.
    """
    data.validate()
    if set(shares or (1.0,)) == {1.0}:
        settings = _settings(data, (0.0,), Side.all)
    else:
        settings = _settings(data, shares or (), Side.held_out, limit=data.eval_limit)
    sizes = BatchSizes(micro_batch_size, micro_batch_size, row_lengths=data.row_lengths(), pad_id=pad_id)
    return Plan(EpochStream(tables, settings, excluded, near_copies), sizes)


def _settings(data: DataConfig, shares: Sequence[float], side: Side, **others: Any) -> StreamSettings:
    """`shares`: the held-out share of each table. `others`: fields of StreamSettings."""
    common = dict(sequence_length=data.sequence_length, packing=data.packs, on_long=data.on_long, side=side)
    common |= dict(distinct=data.dedup is not Dedup.off or None, share_prompts=data.shares_prompts or None)
    share, different = (shares[0], None) if len(set(shares)) == 1 else (0.0, tuple(shares))
    return StreamSettings(eval_fraction=share, shares=different, **{"weights": None, "seed": None, **common, **others})


Accept = Callable[[list[TokenTable], list[TokenTable], DataConfig], tuple[list[TokenTable], list[TokenTable]]]
"""(tables of data.sources, tables of data.eval_sources, the data config) -> (tables for training, tables for
evaluation)."""


def as_they_are(
    tables: list[TokenTable], held_out: list[TokenTable], data: DataConfig
) -> tuple[list[TokenTable], list[TokenTable]]:
    return tables, held_out


@dataclass(frozen=True)
class PreparedData:
    tables: list[TokenTable]
    training: Plan
    evaluation: Optional[Plan]
    """None if the config holds nothing out."""
    images: Optional[ImageProcessor] = None
    """The processor of a model that reads images."""


def prepare_data(
    data: DataConfig,
    tokenizer: Any,
    *,
    micro_batch_size: int,
    quarantine: Optional[Path] = None,
    progress: bool = True,
    accept: Accept = as_they_are,
    images: Optional[ImageProcessor] = None,
    **sizes: Any,
) -> PreparedData:
    """Tokenize every source, or take its tokens from the cache, and plan the run. `sizes`: other arguments of
    plan_training(). `accept`: see Objective.accept(). `images`: the processor of a model that reads images."""
    data.validate()
    if not data.sources:
        raise ConfigError(
            "data.sources is empty: name at least one file, folder, glob or hub id to train on, "
            "for instance data.sources=[{path: chats.jsonl}]."
        )
    tables = [tokenize(source, data, tokenizer, quarantine, progress, images) for source in data.sources]
    pad_id = tokenizer.pad_token_id or 0
    held_out = [tokenize(source, data, tokenizer, quarantine, progress, images) for source in data.eval_sources]
    tables, held_out = accept(tables, held_out, data)
    duplicates = find_duplicates(tables, held_out, data)
    if progress:
        say(*describe(duplicates, tables, held_out, data))
    near = duplicates.near
    evaluation = _evaluation(data, tables, held_out, near, micro_batch_size, pad_id)
    excluded = require_no_overlap(data, tables, held_out, tokenizer, images)
    training = plan_training(
        tables, data, micro_batch_size=micro_batch_size, pad_id=pad_id, excluded=excluded, near_copies=near, **sizes
    )
    return PreparedData(tables, training, evaluation, images)


def prepare_evaluation(
    data: DataConfig,
    tokenizer: Any,
    micro_batch_size: int,
    progress: bool = True,
    accept: Accept = as_they_are,
    images: Optional[ImageProcessor] = None,
) -> Optional[Plan]:
    """The plan of the held-out data, as prepare_data() makes it; None if the config holds nothing out."""
    if not data.holds_out:
        return None
    # If one source holds rows out, all sources are read, because near-copies are found among all of them.
    sources = data.sources if any(data.held_out_shares) else []
    tables, held_out = (
        [tokenize(source, data, tokenizer, None, progress, images) for source in side]
        for side in (sources, data.eval_sources)
    )
    tables, held_out = accept(tables, held_out, data)
    near = find_duplicates(tables, held_out, data).near
    return _evaluation(data, tables, held_out, near, micro_batch_size, tokenizer.pad_token_id or 0)


def _evaluation(
    data: DataConfig,
    tables: Sequence[TokenTable],
    held_out: Sequence[TokenTable],
    near_copies: np.ndarray,
    micro_batch_size: int,
    pad_id: int,
) -> Optional[Plan]:
    """The plan of the held-out data. `tables`: the tables of data.sources, or []. `held_out`: of data.eval_sources."""
    parts = [(table, share) for table, share in zip(tables, data.held_out_shares, strict=False) if share]
    parts += [(table, 1.0) for table in held_out]
    if not parts:
        return None
    return plan_evaluation(
        [table for table, _ in parts],
        data,
        micro_batch_size=micro_batch_size,
        pad_id=pad_id,
        shares=[share for _, share in parts],
        near_copies=near_copies,
    )
