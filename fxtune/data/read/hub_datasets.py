"""A dataset of the Hugging Face hub, as a memory-mapped Arrow table.

`datasets` retries an unreachable hub for half a minute, once a file. So the hub is asked one short question first, as hub.py
says; where no answer comes, what an earlier run left in the cache of `datasets` is used, or one error says what to do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.data.read.jsonl import Row
from fxtune.data.read.readers import arrow_rows, media, undecoded
from fxtune.errors import DataError
from fxtune.system import hub
from fxtune.system.console import say

_COMMIT = re.compile(r"[0-9a-f]{40}")


def load(path: str, subset: str | None, split: str, revision: str | None, cache_dir: Path | None) -> Any:
    """The `datasets.Dataset` of one split. Raises DataError: no such dataset, subset, split or revision, or no network."""
    import datasets
    from datasets import exceptions

    offline = datasets.config.HF_HUB_OFFLINE
    commit, reason = _ask(path, revision)
    datasets.config.HF_HUB_OFFLINE = reason is not None  # with it, datasets looks into its cache without any retry
    place = str(cache_dir) if cache_dir else None
    try:
        found = datasets.load_dataset(path, subset, split=split, revision=commit, cache_dir=place)
    except ConnectionError as problem:
        raise DataError(_unreachable(path, reason or str(problem))) from problem
    except exceptions.DatasetNotFoundError as problem:
        raise DataError(
            f"{path}: {problem} A gated or private dataset needs `hf auth login` or HF_TOKEN."
        ) from problem
    except (
        ValueError,
        OSError,
        exceptions.DatasetsError,
    ) as problem:  # unknown subset or split, broken files, full disk
        if reason is not None and "cache" in str(problem).lower():
            raise DataError(_unreachable(path, f"{reason}; {str(problem).splitlines()[0]}")) from problem
        raise DataError(
            f"{path}: {str(problem).rstrip('.')}. Check data.sources' subset, split and revision."
        ) from problem
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
    if reason is not None and revision not in (None, "main") and not _is_of(found, str(revision)):
        raise DataError(_unreachable(path, f"{reason}; what the cache holds cannot be told to be revision {revision}"))
    if reason is not None:
        say(f"{path}: the hub cannot be asked for it ({reason}), so what an earlier run fetched is used.")
    return found


def absent(path: str, subset: str | None, split: str, revision: str | None, cache_dir: Path | None) -> str | None:
    """Why a dataset cannot be had without a network; None: there is one, or an earlier run left a copy. Fetches nothing."""
    try:
        if _ask(path, revision)[1] is None:
            return None
        load(path, subset, split, revision, cache_dir)
    except DataError as error:
        return str(error)
    return None


def load_saved(folder: Path) -> Any:
    """The dataset that `Dataset.save_to_disk` left in a folder."""
    import datasets

    try:
        named = [entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]]
        if strange := [name for name in named if Path(name).name != name]:
            raise ValueError(f"state.json names {strange[0]!r}, which is not a file of this folder")
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DataError(
            f"{folder} looks like a folder of Dataset.save_to_disk but cannot be loaded ({problem})."
        ) from problem


def rows(dataset: Any, name: str, limit: int | None) -> Iterator[Row]:
    """Rows in order, read from the memory map some hundred at a time. Images and audio are left out, not decoded."""
    from datasets import Dataset, DatasetInfo, Features

    dataset = dataset.remove_columns(media(dataset.features)).with_format("arrow")
    info = DatasetInfo(features=Features(undecoded(dataset.features)))
    count = len(dataset) if limit is None else min(limit, len(dataset))

    def decode(table: Any) -> Iterator[dict[str, Any]]:
        columns = Dataset(table, info=info)[:]
        return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))

    for start in range(0, count, 256):
        yield from arrow_rows(dataset[start : min(start + 256, count)], name, start, decode)


def files(dataset: Any) -> list[Path]:
    """The Arrow files behind a dataset: their content is its content, whatever the hub called it."""
    return [Path(entry["filename"]) for entry in dataset.cache_files]


def _ask(path: str, revision: str | None) -> tuple[str | None, str | None]:
    """(the commit that `revision` is now, None), or (revision, why the hub cannot be asked)."""
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


def _unreachable(path: str, reason: str) -> str:
    return (
        f"{path}: there is no file or folder of that name in {Path.cwd()}, the hub cannot be asked for it ({reason}), and "
        "no earlier run left a copy. Check the path, the network and HF_HUB_OFFLINE; or fetch it elsewhere "
        f"(`hf download --repo-type dataset {path} --local-dir FOLDER`) and give the folder."
    )


def _is_of(dataset: Any, commit: str) -> bool:
    """Whether a dataset from the cache was made from this commit (datasets files it under the commit's name)."""
    if not _COMMIT.fullmatch(commit):
        return False  # a branch or a tag: only the hub knows what it is
    return any(commit in place for place in [*map(str, files(dataset)), *(dataset.info.download_checksums or {})])
