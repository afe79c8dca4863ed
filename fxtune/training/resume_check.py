"""What a run that goes on must find as it was: the decisions behind each `auto`, the base's weights, the data, the machine.

The recipe is compared by runfolder.py. What the recipe leaves open is written to `setting.json` when a run starts and
compared when it goes on, so that it ends with the bits that it would have had:

- each `auto` is what it was: taken from there, not decided again, for a card with less memory free today would decide otherwise;
- the base model's files and each source's tokens must be the same, or the run is refused with a line for each difference;
- another card, another torch or another version of a package may round otherwise. That is told, and the run goes on; with
  run.deterministic=true it is refused.

Nothing is compared before there is a checkpoint: such a run starts again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fxtune.checkpoint.run_folder import HOW_TO_START_ANEW
from fxtune.config.validate import Validator
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError, StorageError
from fxtune.models.load import Init, ModelConfig
from fxtune.optim.config import OptimizerConfig, OptimizerName, library
from fxtune.system.atomic_files import read_json, replace_text
from fxtune.techniques.facts import Facts

FILE = "setting.json"
SAMPLES = 64
"""Pieces of 4 KiB that stand for a file of weights, beside its size: those of 16 GB would take a minute to read."""
PIECE = 4096
MAY_BE = {"data": ", its rows, the tokenizer or the chat template"}
IDLE = {"wandb", "tensorboard"}
"""Packages that compute nothing."""
Pipelike = TypeVar("Pipelike")


class ResumeCheck:
    """Of the run in `folder`. `goes_on`: it has a checkpoint, so what was written at its start holds; else it is written anew.

    Raises StorageError where the file is there and cannot be read.
    """

    def __init__(self, folder: Path, goes_on: bool, strict: bool, note: Callable[[str], None]) -> None:
        self.folder, self.strict, self.note = folder, strict, note
        self.now: dict[str, dict[str, str]] = {}
        self.before: dict[str, Any] = {}
        if goes_on and (folder / FILE).exists():
            try:
                self.before = read_json(folder / FILE)
            except ValueError as error:
                raise StorageError(
                    f"{folder}: {error}. It says what each `auto` of the run was and what it was trained on. "
                    "Bring it back; or remove it, and the run goes on without being compared."
                ) from error

    def decided(self, asked: Pipelike, now: Pipelike) -> Pipelike | None:
        """`asked` with what each `auto` was when the run started, where `now`, what it would become today, is something else.
        None where nothing is. Raises StorageError for a value that no recipe could have.

        The folder may be a stranger's: what the recipe says itself stays, and nothing is taken that a recipe may not say.
        """
        changes = {}
        for name, was in self._section("techniques").items():
            technique, today = getattr(asked, name, None), getattr(now, name, None)
            if not dataclasses.is_dataclass(technique) or isinstance(technique, type) or not isinstance(was, dict):
                continue
            if "auto" not in _plain(list(dataclasses.asdict(technique).values())):
                continue
            differs = {
                key: self._typed(name, technique, key, value)
                for key, value in was.items()
                if hasattr(technique, key) and _plain(getattr(today, key)) != value
            }
            if differs:
                changes[name] = dataclasses.replace(technique, **differs)
                self.note(
                    f"{name}: as when the run was started, "
                    + ", ".join(
                        f"{key}={_plain(value)} (today it would be {_plain(getattr(today, key))})"
                        for key, value in differs.items()
                    )
                )
        return dataclasses.replace(asked, **changes) if changes else None  # type: ignore[type-var]

    def _typed(self, name: str, asked: Any, key: str, value: Any) -> Any:
        """A recorded value as the technique's field has it, for JSON knows no enums."""
        validator = Validator(type(asked), lambda _: str(self.folder / FILE))
        if (slot := validator.find((key,))) is not None:
            validator.check(slot, value, ("techniques", name, key))
        if validator.problems:
            raise StorageError(
                f"{validator.problems[0]}. Use the version of fxtune that the run was started with, or bring the "
                "file back as it was."
            )
        kind = type(getattr(asked, key))
        return kind(value) if issubclass(kind, Enum) else value

    def open(
        self, model: ModelConfig, optimizer: OptimizerConfig, techniques: Mapping[str, Any], facts: Facts
    ) -> None:
        """hold() what is known before any row or weight is read. `techniques`: the options of those that are on, all decided."""
        self.hold("techniques", techniques)
        if optimizer.name is OptimizerName.adamw_8bit:
            self.hold("optimizer", {"library": library(optimizer, facts).value})
        self.hold("model", {"dtype": facts.dtype, **_base(model)})
        self.hold("machine", _machine(facts), refuse=False)

    def read(self, tables: Iterable[TokenTable]) -> None:
        """hold() the data of training: each source's tokens."""
        self.hold(
            "data",
            {
                f"{number} {table.name}": f"{len(table):,} documents, {table.fingerprint[:16]}"
                for number, table in enumerate(tables)
            },
        )

    def hold(self, section: str, now: Mapping[str, Any], refuse: bool = True) -> None:
        """Compare a part of the setting with what it was, or keep it to be compared with later. Raises ConfigError that lists
        each difference; with `refuse` false they are told, unless the run is deterministic.
        """
        plain = self.now[section] = _plain(dict(now))
        before = self._section(section)
        if not before:
            return
        keys = sorted(key for key in before.keys() | plain.keys() if before.get(key) != plain.get(key))
        changed = [f"  {section}.{key}: {_shown(before, key)} -> {_shown(plain, key)}" for key in keys]
        if changed and (refuse or self.strict):
            why = MAY_BE.get(section, "") if refuse else " (with run.deterministic=true it must not)"
            raise ConfigError(
                f"{self.folder} cannot go on with the same bits: its {section} changed since it was started{why}:\n"
                + "\n".join(changed)
                + f"\nBring it back as it was, or start anew with {HOW_TO_START_ANEW}."
            )
        if changed:
            self.note(
                "Since the run was started this changed, so its figures may differ in their last digits from here on: "
                + "; ".join(line.strip() for line in changed)
            )

    def built(self, model: nn.Module, techniques: Mapping[str, Any]) -> None:
        """hold() what came of building the model, and keep all of it."""
        self.hold("techniques", techniques)  # again: where auto's choice did not compile, it is another
        self.hold(
            "built",
            {"revision": getattr(model, "base_revision", None), "products": getattr(model, "products_by", "torch")},
        )
        self.keep()

    def keep(self) -> None:
        """Write what was held, where the run starts. Raises StorageError."""
        if self.before:
            return
        try:
            replace_text(self.folder / FILE, json.dumps(self.now, indent=1))
        except OSError as error:
            raise StorageError(
                f"{self.folder / FILE} cannot be written: {error.strerror or error}. Free space there, or set "
                "run.dir to another disk."
            ) from error

    def _section(self, name: str) -> dict[str, Any]:
        section = self.before.get(name)
        return section if isinstance(section, dict) else {}


