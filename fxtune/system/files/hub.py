"""Finds the local folder of a model that a recipe names by a folder, a hub id, or `builtin:NAME`.

All other code reads only local folders, so the network fails in one place and with one message. The small files
(config, tokenizer) are fetched first, then the weights by name. All files are stored in the Hugging Face cache.

For each file, huggingface_hub waits ten seconds for an answer and repeats some requests six times. fxtune sends one
request for a whole repository, and waits at most REQUEST_SECONDS. After an unanswered request fxtune sends no request
for PAUSE_SECONDS and uses the files of an earlier run, with a message. So without a network a run starts at most
REQUEST_SECONDS later. A commit whose files are all on this disk needs no request.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from fxtune.errors import ConfigError, HubError, StorageError
from fxtune.system.files import remote_code
from fxtune.system.terminal.console import say
from fxtune.system.terminal.progress import Phase, phase
from fxtune.system.terminal.redact import redact

BUILTIN = "builtin:"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Patterns of a repository's config and tokenizer files."""
REQUEST_SECONDS = 4.0
"""Timeout of a request. It covers the name lookup, the connection and the complete answer together."""
PAUSE_SECONDS = 60.0
"""Seconds without requests after an unanswered request."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Origin:
    """Where a model, tokenizer or adapter comes from."""

    folder: Path
    """The folder with the files on this disk."""
    name: str
    """The hub id, or the folder's absolute path. A saved adapter has it as the name of its base."""
    revision: str | None = None
    """The commit of a model from the hub; None for a folder."""


class GatedError(ConfigError):
    """The hub gives the model only to users who have accepted the model's terms."""


class ModelSource(NamedTuple):
    """A model, tokenizer or adapter that a recipe names."""

    key: str
    """The recipe's key, for messages."""
    name: str
    """A folder, a hub id, or `builtin:NAME`."""
    revision: str | None = None
    code: bool = False
    """Whether the model's Python files are fetched, too; see locate()."""
    adapter: bool = False


