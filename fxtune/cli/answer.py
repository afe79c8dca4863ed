"""`--json FILE` on every command: writes the command's results, or the error that ended it, as one JSON value.

    {"error": {"code": "config", "exit_code": 2, "key": "optimizer.lrr", "file": "recipes/mine.yaml", "line": 7,
               "reason": "unknown key `optimizer.lrr`", "change": "did you mean `optimizer.lr`?",
               "suggestion": "optimizer.lr", "message": "recipes/mine.yaml:7: unknown ...", "also": []}}

Results that were written before the error stay in the object. With `-`, or with `--json` as the last word, the JSON
goes to standard output, and the text for people to standard error. At its start a command removes an older FILE.

Layers, jobs and ranks pass errors on as text of the form `PLACE: KEY ... REASON. CHANGE`, with a line for each
mistake. Only this file takes such a text apart.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxtune.config import discovery
from fxtune.distributed.files import as_json, require_writable, write_json
from fxtune.distributed.ranks import ProcessRank, process_rank
from fxtune.errors import ConfigError, UserError, first_line
from fxtune.system.terminal.redact import redact_text

CODES = {1: "check", 2: "config", 3: "data", 4: "hardware", 5: "numbers", 6: "storage", 7: "rank"}
CODES |= {75: "stopped", 130: "stopped"}
"""The name of the error for each exit code. An error with a traceback is a `bug`."""
SECTIONS = (
    "run|model|data|objective|train|optimizer|schedule|techniques|parallel|loader|sampler|checkpoint|tracking|refresh|"
    "eval"
)
"""The sections of a config. The class Config has them, too, but takes seconds to import."""

_KEY = re.compile(rf"unknown key `([^`]+)`|(?<![\w./-])((?:{SECTIONS})(?:(?:\.\w+)+|(?==)))(?![/(])")
_PLACE = re.compile(r"(?P<said>on the command line|in the config): |(?P<file>[^\s:`][^:`\n]*?)(:(?P<line>\d+))?: ")
_MIDDLE = re.compile(r"(?P<file>[^\s`:(]+\.\w+):(?P<line>\d+)\b")
_CHANGE = re.compile(r"; |(?<=[.?])\s+(?=[A-Z`])|: (?=(?:set|use|give|choose|leave|write|put|raise|lower|add) )")
_SUGGESTION = re.compile(r"[Dd]id you mean `?([^`?]+)`?\?")


class Answer:
    """The file of --json for the command of this process. Without --json there is no file."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self._rank = ProcessRank(0, 1, 0)
        """The rank with which the process was started. A command may call act_alone() later."""
        self._stdout: int | None = None
        """A copy of the descriptor of standard output, while standard output leads to standard error."""

    def begin(self, argv: list[str]) -> list[str]:
        """Take `--json FILE` out of a command line, and return the rest. Raises ConfigError or StorageError."""
        at = next((at for at, word in enumerate(argv) if word.partition("=")[0] == "--json"), None)
        if at is None:
            return argv
        name = argv[at].partition("=")[2] or (argv[at + 1 :] or ["-"])[0]
        rest = argv[:at] + argv[at + 1 + ("=" not in argv[at]) :]
        if name.startswith("--"):
            raise ConfigError("--json needs a FILE behind it, or `-`; as the last word it needs none.")
        self._rank = process_rank()
        if name == "-":
            sys.stdout.flush()
            self._stdout = os.dup(1)
            os.dup2(2, 1)
            name = os.path.join(tempfile.mkdtemp(prefix="fxtune-json-"), "answer.json")
        require_writable(Path(name))
        self.file = Path(name)
        if self._rank.rank == 0 and self.file.is_file():
            self.file.unlink()
        return rest

    @property
    def words(self) -> list[str]:
        """The option --json as words for the command line of this command's ranks."""
        return ["--json", str(self.file)] if self.file else []

    def put(self, value: Any) -> None:
        """Write the results, on rank 0. A later call replaces them. Raises StorageError."""
        if self.file is not None and self._rank.rank == 0:
            write_json(self.file, value)

    def fail(self, error: BaseException, exit_code: int) -> None:
        """Write the error that ends the command. Results that are already in the file stay beside the error."""
        if self.file is None:
            return
        found: Any = {}
        with suppress(OSError, ValueError):
            if self._rank.size == 1 and self.file.is_file():
                found = json.loads(self.file.read_text(encoding="utf-8"))
        found = found if isinstance(found, dict) else {"results": found}
        with suppress(OSError):  # the error is printed to standard error in any case
            self.file.write_text(as_json({"error": described(error, exit_code)} | found), encoding="utf-8")

    def end(self, exit_code: int = 0) -> None:
        """Complete the file for a command that has raised no error in this process. An exit code from 1 to 9 means
        that a rank failed. Without results the file gets `{}`."""
        if 0 < exit_code < 10:
            self.fail(RuntimeError("a rank failed; its traceback is on standard error"), exit_code)
        elif self.file is not None and not self.file.exists():
            self.put({})

    def close(self) -> None:
        """Print the answer if it goes to standard output, and forget the file."""
        file, self.file = self.file, None
        if self._stdout is not None:
            sys.stdout.flush()
            os.dup2(self._stdout, 1)
            os.close(self._stdout)
            self._stdout = None
            if file is not None and file.exists():
                print(file.read_text(encoding="utf-8"), end="")
                shutil.rmtree(file.parent, ignore_errors=True)


ANSWER = Answer()


def described(error: BaseException, exit_code: int) -> dict[str, Any]:
    """The JSON object of an error: its code and the parts of its message."""
    told = isinstance(error, (UserError, KeyboardInterrupt))
    message = redact_text(str(error) if told else first_line(error))
    head, *below = message.split("\n")
    if head.endswith(":"):
        mistakes = [line.strip() for line in below] if all(line.startswith("  ") for line in below) else [message]
    else:
        mistakes = re.split(r"\n(?=\S)", message)
    first, *others = map(_parts, mistakes)
    code = CODES.get(exit_code, "bug") if told else "bug"
    return {"code": code, "exit_code": exit_code, **first, "message": message, "also": others}


def _parts(text: str) -> dict[str, Any]:
    place, file, line = _PLACE.match(text), None, None
    named = place  # the match with the name of a file
    if place and not place["said"] and _key(place["file"]):
        named = _PLACE.match(text, place.end())  # data.sources.0.path: FILE: ...
    if named and not named["said"]:
        name, line = named["file"], named["line"]
        if line or (not _key(name) and (os.path.exists(name) or "/" in name or _is_file(name))):
            file = name
    if place and place is named and (file or place["said"]):
        text = text[place.end() :]
    middle = _MIDDLE.search(text)
    if middle and not line and file in (None, middle["file"]):
        file, line = middle["file"], middle["line"]
    reason, *change = _CHANGE.split(text, maxsplit=1)
    suggestion = _SUGGESTION.search(text)
    return {
        "key": _key(reason),
        "file": file,
        "line": int(line) if line else None,
        "reason": reason,
        "change": change[0] if change else None,
        "suggestion": suggestion[1] if suggestion else None,
    }


def _key(text: str) -> str | None:
    """The first key of a config that a text names."""
    return next((one or two for one, two in _KEY.findall(text) if one or not _is_file(two)), None)


def _is_file(name: str) -> bool:
    return discovery.names_data(name) or name.endswith((*discovery.ENDINGS, ".json"))
