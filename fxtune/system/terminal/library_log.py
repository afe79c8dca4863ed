"""Keeps warnings of libraries off the terminal: they go to libraries.log of the run's folder.

Python's warnings and the log records of libraries mean nothing to a user of fxtune. Errors that a library logs are
still printed. A developer sees Python's warnings with PYTHONWARNINGS or `python -W`, and a library's log with
TORCH_LOGS or TRANSFORMERS_VERBOSITY.

Messages from before the run has a folder are kept in memory. They are lost if the command starts no run. Worker
processes write to the same file.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fxtune.system.terminal.redact import redact_text

FILE = "libraries.log"
KEPT = 1000
"""Messages that are kept until the run has a folder."""
LIBRARIES = {"torch": "TORCH_LOGS", "transformers": "TRANSFORMERS_VERBOSITY", "huggingface_hub": "HF_HUB_VERBOSITY"}
"""Libraries that print their log themselves. A developer asks for a library's log by its environment variable."""


class LibraryLog(logging.Handler):
    """The handler of all log records that no other handler takes, and of Python's warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self.active = False
        self._file: Path | None = None
        self._kept: deque[str] = deque(maxlen=KEPT)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take the messages of libraries inside the block."""
        shown = warnings.showwarning
        if self.active or logging.getLogger().handlers:  # the program has set up logging itself
            yield
            return
        self._begin()
        try:
            yield
        finally:
            warnings.showwarning = shown
            logging.getLogger().removeHandler(self)
            self.active = False
            self._kept.clear()

    def _begin(self) -> None:
        self.active = True
        logging.getLogger().addHandler(self)
        if not sys.warnoptions:
            warnings.showwarning = self._take_warning

    @property
    def file(self) -> Path | None:
        """The file to which worker processes write; None if this process takes no messages."""
        return (self._file or Path(os.devnull)) if self.active else None

    def collect_in_worker(self, file: Path | None) -> None:
        """Take the messages of libraries in this worker process until it ends. `file`: the main process's `file`."""
        if file is not None and not self.active:
            self._begin()
            self._file = file

    @contextmanager
    def written_to(self, folder: Path) -> Iterator[None]:
        """Write earlier messages, and messages inside the block, to the folder's file. The first message makes the
        file."""
        self._file = folder / FILE
        while self._kept:
            self._write(self._kept.popleft())
        try:
            yield
        finally:
            self._file = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR and logging.lastResort is not None:
            logging.lastResort.handle(record)
        with suppress(Exception):  # a library's record may have a format that fails
            self._write(self.format(record) + "\n")

    def _take_warning(self, message, category, filename, lineno, file=None, line=None) -> None:
        self._write(warnings.formatwarning(message, category, filename, lineno, line))

    def _write(self, text: str) -> None:
        text = redact_text(text)
        if self._file is None:
            self._kept.append(text)
            return
        with suppress(OSError), self._file.open("a", encoding="utf-8", errors="replace") as file:
            file.write(text)


LIBRARY_LOG = LibraryLog()
"""The log of this process."""


def take_loggers() -> None:
    """Have the imported libraries of LIBRARIES hand their log records to LIBRARY_LOG. Does nothing outside
    `collecting()`."""
    if not LIBRARY_LOG.active:
        return
    for name in list(logging.root.manager.loggerDict):
        variable = LIBRARIES.get(name.partition(".")[0])
        if variable is None or variable in os.environ:
            continue
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if type(handler) is logging.StreamHandler:
                logger.removeHandler(handler)
        logger.propagate = True
