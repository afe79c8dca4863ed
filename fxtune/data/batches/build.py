"""From a data config to what a run reads: its token tables, and the plans of training and of evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Optional

from fxtune.data.batches.epochs import Stream, StreamSettings
from fxtune.data.batches.length_mix import Mix
from fxtune.data.batches.plan import Plan, Sizes
from fxtune.data.batches.segments import Side
from fxtune.data.config import DataConfig
from fxtune.data.tokenized.tokenize import TokenTable, tokenize
from fxtune.errors import ConfigError


def row_lengths(data: DataConfig) -> tuple[int, ...]:
    """The lengths that a batch's rows can have, ascending; empty where they can have any.

    Buckets that end below `sequence_length` are completed by it, since each segment needs a row; those that no segment
    needs, because a smaller one holds `sequence_length`, are left out.
    """
    if data.packing:
        return (data.sequence_length,)
    if not data.buckets:
        return ()
    below = tuple(bucket for bucket in data.buckets if bucket < data.sequence_length)
    return (*below, next((bucket for bucket in data.buckets if bucket >= data.sequence_length), data.sequence_length))


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
) -> Plan:
    """The plan of a training run on `tables`, one for each of `data.sources`.

    The run ends after `max_steps` or `epochs`, whichever comes first; with neither, after one epoch. Raises ConfigError
    for settings that contradict each other and DataError for tables with nothing to learn from.
    """
    assert len(tables) == len(data.sources)
    check(data)
    if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
        raise ConfigError(
            f"train.global_batch_size={global_batch_size} must be a multiple of "
            f"train.micro_batch_size={micro_batch_size}, and both at least 1."
        )
    if max_steps is not None and max_steps < 1:
        raise ConfigError(f"train.max_steps={max_steps}: give at least 1, or null to train by epochs.")
    if epochs is not None and not 0 < epochs < math.inf:
        raise ConfigError(f"train.epochs={epochs}: give a number above 0 (fractions are fine), or null.")
    settings = StreamSettings(
        data.sequence_length,
        data.packing,
        data.on_long,
        data.eval_fraction,
        Side.train if data.eval_fraction else Side.all,
        _weights(data),
        seed,
        Mix(data.mix.long_share, data.mix.threshold) if data.mix.long_share is not None else None,
    )
    return Plan(
        Stream(tables, settings),
        Sizes(micro_batch_size, global_batch_size, max_steps, epochs, row_lengths(data), pad_id),
    )


def plan_evaluation(
    tables: Sequence[TokenTable], data: DataConfig, *, micro_batch_size: int, pad_id: int = 0, held_out: bool
) -> Plan:
    """The plan of an evaluation: each segment exactly once, in the same order each time, one micro-batch a step.

    `held_out`: `tables` are those of the training sources, and their `data.eval_fraction` side is used; else they are
    those of `data.eval_sources`, and all of them is used.
    """
    check(data)
    settings = StreamSettings(
        data.sequence_length,
        data.packing,
        data.on_long,
        data.eval_fraction if held_out else 0.0,
        Side.held_out if held_out else Side.all,
        weights=None,
        seed=None,
    )
    return Plan(
        Stream(tables, settings),
        Sizes(micro_batch_size, micro_batch_size, row_lengths=row_lengths(data), pad_id=pad_id),
    )


@dataclass(frozen=True)
class Prepared:
    """What a run's data config becomes."""

    tables: list[TokenTable]
    training: Plan
    evaluation: Optional[Plan]
    """None where the config holds nothing out."""


def prepare(
    data: DataConfig,
    tokenizer: Any,
    *,
    micro_batch_size: int,
    global_batch_size: int,
    max_steps: Optional[int] = None,
    epochs: Optional[float] = None,
    seed: int = 0,
    quarantine: Optional[Path] = None,
    progress: bool = True,
) -> Prepared:
    """Tokenise (or take from the cache) every source and plan the run. Errors as in `tokenize` and `plan_training`."""
    check(data)
    if not data.sources:
        raise ConfigError(
            "data.sources is empty: name at least one file, folder, glob or hub id to train on, "
            "for instance data.sources=[{path: chats.jsonl}]."
        )
    tables = [tokenize(source, data, tokenizer, quarantine, progress) for source in data.sources]
    pad_id = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    training = plan_training(
        tables,
        data,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        max_steps=max_steps,
        epochs=epochs,
        seed=seed,
        pad_id=pad_id,
    )
    evaluation = None
    if data.eval_sources:
        held = [tokenize(source, data, tokenizer, quarantine, progress) for source in data.eval_sources]
        evaluation = plan_evaluation(held, data, micro_batch_size=micro_batch_size, pad_id=pad_id, held_out=False)
    elif data.eval_fraction:
        evaluation = plan_evaluation(tables, data, micro_batch_size=micro_batch_size, pad_id=pad_id, held_out=True)
    return Prepared(tables, training, evaluation)


def check(data: DataConfig) -> None:
    """Raise ConfigError for settings that cannot be planned with, before a file is touched."""
    if data.sequence_length < 2:
        raise ConfigError(
            f"data.sequence_length={data.sequence_length}: a row needs at least 2 tokens, one to read and "
            "one to predict."
        )
    if not 0 <= data.eval_fraction < 1:
        raise ConfigError(f"data.eval_fraction={data.eval_fraction}: give a share from 0 to below 1.")
    if data.eval_fraction and data.eval_sources:
        raise ConfigError("data.eval_fraction and data.eval_sources are both set: keep one of them.")
    if data.buckets and data.packing:
        raise ConfigError(
            "data.buckets says what to pad single documents to, but data.packing=true makes every row "
            f"{data.sequence_length} tokens. Set data.packing=false, or data.buckets=[]."
        )
    if any(low >= high for low, high in pairwise([0, *data.buckets])):
        raise ConfigError(f"data.buckets={list(data.buckets)}: give lengths above 0 in ascending order, each once.")
    _weights(data)
    if any(source.weight is not None for source in data.eval_sources):
        raise ConfigError("data.eval_sources have no weights: every document is evaluated once. Remove weight there.")
    _check_mix(data)


def _check_mix(data: DataConfig) -> None:
    share, threshold = data.mix.long_share, data.mix.threshold
    if share is None:
        return
    if not 0 < share < 1:
        raise ConfigError(
            f"data.mix.long_share={share}: give a share above 0 and below 1, or null to leave the data as it is."
        )
    if not 0 < threshold < data.sequence_length:
        raise ConfigError(
            f"data.mix.threshold={threshold}: no document can be longer than data.sequence_length="
            f"{data.sequence_length}, so none would be long. Set it below that: the context that the model had "
            "before."
        )
    if _weights(data) is not None:
        raise ConfigError(
            "data.mix.long_share and the weights of data.sources both say how often a document comes. Keep one: "
            "remove the weights, or set data.mix.long_share=null."
        )


def _weights(data: DataConfig) -> Optional[tuple[float, ...]]:
    without = [source.path for source in data.sources if source.weight is None]
    if len(without) == len(data.sources):
        return None
    if without:
        raise ConfigError(
            f"data.sources: {', '.join(without)} without a weight while others have one. "
            "Give every source a weight, or none."
        )
    weights = tuple(float(source.weight) for source in data.sources if source.weight is not None)
    for source, weight in zip(data.sources, weights, strict=True):
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"data.sources: {source.path} has weight {weight}. Give a number above 0, or remove the source."
            )
    return weights
