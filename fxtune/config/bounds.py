"""Which numbers make sense, as data: the ranges that the types of the config's fields cannot say.

What depends on the machine or the model is not here, that is each technique's own `check`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Iterator
from typing import Any

POSITIVE, NOT_NEGATIVE, SHARE, BELOW_ONE, AT_LEAST_ONE = (
    "above 0",
    "0 or more",
    "from 0 to 1",
    "from 0 to below 1",
    "1 or more",
)
PART = "above 0 and below 1"

_NOWHERE = re.compile("[\0\ud800-\udfff]")
_HOLDS = {
    POSITIVE: lambda x: x > 0,
    NOT_NEGATIVE: lambda x: x >= 0,
    SHARE: lambda x: 0 <= x <= 1,
    BELOW_ONE: lambda x: 0 <= x < 1,
    AT_LEAST_ONE: lambda x: x >= 1,
    PART: lambda x: 0 < x < 1,
}

BOUNDS = {
    "run.seed": NOT_NEGATIVE,
    "run.memory_gib": POSITIVE,
    "data.sources.*.weight": POSITIVE,
    "data.sources.*.limit": AT_LEAST_ONE,
    "data.eval_sources.*.limit": AT_LEAST_ONE,
    "data.eval_fraction": BELOW_ONE,
    "data.sequence_length": AT_LEAST_ONE,
    "data.workers": NOT_NEGATIVE,
    "data.cache_days": AT_LEAST_ONE,
    "data.buckets.*": AT_LEAST_ONE,
    "data.mix.long_share": PART,
    "data.mix.threshold": AT_LEAST_ONE,
    "data.questions.limit": AT_LEAST_ONE,
    "data.questions.show": NOT_NEGATIVE,
    "data.questions.max_new_tokens": AT_LEAST_ONE,
    "data.questions.batch_size": AT_LEAST_ONE,
    "train.max_steps": AT_LEAST_ONE,
    "train.epochs": POSITIVE,
    "train.micro_batch_size": AT_LEAST_ONE,
    "train.global_batch_size": AT_LEAST_ONE,
    "train.eval_every": NOT_NEGATIVE,
    "train.log_every": AT_LEAST_ONE,
    "train.max_grad_norm": NOT_NEGATIVE,
    "train.max_skipped_steps": AT_LEAST_ONE,
    "train.spike_window": AT_LEAST_ONE,
    "train.spike_threshold": POSITIVE,
    "optimizer.lr": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.betas.*": BELOW_ONE,
    "optimizer.eps": POSITIVE,
    "optimizer.momentum": BELOW_ONE,
    "schedule.warmup_steps": NOT_NEGATIVE,
    "schedule.warmup_ratio": SHARE,
    "schedule.min_lr_ratio": SHARE,
    "schedule.decay_ratio": SHARE,
    "techniques.lora.r": AT_LEAST_ONE,
    "techniques.lora.alpha": POSITIVE,
    "techniques.lora.dropout": BELOW_ONE,
    "techniques.rope.factor": AT_LEAST_ONE,
    "techniques.rope.original_max_position_embeddings": AT_LEAST_ONE,
    "techniques.precision.initial_scale": POSITIVE,
    "techniques.precision.scale_growth_interval": AT_LEAST_ONE,
    "techniques.checkpointing.every": AT_LEAST_ONE,
    "techniques.checkpointing.mlp_tiles": AT_LEAST_ONE,
    "techniques.checkpointing.offload_layers": AT_LEAST_ONE,
    "techniques.checkpointing.budget": SHARE,
    "techniques.liger.chunk_rows": AT_LEAST_ONE,
    "techniques.compile.max_graph_breaks": NOT_NEGATIVE,
    "techniques.compile.max_recompiles": NOT_NEGATIVE,
    "loader.num_workers": NOT_NEGATIVE,
    "loader.prefetch_factor": AT_LEAST_ONE,
    "checkpoint.every": NOT_NEGATIVE,
    "checkpoint.keep": AT_LEAST_ONE,
    "tracking.wandb.init_timeout": POSITIVE,
}
"""Each key's range; `*` stands for any position of a list. Null is always inside: what may be null, its type says."""


def outside(key: str, value: Any) -> str | None:
    """Why `value` cannot be that of `key`, or None."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"`{key}={value}` is not a finite number"
    for pattern, bound in BOUNDS.items():
        if value is not None and fnmatch.fnmatchcase(key, pattern) and not _HOLDS[bound](value):
            return f"`{key}={value}` must be {bound}"
    return None


def out_of_bounds(config: Any) -> Iterator[str]:
    """Yield one line for each value of the typed config that makes no sense, worded as what to change."""
    for key, value in _leaves(config):
        if problem := outside(key, value):
            yield problem
        if isinstance(value, str) and _NOWHERE.search(value):
            yield f"`{key}={value!r}` has a character that no file and no name can have (NUL, or half of a surrogate pair)"
    if not re.fullmatch(r"[^/\\\x00-\x1f\x7f]+", config.run.name) or config.run.name.startswith("."):
        yield (
            f"`run.name={config.run.name}` names a folder below runs/: no slashes, no line breaks, no dot at the start, not "
            "empty (run.dir takes a path)"
        )
    if config.train.micro_batch_size >= 1 and config.train.global_batch_size % config.train.micro_batch_size:
        yield (
            f"`train.global_batch_size={config.train.global_batch_size}` must be a multiple of "
            f"`train.micro_batch_size={config.train.micro_batch_size}`"
        )
    if len(config.optimizer.betas) != 2:
        yield f"`optimizer.betas={config.optimizer.betas}` must be two numbers, as in [0.9, 0.999]"
    if sorted(set(config.data.buckets)) != config.data.buckets:
        yield f"`data.buckets={config.data.buckets}` must ascend"
    if config.data.eval_fraction and config.data.eval_sources:
        yield "`data.eval_fraction` and `data.eval_sources` are two ways to hold data out: set one of them"
    if config.train.eval_every and not config.data.eval_fraction and not config.data.eval_sources:
        yield (
            f"`train.eval_every={config.train.eval_every}`, but nothing is held out to evaluate on: set data.eval_fraction or "
            "data.eval_sources, or train.eval_every=0"
        )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value):
        inner: Any = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
    elif isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        yield prefix, value
        return
    for key, item in inner:
        yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
