"""Reads the files that a run has written so far. The run need not be finished."""

from __future__ import annotations

import base64
import json
import re
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import ABOUT, EVIDENCE, PICTURES, RESULT, SETTING, metric_rows, read_config
from fxtune.errors import FILE, ConfigError, kind_of, readable
from fxtune.system.files.atomic_files import read_json

STEP = "train/step"
ANSWERS = 6
"""How many questions a report shows."""
PICTURES_OF_QUESTION = 4
"""How many images of a question a report shows."""
LARGEST_PICTURE = 1 << 17
"""Bytes of the largest picture that a report takes in."""
_DIGEST = re.compile(r"[0-9a-f]{16}")


def as_written(*folders: Path) -> AbstractContextManager[None]:
    """In the body, a value in the files that fxtune would not have written raises StorageError."""
    named = ", ".join(map(str, folders))
    what = f"The files in {named} cannot be read, or hold something that fxtune does not write there"
    return readable(what, "Bring them back as they were.")


class RunFiles:
    """The files of the run in `folder`. A file is read when it is first used; a missing file counts as empty. Raises
    ConfigError if the folder has no run, and StorageError if a file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_config(folder)
        if config is None:
            raise ConfigError(f"{folder} is no run of fxtune: it holds no config.yaml.")
        self.config: dict[str, Any] = config
        """The recipe with every default."""

    @property
    def finished(self) -> bool:
        return (self.folder / RESULT).exists()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A dict for each log line, in order."""
        return list(metric_rows(self.folder))

    @property
    def curves(self) -> dict[str, dict[int, float]]:
        """The values of each metric by step. A step that was repeated after a resume has its last value."""
        return self._metrics[0]

    @property
    def times(self) -> list[float]:
        """The times of the first and the last log line, in seconds since 1970; empty without log lines."""
        return self._metrics[2]

    @cached_property
    def last(self) -> dict[str, Any]:
        """The last value of each metric. In a finished run the final figures replace values of the log lines."""
        return self._metrics[1] | self.result

    @cached_property
    def _metrics(self) -> tuple[dict[str, dict[int, float]], dict[str, Any], list[float]]:
        """(`curves`, the last value of each metric, `times`). metrics.jsonl is read only once, because a long run has
        a hundred thousand lines."""
        curves: dict[str, dict[int, float]] = {}
        last, times = dict[str, Any](), list[float]()
        for row in metric_rows(self.folder):
            moment, step = row.pop("time", None), row.get(STEP)
            if isinstance(moment, (float, int)):
                times = [(times or [moment])[0], moment]
            last |= row
            for name, value in row.items():
                if isinstance(step, int) and isinstance(value, (float, int)):
                    curves.setdefault(name, {})[step] = value
        return curves, last, times

    @cached_property
    def result(self) -> dict[str, Any]:
        """The figures of a finished run; empty if the run is not finished."""
        return self._object(RESULT)

    @cached_property
    def setting(self) -> dict[str, Any]:
        """The run's decisions on what its recipe left open, its data and its machine."""
        return self._object(SETTING)

    @cached_property
    def about(self) -> dict[str, Any]:
        """The run's command, its versions, and its data in figures."""
        return self._object(ABOUT)

    @cached_property
    def evidence(self) -> list[dict[str, Any]]:
        """For each option: what the recipe asked for, and what was observed before the first step."""
        file = self.folder / EVIDENCE
        with _readable(file):
            rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError("it is no list of observations")
        return rows

    def answers(self, when: str) -> list[dict[str, Any]]:
        """The answers `before` or `after` training: question, right answer, answer, and the images of a question."""
        file = self.folder / f"answers_{when}.jsonl"
        if not file.is_file():
            return []
        with _readable(file):
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [row for row in rows if isinstance(row, dict)]

    def picture(self, digest: str) -> str | None:
        """The small copy of a question's image as a data: URI, or None. `digest`: the hash of the image's file."""
        file = self.folder / PICTURES / f"{digest}.jpg"
        with _readable(file):
            if not _DIGEST.fullmatch(digest) or file.is_symlink() or kind_of(file) != FILE:
                return None  # a link in a stranger's folder could lead to another file
            if file.stat().st_size > LARGEST_PICTURE:
                return None
            return f"data:image/jpeg;base64,{base64.b64encode(file.read_bytes()).decode()}"

    def _object(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        with _readable(file):
            return read_json(file) if file.exists() else {}


def _readable(file: Path) -> AbstractContextManager[None]:
    return readable(f"{file} cannot be read", "Bring it back, or remove it.")
