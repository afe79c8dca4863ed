"""What a target answers: can this be exported, the files, and the command that serves them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fxtune.outputs.targets.served import Server
from fxtune.outputs.targets.source import Source
from fxtune.reports.exports import Exports


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
    """What an export has written, and what its server answered."""

    folder: Path
    kind: str
    """`adapter`, `merged model`, or the kind of the files."""
    command: str = ""
    """The command that serves it."""
    files: dict[str, Path] = field(default_factory=dict)
    """{its type: a file or folder that a server loads}."""
    notes: list[str] = field(default_factory=list)
    proofs: Exports = field(default_factory=dict)
    """{name of the file: the figures of compare() (served.py), or {"not_proven": reason}}."""
    problems: list[str] = field(default_factory=list)
    """What the files do otherwise than in training."""


class Target(ABC):
    name: ClassVar[str]
    reads: ClassVar[set[str]]
    """The options that the target reads."""

    def __init__(self, source: Source, options: ExportOptions, folder: Path | None) -> None:
        """`folder`: a new folder for the files; None: a folder in the run."""
        self.source, self.options, self.folder, self.notes = source, options, folder, list[str]()

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError or StorageError if the target cannot serve the source, before weights are read."""

    @abstractmethod
    def write(self) -> Exported: ...

    @abstractmethod
    def serving(self, file: Path) -> AbstractContextManager[Server]:
        """A server that has loaded one of the files. Raises Unproven if there is no server, HardwareError if it does
        not start."""