def _machine(facts: Facts) -> dict[str, str]:
    """What rounds: the device, torch and its threads, the packages that compute."""
    threads = {"threads": str(torch.get_num_threads())} if facts.device == "cpu" else {}
    name = facts.device_name if facts.device == "cuda" else "cpu"
    return {
        "device": name,
        **threads,
        **{package: version for package, version in facts.packages.items() if package not in IDLE},
        "torch": torch.__version__,
    }


def _base(model: ModelConfig) -> dict[str, str]:
    """A digest of each weights file of a base model on this disk, from its size and samples. What comes from the hub has a
    revision, which is compared when the model is built. Raises StorageError for a file that cannot be read.
    """
    digests = {}
    local = model.path and model.init is not Init.random and Path(os.path.expanduser(model.path))
    for file in sorted(local.glob("*.safetensors")) if local else ():
        try:
            size = file.stat().st_size
            digest = hashlib.sha256(str(size).encode())
            with file.open("rb") as stream:
                for number in range(SAMPLES):
                    stream.seek(max(size - PIECE, 0) * number // (SAMPLES - 1))
                    digest.update(stream.read(PIECE))
        except OSError as error:
            raise StorageError(
                f"{file} cannot be read: {error.strerror or error}. Use a complete copy of the model."
            ) from error
        digests[file.name] = digest.hexdigest()[:16]
    return digests


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value, default=str))


def _shown(section: Mapping[str, Any], key: str) -> str:
    value = section.get(key, "(absent)")
    return value if isinstance(value, str) else json.dumps(value)
