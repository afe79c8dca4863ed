"""The interface of a target: it checks the model, writes the files, and names the command that serves them."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fxtune.errors import writing
from fxtune.outputs.targets.served import Server
from fxtune.outputs.targets.source import Source
from fxtune.reports.exports import Exports


@contextmanager
def staged(place: Path) -> Iterator[Path]:
    """A folder that is renamed to `place` when the body ends without an error. Raises StorageError."""
    staging = place.with_name(f".{place.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with writing(f"{place} cannot be written"):
            staging.mkdir(parents=True)
            yield staging
            staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@dataclass(frozen=True)
class ExportOptions:
    """The options of `fxtune export`, whose help says what they mean."""

    quantize: Sequence[str] = ()
    merged: bool = False
    unmerged: bool = False
    llama_cpp: str | None = None
    url: str | None = None
    venv: str | None = None
    card: dict[str, Any] | None = None
    """More fields for the model card of a merged model: see write_card()."""

    def given(self) -> set[str]:
        return {name for name, value in vars(self).items() if value}


@dataclass
class Exported:
    folder: Path
    kind: str
    """`adapter`, `merged model`, or the kind of the files."""
    command: str = ""
    """The command that serves the files."""
    files: dict[str, Path] = field(default_factory=dict)
    """{type: a file or folder that a server loads}."""
    notes: list[str] = field(default_factory=list)
    proofs: Exports = field(default_factory=dict)
    """{name of the file: the figures of compare() (served.py), or {"not_proven": reason}}."""
    problems: list[str] = field(default_factory=list)
    """How the served files differ from training."""


class Target(ABC):
    name: ClassVar[str]
    reads: ClassVar[set[str]]
    """The options that the target reads."""

    def __init__(self, source: Source, options: ExportOptions, folder: Path | None) -> None:
        """`folder`: a new folder for the files; None: a folder in the run."""
        self.source, self.options, self.folder, self.notes = source, options, folder, list[str]()
        if (penalty := source.generation.get("repetition_penalty") or 1) != 1:
            self.notes.append(
                f"generation_config.json has repetition_penalty {penalty}, which servers apply. The proof is without "
                'it, as training is: give requests "repetition_penalty": 1 ("repeat_penalty" in llama.cpp).'
            )

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError or StorageError if the target cannot serve the source, before weights are read."""

    @abstractmethod
    def write(self) -> Exported: ...

    @abstractmethod
    def serving(self, file: Path) -> AbstractContextManager[Server]:
        """A context manager that starts a server for `file`. Raises Unproven if there is no server. The
        context raises HardwareError if the server does not start."""
