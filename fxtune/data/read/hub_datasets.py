"""Datasets of the Hugging Face hub, as memory-mapped Arrow tables.

If the hub cannot be reached, `datasets` retries for half a minute for each file. So this module sends one short
request before it calls `datasets` (system/files/hub.py). If the hub does not answer, the dataset comes from the cache
of `datasets`, where an earlier run may have left a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.data.config import SourceConfig
from fxtune.data.read.arrow import arrow_rows, media_columns, rows_at_once, without_decoding
from fxtune.data.read.row import Row
from fxtune.errors import DataError
from fxtune.system.files import hub
from fxtune.system.terminal.console import say


def load(config: SourceConfig, cache_dir: Path | None) -> Any:
    """Load one split, as a `datasets.Dataset`. Raises DataError if the dataset, subset, split or revision does not
    exist, or if the hub cannot be reached and the cache has no copy."""
    import datasets
    from datasets import exceptions

    path, revision = config.path, config.revision
    offline = datasets.config.HF_HUB_OFFLINE
    commit, reason = _resolve_commit(path, revision)
    datasets.config.HF_HUB_OFFLINE = reason is not None  # if True, `datasets` uses its cache and does not retry
    try:
        cache = str(cache_dir) if cache_dir else None
        dataset = datasets.load_dataset(path, config.subset, split=config.split, revision=commit, cache_dir=cache)
    except ConnectionError as problem:
        raise _unreachable(path, reason or str(problem)) from problem
    except exceptions.DatasetNotFoundError as problem:
        raise DataError(
            f"{path}: {problem} A gated or private dataset needs `hf auth login` or HF_TOKEN."
        ) from problem
    except (ValueError, OSError, exceptions.DatasetsError) as problem:
        # The causes are an unknown subset or split, a broken file or a full disk.
        if reason is not None and "cache" in str(problem).lower():
            raise _unreachable(path, f"{reason}; {str(problem).splitlines()[0]}") from problem
        raise DataError(
            f"{path}: {str(problem).rstrip('.')}. Check data.sources' subset, split and revision."
        ) from problem
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    if reason is not None:
        if revision not in (None, "main") and not _has_commit(dataset, str(revision)):
            raise _unreachable(path, f"{reason}; the cached copy may not be of revision {revision}")
        say(f"{path}: the hub cannot be reached ({reason}), so the copy that an earlier run fetched is used.")
    return dataset


def missing_reason(config: SourceConfig, cache_dir: Path | None) -> str | None:
    """The reason why a dataset is not available; None if the hub answers or a copy is cached. Downloads nothing."""
    try:
        if _resolve_commit(config.path, config.revision)[1] is None:
            return None
        load(config, cache_dir)
    except DataError as error:
        return str(error)
    return None


def load_saved(folder: Path) -> Any:
    """Load the dataset in a folder of `Dataset.save_to_disk`. Raises DataError."""
    import datasets

    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
        if outside := [name for name in names if Path(name).name != name]:
            raise ValueError(f"state.json names {outside[0]!r}, which is not a file of this folder")
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DataError(
            f"{folder} looks like a folder of Dataset.save_to_disk but cannot be loaded ({problem})."
        ) from problem


def dataset_rows(dataset: Any, name: str, limit: int | None, keeps_images: bool = False) -> Iterator[Row]:
    """Yield the rows in order, and read a few at a time from the memory map. Columns of audio are left out. Columns of
    images are left out unless `keeps_images`. Images stay encoded: each is an object of `bytes` and `path`."""
    from datasets import Dataset, DatasetInfo, Features

    dataset = dataset.remove_columns(media_columns(dataset.features, keeps_images)).with_format("arrow")
    info = DatasetInfo(features=Features(without_decoding(dataset.features)))
    count = len(dataset) if limit is None else min(limit, len(dataset))

    def decode(table: Any) -> Iterator[dict[str, Any]]:
        columns = Dataset(table, info=info)[:]
        return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))

    step = rows_at_once(keeps_images)
    for start in range(0, count, step):
        yield from arrow_rows(dataset[start : min(start + step, count)], name, start, decode, keeps_images)


def arrow_files(dataset: Any) -> list[Path]:
    return [Path(entry["filename"]) for entry in dataset.cache_files]


def _resolve_commit(path: str, revision: str | None) -> tuple[str | None, str | None]:
    """Returns (the commit that `revision` means at present, None), or (revision, the reason why the hub cannot be
    reached). Raises DataError if the dataset or the revision does not exist."""
    from huggingface_hub import errors

    try:
        commit, reason = hub.resolve_commit(path, revision, "dataset")
        return commit or revision, reason
    except errors.RevisionNotFoundError as problem:
        raise DataError(
            f"{path} has no revision {revision!r}. See https://huggingface.co/datasets/{path}/commits"
        ) from problem
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as problem:
        raise DataError(
            f"{path}: there is no file or folder of that name in {Path.cwd()}, and no such dataset on the hub. "
            "Check the spelling; a private dataset needs `hf auth login` or HF_TOKEN."
        ) from problem


def _unreachable(path: str, reason: str) -> DataError:
    return DataError(
        f"{path}: there is no file or folder of that name in {Path.cwd()}, the hub cannot be reached ({reason}), and "
        "no earlier run left a copy. Check the path, the network and HF_HUB_OFFLINE; or fetch it elsewhere "
        f"(`hf download --repo-type dataset {path} --local-dir FOLDER`) and name that folder."
    )


def _has_commit(dataset: Any, commit: str) -> bool:
    """Whether a cached dataset is of this commit. `datasets` has the commit in paths and URLs of the cached data."""
    places = [*map(str, arrow_files(dataset)), *(dataset.info.download_checksums or {})]
    return hub.is_commit(commit) and any(commit in place for place in places)
