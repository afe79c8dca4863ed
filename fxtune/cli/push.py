"""`fxtune push RUN org/name`: upload what a run has trained to the Hugging Face hub, with its model card.

    fxtune push quickstart me/lamps                # the adapter, into a private repository
    fxtune push quickstart me/lamps --merged       # base and adapter merged into one model
    fxtune push quickstart me/lamps --public       # a new repository is for everyone to see
    fxtune push quickstart/step-87 me/lamps        # a checkpoint; it is exported before the upload

RUN is a run's folder or name, a checkpoint of a run, or the folder of an adapter or a model. Only files that are
needed to load the model are uploaded: weights, configs, tokenizer, model card. Checkpoints, metrics and data stay
here, and a file that contains a secret is refused. The hub needs a token that may write: hf auth login, or HF_TOKEN.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fxtune.cli.answer import ANSWER
from fxtune.errors import ConfigError, HubError, StorageError, first_line, readable
from fxtune.models.proof import PROOF, require_unchanged
from fxtune.outputs.export import export
from fxtune.outputs.run_output import ADAPTER_FILE, OutputKind, RunOutput, find_output
from fxtune.outputs.targets.target import ExportOptions
from fxtune.system.files.atomic_files import json_or_empty
from fxtune.system.files.hub import Origin
from fxtune.system.terminal.console import say
from fxtune.system.terminal.redact import redact

CARD = "README.md"
UPLOADED = (
    *(CARD, PROOF, "adapter_config.json", "adapter_model*.safetensors", "model*.safetensors"),
    *("*.safetensors.index.json", "additional_chat_templates/*.jinja", "config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "*processor_config.json"),
)
"""Patterns of the names of the files that are uploaded."""


def run(run: str, name: str, *, merged: bool = False, public: bool = False, trust_remote_code: bool = False) -> None:
    """Upload the output of `run` to the hub's model repository `name`.

    Raises ConfigError for a missing run, a wrong name, a missing or refused token, or a repository of another kind;
    StorageError for a file that must not be uploaded; HubError if the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import enable_progress_bars

    output = find_output(run)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) or ".." in name:
        raise ConfigError(f"`{name}` is no name of the hub's: give ORGANISATION/NAME or USER/NAME, as in me/lamps.")
    if not (token := get_token()):
        raise ConfigError("There is no token of the Hugging Face hub: log in with `hf auth login`, or set HF_TOKEN.")
    if merged and output.kind is OutputKind.model:
        raise ConfigError(f"{output.folder} was trained without adapters, so there is nothing to merge.")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="fxtune-push-") as scratch:

        def exported(**options: Any) -> Path:
            return export(
                str(output.folder), "model", Path(scratch) / "model", ExportOptions(**options), trust_remote_code
            ).folder

        folder = exported(unmerged=not merged) if output.kind is OutputKind.checkpoint else output.folder
        as_adapter = (folder / ADAPTER_FILE).exists() and not merged
        with _hub_errors(api.endpoint, name):
            exists = _require_same_kind(api, name, as_adapter)
        if merged and output.kind is OutputKind.adapter:
            card = {"title": name.partition("/")[2], "figures": _figures(output), "config": output.config}
            folder = exported(card=card)
        operations = _operations(folder, name)
        require_unchanged(Origin(folder, str(folder)), run)
        if as_adapter and (base := _local_base(folder)):
            say(f"The adapter's base is {base}, a folder of this machine: others can load it with --merged only.")
        enable_progress_bars()
        with _hub_errors(api.endpoint, name):
            if not exists:
                api.create_repo(name, private=not public, exist_ok=True)
            api.create_commit(name, operations, commit_message=f"Upload {folder.name} with fxtune")
    kind = "adapter" if as_adapter else "model"
    ANSWER.put({"url": f"{api.endpoint}/{name}", "kind": kind, "files": [file.path_in_repo for file in operations]})
    say(f"Uploaded the {kind}: {', '.join(file.path_in_repo for file in operations)}\n{api.endpoint}/{name}")


