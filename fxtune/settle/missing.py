"""Files of the hub that are neither on this disk nor within reach: one error names all missing files of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fxtune.config.root import Config
from fxtune.data.config import SourceConfig
from fxtune.data.read.sources import missing_reason
from fxtune.data.tokenized.cache import cache_root
from fxtune.errors import HubError, UserError
from fxtune.system.hub import locate


@contextmanager
def all_missing_at_once(config: Config) -> Iterator[None]:
    """If the hub cannot be reached for one file, name all missing files and data sets of the recipe in one error."""
    try:
        yield
    except HubError as error:
        model, data, missing = config.model, config.data, [str(error)]
        base = None if "model_type" in model.architecture else model.path
        for key, name in (("path", base), ("adapter", model.adapter), ("tokenizer", model.tokenizer)):
            try:
                if name is not None:
                    locate(name, model.revision if key == "path" else None, f"model.{key}")
            except UserError as reason:
                missing.append(str(reason))
        sources = {source.path: source for source in [*data.sources, *data.eval_sources]}
        if data.questions.path is not None:
            sources.setdefault(data.questions.path, SourceConfig(path=data.questions.path))
        cache = cache_root(data) / "datasets" if data.cache_dir else None
        missing += [f"data.sources: {why}" for source in sources.values() if (why := missing_reason(source, cache))]
        missing = list(dict.fromkeys(missing))
        if len(missing) == 1:
            raise
        listed = "\n".join(f"  {why}" for why in missing)
        raise HubError(f"{len(missing)} files or data sets of this recipe are missing here:\n{listed}") from error
