"""Data sets that are neither on this disk nor within reach: one error names all missing files of a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from fxtune.data.config import DataConfig, SourceConfig
from fxtune.data.read.sources import missing_reason
from fxtune.data.tokenized.cache import cache_root


def missing_data(data: DataConfig) -> Iterator[str]:
    """Yield a reason for each data set of the recipe that cannot be read here without the hub."""
    sources = {source.path: source for source in [*data.sources, *data.eval_sources]}
    if data.questions.path is not None:
        sources.setdefault(data.questions.path, SourceConfig(path=data.questions.path))
    cache = cache_root(data) / "datasets" if data.cache_dir else None
    for source in sources.values():
        if why := missing_reason(source, cache):
            yield f"data.sources: {why}"
