"""Datasets of the Hugging Face hub, as memory-mapped Arrow tables.

`datasets` retries an unreachable hub for half a minute for each file, so the hub gets one short request first
(system/files/hub.py). If it does not answer, a copy that an earlier run left in the cache of `datasets` is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.data.config import SourceConfig
from fxtune.data.read.arrow import arrow_rows, media_columns, rows_at_once, without_decoding
from fxtune.data.read.row import Row
from fxtune.errors import DataError
from fxtune.system.files import hub
from fxtune.system.terminal.console import say

_COMMIT = re.compile(r"[0-9a-f]{40}")


def load(config: SourceConfig, cache_dir: Path | None) -> Any:
    """The `datasets.Dataset` of one split. Raises DataError: no such dataset, subset, split, revision or network."""
    import datasets
    from datasets import exceptions

    path, revision = config.path, config.revision
    offline = datasets.config.HF_HUB_OFFLINE
    commit, reason = _resolve_commit(path, revision)
    datasets.config.HF_HUB_OFFLINE = reason is not None  # makes `datasets` use its cache without any retry
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
        # An unknown subset or split, a broken file, a full disk.
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
    """Why a dataset is not available; None if the hub answers or the cache has a copy. Downloads nothing."""
    try:
        if _resolve_commit(config.path, config.revision)[1] is None:
            return None
        load(config, cache_dir)
    except DataError as error:
        return str(error)
    return None


def load_saved(folder: Path) -> Any:
    """The dataset that `Dataset.save_to_disk` wrote to a folder."""
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
    """Rows in order, read from the memory map a few at a time. Columns of audio are left out, and columns of images
    unless `keeps_images`. An image is not decoded: it is an object of `bytes` and `path`."""
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
    """(the commit that `revision` means now, None), or (revision, why the hub cannot be reached)."""
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
    """Whether a cached dataset is from this commit: `datasets` stores it under the commit's name."""
    places = [*map(str, arrow_files(dataset)), *(dataset.info.download_checksums or {})]
    return bool(_COMMIT.fullmatch(commit)) and any(commit in place for place in places)
