"""From a name in a recipe to a folder on this disk: a folder, a hub id, or what ships with fxtune.

Everything after this file reads local folders only, so that a network can fail in one place and with one message. Hub
files land in the Hugging Face cache, first the small ones (config, tokenizer), then the weights by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fxtune.errors import ConfigError, HubError, StorageError

BUILTIN = "builtin:"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Patterns of a repository's config and tokenizer files."""
PATIENCE = 10.0
"""Seconds to wait for the hub to answer."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Origin:
    """Where a model, tokenizer or adapter comes from."""

    folder: Path
    """Its files on this disk."""
    name: str
    """What a saved adapter names as its base: the hub id, or the folder's absolute path."""
    revision: str | None = None
    """The commit, for what comes from the hub."""


def is_commit(revision: str | None) -> bool:
    """Whether `revision` is a full commit hash: the only kind that cannot change under its user."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def locate(name: str, revision: str | None = None, key: str = "model.path", code: bool = False) -> Origin:
    """Find `name` and make its small files local. `key` is the recipe's key, for messages; `code`: also fetch *.py.

    Raises ConfigError where the name is wrong, HubError where the hub cannot be reached.
    """
    if name.startswith(BUILTIN):
        return _builtin(name, key)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConfigError(f"{key}={name} is a folder, so its revision={revision} has no meaning. Remove the revision.")
        return Origin(folder, str(folder.resolve()))
    if folder.exists():
        raise ConfigError(f"{key}={name} is a file. Give the folder that holds config.json and the safetensors files (perhaps "
                          f"{folder.parent}).")
    if _looks_local(name):
        raise ConfigError(f"{key}={name}: there is no such folder (looked for {folder.absolute()}). Give a folder that exists, "
                          "or a hub id such as Qwen/Qwen3-0.6B.")
    patterns = [*SMALL_FILES, *(["*.py"] if code else [])]
    found = _snapshot(name, revision, patterns, key, first=True)
    return Origin(found, name, found.name if is_commit(found.name) else revision)


def locate_adapter(name: str, key: str = "model.adapter") -> Origin:
    """locate() for a PEFT adapter. Raises ConfigError also where a folder is none."""
    origin = locate(name, key=key)
    if origin.revision is None and not (origin.folder / "adapter_config.json").exists():
        below = origin.folder / "adapter"
        known = below if (below / "adapter_config.json").exists() else "runs/NAME/adapter"
        raise ConfigError(f"{key}={name} is no PEFT adapter: it holds no adapter_config.json. Give a folder such as {known}.")
    return origin


def fetch(origin: Origin, files: Iterable[str], key: str = "model.path") -> None:
    """Make these files of `origin` local. Raises StorageError naming the first one that is not there afterwards."""
    files = [file for file in files if not (origin.folder / file).exists()]
    if files and origin.revision is not None:
        _snapshot(origin.name, origin.revision, list(files), key)
    for file in files:
        if not (origin.folder / file).exists():
            reason = ("It is not in the cache and could not be fetched: check the network and HF_HUB_OFFLINE."
                      if origin.revision else "Copy it there, or use a complete copy of the model.")
            raise StorageError(f"{key}={origin.name}: {origin.folder / file} is missing. {reason}")


def _builtin(name: str, key: str) -> Origin:
    assets = Path(str(resources.files("fxtune"))) / "assets"
    folder = assets / name.removeprefix(BUILTIN)
    if not (folder / "config.json").exists():
        there = ", ".join(sorted(BUILTIN + path.parent.name for path in assets.glob("*/config.json"))) or "none"
        raise ConfigError(f"{key}={name} does not ship with this fxtune (those that do: {there}).")
    return Origin(folder, str(folder.resolve()))


def _looks_local(name: str) -> bool:
    """A name that cannot be a hub id, or that points into a folder where fxtune itself writes."""
    return not _HUB_ID.fullmatch(name) or name.startswith((".", "runs/", "multirun/"))


def _snapshot(name: str, revision: str | None, patterns: list[str], key: str, first: bool = False) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name}"
    try:
        if first and is_commit(revision) and not _cached(name, revision):
            _ask(name, revision)
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ConfigError(f"{key}={name} is gated. Accept its terms at {page}, then log in here with `hf auth login` (or set "
                          "HF_TOKEN).") from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{key}={name} has no revision {revision!r}. Its branches, tags and commits: {page}/commits") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(f"{key}={name}: no such folder here, and no such model on the hub ({page}). Check the spelling; a "
                          "private model needs `hf auth login`.") from error
    except OSError as error:  # no network, a refused port, a proxy, a full disk: the hub's own errors are all OSErrors
        reason = str(error).splitlines()[0]
        raise HubError(f"{key}={name}: no such folder here, and the hub cannot be reached for it ({reason}). Check the "
                       f"network and HF_HUB_OFFLINE, or fetch it elsewhere (`hf download {name}`) and give that folder."
                       ) from error


def _cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


def _ask(name: str, revision: str | None) -> None:
    """Ask the hub for a commit, once. Its library takes a commit for granted and asks for the files again and again: without a
    network, half a minute goes by before it says so."""
    from huggingface_hub import HfApi, errors

    try:
        HfApi().model_info(name, revision=revision, timeout=PATIENCE)
    except errors.HfHubHTTPError:
        raise
    except Exception as error:  # the hub's HTTP library, and so its errors' classes, differ by version
        raise OSError(f"{type(error).__name__}: {error}") from error
