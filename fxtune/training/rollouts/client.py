"""Calls a vLLM server over HTTP."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

from fxtune.errors import ConfigError

Asked = TypeVar("Asked")

CONNECTIONS = 256
"""Requests that a server gets at once. It queues what it cannot compute."""
TRIES = 3
"""How often a request is sent before the run ends."""
WAIT_SECONDS = 5.0
"""The pause before a request is sent again."""
START_SECONDS = 900.0
"""How long a server may take to start: it reads the weights and compiles."""
PROBE = 4000
"""How many tokens of the vocabulary are compared."""
LOCAL = ("127.0.0.1", "localhost")


class ServerError(Exception):
    """A server refused a request, or could not be reached. `status`: of HTTP; 0 without an answer."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.status, self.reason = url, status, reason


class Client:
    def __init__(self, url: str, seconds: float) -> None:
        self.url, self.seconds = url.rstrip("/"), seconds
        # A proxy of the environment would not reach this machine.
        local = urllib.parse.urlsplit(self.url).hostname in LOCAL
        self._open = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * local).open

    def call(self, path: str, content: Mapping[str, Any] | None = None) -> Any:
        """The answer to a request: JSON, or text. `content`: for a POST. Raises ServerError."""
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with self._open(request, timeout=self.seconds) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            raise ServerError(self.url, error.code, _reason(error.read(), error.reason)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:  # the connection, a time limit, or no URL
            reason = getattr(error, "reason", error)
            raise ServerError(self.url, 0, f"no answer ({reason})") from error
        try:
            return json.loads(body)
        except ValueError:
            return body.decode(errors="replace")

    def wait(self, ended: Callable[[], bool] = lambda: False, pause: float | None = None) -> bool:
        """Wait until the server answers, or has ended(), at most START_SECONDS: it may be starting. Returns whether it
        answers. `pause`: seconds between two tries; None: WAIT_SECONDS."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and not ended():
            time.sleep(WAIT_SECONDS if pause is None else pause)
            with suppress(ServerError):
                self.call("/health")
                return True
        return False

    @property
    def model(self) -> str:
        """The name of the server's base model. Raises ServerError."""
        return str(self.served()[0]["id"])

    def served(self) -> list[dict[str, Any]]:
        """What /v1/models says of the base model (first) and of each adapter: `id`, ... Raises ServerError."""
        try:
            found = [{"id": each["id"], **each} for each in self.call("/v1/models")["data"]]
            return [found[0], *found[1:]]
        except (LookupError, TypeError) as error:
            raise ServerError(self.url, 0, f"/v1/models lacks {error}") from error

    def require_fit(self, key: str, tokenizer: Any, needed: int, start: str, calls: Sequence[str] = ()) -> None:
        """Raise ConfigError if the server does not answer `calls`, has other tokens than the trained model, or reads
        texts of less than `needed` tokens. `key`: the key that names the server. `start`: how to start it."""
        where = f"{key}={self.url}"
        try:
            longest, alike = self.served()[0].get("max_model_len"), self.tokenizes_as(tokenizer)
            for call in calls:
                self.call(call)
        except (ServerError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: there is no vLLM server as this run needs it ({error}). {start}.") from error
        if not alike:
            raise ConfigError(
                f"{where}: this server has another model: it divides a text into other tokens than the trained model. "
                "A sampler serves the model of model.path, a teacher has the same tokenizer."
            )
        if longest is not None and longest < needed:
            raise ConfigError(
                f"{where}: the server reads {longest:,} tokens, and this run needs {needed:,}. Start it with "
                f"--max-model-len {needed}, or lower data.sequence_length."
            )

    def tokenizes_as(self, tokenizer: Any) -> bool:
        """Whether the server divides a text with tokens of all parts of the vocabulary into the tokens of `tokenizer`.
        Raises ServerError and LookupError."""
        step = max(len(tokenizer) // PROBE, 1)
        text = " ".join(tokenizer.decode([token]) for token in range(0, len(tokenizer), step))
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return bool(self.call("/tokenize", asked)["tokens"] == tokenizer(text, add_special_tokens=False)["input_ids"])


def clients_of(urls: str, seconds: float) -> list[Client]:
    """A client for each of `urls`, which commas separate."""
    return [Client(url.strip(), seconds) for url in urls.split(",") if url.strip()]


def side_by_side(
    ask: Callable[[Asked, Client], None],
    waiting: Sequence[Asked],
    clients: Sequence[Client],
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Call ask() for each of `waiting`, on the servers in turn, until ended(). After all calls, raises the first
    error, other errors before a ServerError. The end of the process does not wait for the calls."""
    left, errors = deque(enumerate(waiting)), list[Exception]()

    def work() -> None:
        with suppress(IndexError):  # nothing is left
            while not ended():
                at, each = left.popleft()
                try:
                    ask(each, clients[at % len(clients)])
                except Exception as error:  # noqa: BLE001  raised below
                    errors.append(error)

    count = min(CONNECTIONS * len(clients), len(waiting))
    threads = [Thread(target=work, name="fxtune-request", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, ServerError)), errors[0])


def _reason(body: bytes, reason: str) -> str:
    """The message of an error of vLLM."""
    try:
        found = json.loads(body)
        return str((found.get("error") or found).get("message") or found)
    except (ValueError, AttributeError):
        return reason