def is_commit(revision: str | None) -> bool:
    """Whether `revision` is a full commit hash, which never changes."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def locate_all(sources: Iterable[ModelSource]) -> dict[ModelSource, Origin]:
    """Find the files of each source. Raises the errors of locate() and locate_adapter(), and one HubError for all
    sources that need the unreachable hub."""
    found: dict[ModelSource, Origin] = {}
    missing: list[str] = []
    for source in dict.fromkeys(sources):
        key, name, revision, code, adapter = source
        try:
            found[source] = locate_adapter(name, key) if adapter else locate(name, revision, key, code)
        except HubError as error:
            missing += error.reasons
    if missing:
        raise HubError(*missing)
    return found


def locate(name: str, revision: str | None = None, key: str = "model.path", code: bool = False) -> Origin:
    """Find `name` and make its small files local. `key`: the recipe's key, for messages. `code`: also fetch *.py, and
    let them run if `revision` is a full commit hash.

    Raises ConfigError if the name is wrong, HubError if the hub cannot be reached.
    """
    if name.startswith(BUILTIN):
        return _builtin(name, key)
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):  # unlike Path.is_dir, it accepts a name that is too long
        if revision is not None:
            raise ConfigError(
                f"{key}={name} is a folder, so its revision={revision} has no meaning. Remove the revision."
            )
        return Origin(folder, str(folder.resolve()))
    if os.path.exists(folder):
        raise ConfigError(
            f"{key}={name} is a file. Give the folder that holds config.json and the safetensors files (perhaps "
            f"{folder.parent})."
        )
    # `name` is no hub id, or a path below a folder that fxtune writes to.
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "runs/", "multirun/")):
        raise ConfigError(
            f"{key}={name}: there is no such folder (looked for {folder.absolute()}). Give a folder that exists, "
            "or a hub id such as Qwen/Qwen3-0.6B."
        )
    found = _snapshot(name, revision, [*SMALL_FILES, "*.py"] if code else [*SMALL_FILES], key)
    if code and is_commit(revision):
        remote_code.trust(found)
    return Origin(found, name, found.name if is_commit(found.name) else revision)


def locate_adapter(name: str, key: str = "model.adapter") -> Origin:
    """locate() for a PEFT adapter. Also raises ConfigError if a folder is not an adapter."""
    origin = locate(name, key=key)
    if origin.revision is None and not (origin.folder / "adapter_config.json").exists():
        subfolder = origin.folder / "adapter"
        example = subfolder if (subfolder / "adapter_config.json").exists() else "runs/NAME/adapter"
        raise ConfigError(
            f"{key}={name} is no PEFT adapter: it holds no adapter_config.json. Give a folder such as {example}."
        )
    return origin


def fetch(origin: Origin, files: Iterable[str], key: str = "model.path") -> None:
    """Make these files of `origin` local. Raises StorageError for the first file that cannot be made local."""
    missing = [file for file in files if not (origin.folder / file).exists()]
    if missing and origin.revision is not None:
        _snapshot(origin.name, origin.revision, missing, key)
    for file in missing:
        if not (origin.folder / file).exists():
            todo = "Check the network and HF_HUB_OFFLINE" if origin.revision else "Copy it there"
            raise StorageError(
                f"{key}={origin.name}: {origin.folder / file} is missing. {todo}, or use a complete copy of the model."
            )


def _builtin(name: str, key: str) -> Origin:
    assets = Path(str(resources.files("fxtune"))) / "assets"
    folder = assets / name.removeprefix(BUILTIN)
    if not (folder / "config.json").exists():
        shipped = ", ".join(sorted(BUILTIN + path.parent.name for path in assets.glob("*/config.json"))) or "none"
        raise ConfigError(f"{key}={name} does not ship with this fxtune (it ships {shipped}).")
    return Origin(folder, str(folder.resolve()))


def resolve_commit(name: str, revision: str | None, kind: str = "model") -> tuple[str | None, str | None]:
    """(the current commit of `revision`, None), or (None, why the commit is unknown). Takes at most REQUEST_SECONDS.

    `kind`: model or dataset. Raises the hub's own RepositoryNotFoundError, RevisionNotFoundError and
    HFValidationError.
    """
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return None, "HF_HUB_OFFLINE is set"
    if _pause and time.monotonic() < _pause[1]:
        return None, _pause[0]
    answers: list[str | Exception] = []

    def request() -> None:
        try:
            info = HfApi().repo_info(name, revision=revision, repo_type=kind, timeout=REQUEST_SECONDS)
            answers.append(str(info.sha))
        except Exception as error:  # noqa: BLE001  handled by the thread that waits
            answers.append(error)

    # A thread sends the request: no timeout of an HTTP library limits a name lookup or an answer that trickles in.
    thread = threading.Thread(target=request, name="hub", daemon=True)
    thread.start()
    thread.join(REQUEST_SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer in {REQUEST_SECONDS:g} s")
    if isinstance(answer, str):
        return answer, None
    if isinstance(answer, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)):
        raise answer
    reason = _reason(answer)
    refused = isinstance(answer, errors.HfHubHTTPError) and 400 <= answer.response.status_code < 429
    if not refused:  # a refusal concerns only this repository
        _pause[:] = reason, time.monotonic() + PAUSE_SECONDS
    return None, reason


_pause: list[Any] = []
"""[why the last request got no answer, the time.monotonic() at which the pause ends]; empty before a pause."""


def _snapshot(name: str, revision: str | None, patterns: list[str], key: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    page = f"https://huggingface.co/{name}"
    refusals: dict[Any, str] = {
        errors.GatedRepoError: f" is gated. Accept its terms at {page}, then log in here with `hf auth login` (or set "
        "HF_TOKEN).",
        errors.RevisionNotFoundError: f" has no revision {revision!r}. Its branches, tags and commits: {page}/commits",
        (errors.RepositoryNotFoundError, errors.HFValidationError): f": no such folder here, and no such model on the "
        f"hub ({page}). Check the spelling; a private model needs `hf auth login`.",
    }
    try:
        cached = _cached(name, revision, patterns)
        # A cached folder without the commit's list of files may lack files unnoticed.
        complete = cached is not None and (cached.parent.parent / "trees" / f"{cached.name}.json").exists()
        if cached is not None and complete and is_commit(revision):
            return cached  # a commit does not change
        try:
            commit, reason = resolve_commit(name, revision)
        except errors.RepositoryNotFoundError as error:  # the hub also answers an expired token this way
            if cached is None:
                raise
            commit, reason = None, f"the hub has no such model, or not for this user: {_reason(error)}"
        if reason is None:
            if cached is not None and complete and cached.name == commit:
                return cached
            # Download by branch or tag, not by commit: the cache can then resolve the branch without a network.
            with phase(f"Downloading {', '.join(patterns)} of {name}", unit="GB") as work:
                found = huggingface_hub.snapshot_download(
                    name, revision=revision, allow_patterns=patterns, tqdm_class=_byte_counter(work)
                )
            return Path(found)
        if cached is None:
            raise HubError(
                f"{key}={name}: no such folder here, and the hub cannot be reached ({reason}). Check the network and "
                f"HF_HUB_OFFLINE, or run `hf download {name}` on another machine and give the downloaded folder."
            )
        say(
            f"{key}={name}: not checked on the hub ({reason}). The files of an earlier run are used: commit "
            f"{cached.name}."
        )
        return cached
    except HubError:
        raise
    except Exception as error:
        for kind, refusal in refusals.items():
            if isinstance(error, kind):
                gated = kind is errors.GatedRepoError
                raise (GatedError if gated else ConfigError)(f"{key}={name}{refusal}") from error
        # An interrupted download or a full disk: the classes differ between versions of the library.
        library = type(error).__module__.startswith(("httpx", "huggingface_hub"))
        if not library and not isinstance(error, (OSError, RuntimeError)):
            raise
        raise HubError(
            f"{key}={name}: fetching {', '.join(patterns)} from the hub broke off ({_reason(error)}). The downloaded "
            "part is kept: the same command continues the download. Or run `hf download "
            f"{name}` on another machine and give the downloaded folder."
        ) from error


def _byte_counter(work: Phase) -> Any:
    """A subclass of tqdm for huggingface_hub that draws nothing and moves `work`, in units of 1e9 bytes."""
    from tqdm.auto import tqdm

    class Bytes(tqdm):
        monitor_interval = 0  # no monitor thread

        def __init__(self, *args: Any, **options: Any) -> None:
            self.counts_bytes = options.get("unit") == "B"  # huggingface_hub also has a bar that counts files
            super().__init__(*args, **{**options, "disable": False, "leave": False, "file": io.StringIO()})

        def display(self, *args: Any, **options: Any) -> bool:
            if self.counts_bytes:  # huggingface_hub has two such bars: bytes received, bytes written
                work.total = max(work.total, (self.total or 0) / 1e9)
                work.done = max(work.done, self.n / 1e9)
            return True

    return Bytes


def _cached(name: str, revision: str | None, patterns: list[str]) -> Path | None:
    """The cached folder of `revision`; None if it is missing or lacks a file that `patterns` names."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        found = Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True)
        )
    except (errors.LocalEntryNotFoundError, ValueError):
        return None
    matched = [pattern for pattern in patterns if any(found.glob(pattern))]
    return found if matched and all("*" in pattern or pattern in matched for pattern in patterns) else None


def _reason(error: Exception) -> str:
    text = str(redact((str(error).splitlines() or [""])[0].rstrip(".")))
    plain = isinstance(error, TimeoutError) or "HTTP" in type(error).__name__
    return text if plain else f"{type(error).__name__}: {text}"
