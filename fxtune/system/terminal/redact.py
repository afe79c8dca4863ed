"""Removes secrets from everything written or printed: the config, the command line, messages, model cards, W&B.

A secret is recognised by the *name* of its key (`hub_token`, `api_key`), by the *shape* of its value (`hf_...`,
`ghp_...`, a URL with a password or a signature), or by its *value*: the content of an environment variable with a
secret's name, also inside a longer string.

Only the third rule applies to all output of this process (`redacted_output`), so rows of data that look like a key are
printed unchanged. All three rules apply to tracebacks and to the files of a run.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any
from urllib.parse import quote

HIDDEN = "[redacted]"

_SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:api_?key|access_?key|secret_?key|private_?key|secret|password|passwd|passphrase|pwd|credentials?"
    r"|auth|authorization|bearer|cookie|(?<!pad_)(?<!bos_)(?<!eos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)"
    r"(?<!per_)(?<!image_)token)$",
    re.IGNORECASE,
)
_SECRET_VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH)$", re.IGNORECASE)
_HASH_NAME = re.compile(r"revision|commit|sha|hash|digest|fingerprint|(?:^|_)id$", re.IGNORECASE)
_SECRET_SHAPES = re.compile(
    "|".join(
        (
            r"\bhf_[A-Za-z0-9]{16,}",
            r"\bgh[pousr]_[A-Za-z0-9]{16,}",
            r"\bgithub_pat_\w{16,}",
            r"\bglpat-[\w\-]{16,}",
            r"\bsk-[\w\-]{16,}",
            r"\bxox[abprs]-[\w\-]{10,}",
            r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
            r"\bAIza[\w\-]{30,}",
            r"\bwandb_v\d_\w{16,}",
            r"\b(?:npm_|pypi-|nvapi-|dckr_pat_)[\w\-]{16,}",
            r"\blocal-[0-9a-f]{32,}",
            r"\beyJ[\w\-]+\.[\w\-]+\.[\w\-]+",
            r"(?<=[Bb]earer )\S{8,}",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*",
        )
    )
)
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s@]{8,})@")
_URL_USER = re.compile(r"(:/{1,2})(?:[^/\s@]+|[^/\s@:]+:(?!\d+/)[^\s@]+)@")  # a URL normalised as a path has one slash
_PAIR = re.compile(
    r"(?P<before>(?<![\w.-])(?P<name>[\w.-]*\w)=['\"]?|^[\s-]*(?P<key>[\w.-]+): +['\"]?)"
    r"(?P<value>[^\s'\"`,;}\])]+)",
    re.MULTILINE,
)
"""`name=value` anywhere, `name: value` at the beginning of a line."""
_URL_QUERY = re.compile(
    r"(?<=[?&])([\w\-]*(?:token|key|secret|password|signature|sig|credential|auth)[\w\-]*)=[^&\s#]+", re.IGNORECASE
)
_HEX40 = re.compile(r"\b[0-9a-f]{40}\b")  # a W&B key or a git commit: the key's name or the text before it decides
_COMMIT_PLACE = re.compile(
    r"(?:\b(?:revision|commit|sha1?|digest)(?:\s*[=:]\s*|\s+(?:is\s+|of\s+)?|\s+\(here\s+)[\"'`]?"
    # above: revision=..., commit '...'; below: pages of the hub and of GitHub, and the hub's cache
    r"|/(?:commits?|tree|blob|resolve|raw|archive|snapshots)/"
    r"|[\w.-]+/[\w.-]+@)$",
    re.IGNORECASE,
)  # hub:ORG/KERNEL@..., git+https://host/org/repo@...
"""Text that, directly before 40 hexadecimal digits, shows that they are a commit and not a key."""


def redact(value: Any, key: str = "") -> Any:
    """A copy of `value` (nested dicts and lists of plain values) with `[redacted]` in place of each secret."""
    return _redact(value, key, _environment_secrets())


def redact_arguments(arguments: list[str]) -> list[str]:
    """redact() for the arguments of a command line. In `key=value` the key's name decides, too."""
    secrets = _environment_secrets()
    cleaned = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        pair = equals and "://" not in name
        cleaned.append(f"{name}={_redact(value, name, secrets)}" if pair else _clean(argument, "", secrets))
    return cleaned


def without_user(url: str) -> str:
    """A URL without its user and password."""
    return _URL_USER.sub(r"\1", url)


def redact_text(text: str) -> str:
    """redact() for a text: a message, a traceback, a config as YAML."""
    return _clean(_PAIR.sub(_redact_pair, text), "", _environment_secrets())


class RedactedStream:
    """A text stream that removes the values of `secrets` from all text written to it.

    Characters that the stream's encoding lacks become question marks. Writing to a closed pipe or terminal is no
    error.
    """

    def __init__(self, stream: IO[str], secrets: list[str]):
        self._stream, self._secrets = stream, secrets
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        with self._reader_may_leave():
            self._stream.write(_without(text, self._secrets))
        return len(text)

    def flush(self) -> None:
        with self._reader_may_leave():
            self._stream.flush()

    @contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def redacted_output() -> Iterator[None]:
    """Remove the environment's secrets from all output of the body, and from a traceback that ends the process.
    Writing does not fail if the reader has gone; see RedactedStream."""
    sys.excepthook = _excepthook
    secrets = _environment_secrets()
    out, err = sys.stdout, sys.stderr
    streams = sys.stdout, sys.stderr = RedactedStream(out, secrets), RedactedStream(err, secrets)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()  # the interpreter's own flush would fail if the reader has left
        sys.stdout, sys.stderr = out, err


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(redact_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _redact(value: Any, key: str, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _redact(item, str(name), secrets) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(item, key, secrets) for item in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_NAME.search(key):
        return HIDDEN
    return _clean(value, key, secrets)


def _clean(text: str, key: str, secrets: list[str]) -> str:
    text = _without(text, secrets)
    text = _SECRET_SHAPES.sub(HIDDEN, text)
    text = _URL_USER.sub(rf"\1{HIDDEN}@", text)
    text = _URL_QUERY.sub(rf"\1={HIDDEN}", text)
    return text if _HASH_NAME.search(key) else _HEX40.sub(_redact_hex, text)


def _without(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    return text


def _redact_pair(found: re.Match[str]) -> str:
    return found["before"] + HIDDEN if _SECRET_NAME.search(found["name"] or found["key"]) else found[0]


def _redact_hex(found: re.Match[str]) -> str:
    before = found.string[max(found.start() - 120, 0) : found.start()]
    return found[0] if _COMMIT_PLACE.search(before) else HIDDEN


def _environment_secrets() -> list[str]:
    """Values of environment variables with a secret's name, and passwords of URLs in any variable, such as a proxy's.
    Each value is also listed in its URL, JSON and Python spelling. Longer values come first. Short values are left
    out, because they may be ordinary words."""
    values = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name) and len(value) >= 8}
    values = {value for value in values if not value.startswith(("/", "~"))}
    values |= {found for value in os.environ.values() for found in _URL_PASSWORD.findall(value)}
    forms = {
        form for value in values for form in (value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1])
    }
    return sorted(forms, key=len, reverse=True)