def _require_same_kind(api: Any, name: str, as_adapter: bool) -> bool:
    """Whether the repository exists. Raises ConfigError if it is no repository of a model, or if it holds an adapter
    and the upload is a whole model, or the reverse."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        found = {file.rfilename for file in api.model_info(name).siblings or ()}
    except RepositoryNotFoundError as error:
        if error.response.status_code == 401:  # the hub does not know the token
            raise
        for kind in ("dataset", "space"):
            if api.repo_exists(name, repo_type=kind):
                raise ConfigError(f"{name} is a {kind} on the hub. Choose another name for the model.") from None
        return False
    has_model = any(fnmatch(name, "model*.safetensors") for name in found)
    held = "an adapter" if ADAPTER_FILE in found else "a whole model" if has_model else None
    if held is not None and (held == "an adapter") != as_adapter:
        other = "leave --merged out" if held == "an adapter" else "add --merged"
        raise ConfigError(f"{name} holds {held} on the hub, and the two would mix. Choose another name, or {other}.")
    return True


def _operations(folder: Path, name: str) -> list[Any]:
    """The uploads, one for each file. Raises StorageError for a link out of the folder or a file with a secret."""
    from huggingface_hub import CommitOperationAdd

    operations = []
    for file in sorted(folder.rglob("*")):
        if not any(fnmatch(file.relative_to(folder).as_posix(), pattern) for pattern in UPLOADED):
            continue
        if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
            raise StorageError(f"{file} is a link out of its folder, or no file, and is not uploaded. Remove it.")
        content: Any = str(file)
        if file.suffix != ".safetensors":
            text = file.read_text(encoding="utf-8", errors="replace")
            cleaned = redact({"revision": text})["revision"]  # in a revision, 40 hexadecimal digits are no secret
            if file.name == CARD:
                title = name.partition("/")[2]
                cleaned = cleaned.replace(f"\n# {folder.name}\n", f"\n# {title}\n", 1).replace(str(Path.home()), "~")
                content = cleaned.encode()
            elif cleaned != text:
                raise StorageError(f"{file} holds what looks like a secret, and is not uploaded. Remove it there.")
        operations.append(CommitOperationAdd(file.relative_to(folder).as_posix(), content))
    if not any(file.path_in_repo.endswith(".safetensors") for file in operations):
        raise StorageError(f"{folder} holds no weights (*.safetensors). Use a complete copy of it.")
    return operations


def _local_base(folder: Path) -> str | None:
    """The base that an adapter names, if the base is a folder of this machine."""
    with readable(f"{folder / ADAPTER_FILE} cannot be read", "Use a complete copy of it."):
        base = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return base if base and Path(base).is_absolute() else None


def _figures(output: RunOutput) -> dict[str, Any]:
    found = json_or_empty(output.folder.parent / "result.json")
    return {key: value for key, value in found.items() if isinstance(value, (int, float))}


@contextmanager
def _hub_errors(endpoint: str, name: str) -> Iterator[None]:
    """A context manager that turns errors of the hub's library into a ConfigError or HubError with one message."""
    from huggingface_hub import errors

    try:
        yield
    except errors.OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it.") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise ConfigError(
                f"The hub does not know this token ({endpoint} answered 401). Log in again with `hf auth login`, or "
                "set HF_TOKEN."
            ) from error
        if status == 403:
            raise ConfigError(
                f"The token may not write to {name} ({endpoint} answered 403). Use one with the permission to write "
                f"to {name.partition('/')[0]}, or another name."
            ) from error
        reason = str(redact(error.server_message or first_line(error)))
        raise HubError(f"The hub refused {name} ({endpoint} answered {status}: {reason}).") from error
    except Exception as error:
        # Versions of the library have different classes for these errors, so the module decides.
        if not isinstance(error, OSError) and not type(error).__module__.startswith(("httpx", "requests")):
            raise
        raise HubError(
            f"The hub cannot be reached ({endpoint}: {redact(first_line(error))}). Check the network, and give the "
            "same command again."
        ) from error
