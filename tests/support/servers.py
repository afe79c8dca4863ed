"""A model hub and a W&B server on loopback, which can fail like real servers and record their requests."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef" * 2 + "01234567"


class Server(ThreadingHTTPServer):
    """A server whose `mode` decides what happens to a request.

    works     answers
    silent    accepts the request and never answers
    drips     answers a byte each half second, without end
    breaks    closes the connection in the middle of an answer
    500, 401  and any other number: answers with that status
    """

    daemon_threads = True

    def __init__(self, handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.mode: str | int = "works"
        self.requests: list[str] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client closed the connection


@contextlib.contextmanager
def serving(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def handle_request(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        self.server.requests.append(f"{self.command} {self.path}")
        mode = self.server.mode
        if mode == "silent":
            self.server.over.wait()
            self.close_connection = True
        elif mode == "drips":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
            while not self.server.over.wait(0.5):
                self.wfile.write(b" ")
        elif mode == "breaks":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{")
            self.close_connection = True
        elif isinstance(mode, int):
            self.answer(mode, {"error": f"mode {mode}"})
        else:
            self.serve(body)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def serve(self, body: bytes) -> None:
        raise NotImplementedError

    def answer(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(payload)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


# --- the hub


class Hub(Server):
    """A hub with one model of `files` under every name.

    Each entry of `broken` interrupts one download of that file halfway.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(_HubHandler)
        self.files = files
        self.commit = COMMIT
        self.broken: list[str] = []
        self.stuck: list[str] = []
        """Files whose download hangs halfway."""


class _HubHandler(Handler):
    def serve(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        hub = self.server
        if path.startswith("/api/") and "/tree/" in path:
            self.answer(
                200,
                [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in hub.files.items()
                ],
            )
        elif path.startswith("/api/"):
            self.answer(
                200,
                {
                    "_id": "1",
                    "id": "nobody/tiny",
                    "modelId": "nobody/tiny",
                    "sha": hub.commit,
                    "private": False,
                    "siblings": [{"rfilename": name} for name in hub.files],
                    "tags": [],
                    "downloads": 0,
                },
            )
        else:
            name = path.partition(f"/resolve/{hub.commit}/")[2]
            if name not in hub.files:
                self.answer(404, b"", {"x-error-code": "EntryNotFound"})
                return
            self.file(name, hub.files[name])

    def file(self, name: str, content: bytes) -> None:
        headers = {
            "etag": f'"{hashlib.sha1(content).hexdigest()}"',
            "x-repo-commit": self.server.commit,
            "accept-ranges": "bytes",
        }
        begun = 0
        if wanted := self.headers.get("range"):
            begun = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers["content-range"] = f"bytes {begun}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and name in (*self.server.broken, *self.server.stuck):
            self.send_response(206 if begun else 200)
            for key, value in {"content-length": str(len(content) - begun), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content[begun : begun + (len(content) - begun) // 2])
            self.wfile.flush()
            if name in self.server.stuck:
                self.server.over.wait()
            else:
                self.server.broken.remove(name)
            self.close_connection = True
            return
        self.answer(206 if begun else 200, content[begun:], headers)


class UploadHub(Server):
    """A hub that takes uploads of the user of TOKEN.

    `kinds`: the existing repositories, name to models, datasets or spaces; `stored`: the files of each model.
    """

    TOKEN = "hf_fake_token_of_the_tests"

    def __init__(self) -> None:
        super().__init__(_UploadHandler)
        self.kinds: dict[str, str] = {}
        self.stored: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.readers_only = False
        """The token may not write."""


def send_uploads_to(monkeypatch: Any, url: str) -> None:
    """Let huggingface_hub's API of this process use the hub at `url`."""
    import huggingface_hub

    made = huggingface_hub.HfApi.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        made(self, *given, **{**named, "endpoint": named.get("endpoint", url)})

    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", init)


@contextlib.contextmanager
def upload_hub(monkeypatch: Any) -> Iterator[UploadHub]:
    """An UploadHub that the commands of this process upload to, with the token of its user."""
    from huggingface_hub import constants

    with serving(UploadHub()) as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", server.TOKEN)
        send_uploads_to(monkeypatch, server.url)
        yield server


class _UploadHandler(Handler):
    def serve(self, body: bytes) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        if self.headers.get("authorization") != f"Bearer {hub.TOKEN}":
            self.answer(401, {"error": "Invalid credentials in Authorization header"}, {"x-error-code": ""})
        elif self.command == "POST" and hub.readers_only:
            self.answer(403, {"error": "You have read access but not the required permissions"})
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            hub.kinds[name], hub.stored[name], hub.private[name] = (
                "models",
                {},
                wanted.get("private", False) or wanted.get("visibility") == "private",
            )
            self.answer(200, {"url": f"{hub.url}/{name}", "name": name})
        elif path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        else:
            _, kind, user, model, *more = path.strip("/").split("/")
            name = f"{user}/{model}"
            if hub.kinds.get(name) != kind:
                self.answer(404, {"error": "Repository not found"}, {"x-error-code": "RepoNotFound"})
            else:
                self.repository(name, more, body)

    def repository(self, name: str, more: list[str], body: bytes) -> None:
        stored = self.server.stored.setdefault(name, {})
        if more[:1] == ["preupload"]:
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self.answer(200, {"files": [{**one, "shouldIgnore": False, "oid": None} for one in files]})
        elif more[:1] == ["commit"]:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    stored[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(200, {"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            siblings = [{"rfilename": file} for file in stored]
            found = {"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}
            self.answer(200, {**found, "tags": [], "downloads": 0})


# --- W&B


class Wandb(Server):
    """The part of W&B's server that runs need: the history rows of each run by offset, resumed runs, `wandb sync`."""

    def __init__(self) -> None:
        super().__init__(_WandbHandler)
        self.rows: dict[str, dict[int, str]] = {}
        self.summary: dict[str, dict[str, Any]] = {}
        self.upserts: list[dict[str, Any]] = []
        self.ends: list[int] = []
        """Exit codes of finished runs."""

    def history(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(text) for _, text in sorted(self.rows[run].items())]


class _WandbHandler(Handler):
    def serve(self, body: bytes) -> None:
        if "/graphql" in self.path:
            request = json.loads(body)
            self.answer(200, {"data": self.graphql(request["query"], request.get("variables") or {})})
            return
        if "/file_stream" in self.path:
            self.stream(self.path.split("/file_stream")[0].rpartition("/")[2], json.loads(body))
        self.answer(200, {})

    def graphql(self, query: str, given: dict[str, Any]) -> Any:
        server, run = self.server, given.get("name", "")
        if "upsertBucket" in query:
            server.upserts.append(given)
            new = server.rows.setdefault(run, {}) == {}
            return {
                "upsertBucket": {
                    "bucket": {
                        "id": "x",
                        "name": run,
                        "displayName": "d",
                        "historyLineCount": len(server.rows[run]),
                        "project": {"name": "unit", "entity": {"name": "me", "id": "1"}, "id": "2"},
                    },
                    "inserted": new,
                }
            }
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{server.url}/upload/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if "RunResumeStatus" in query and run in server.rows:
            rows = server.rows[run]
            return {
                "model": {
                    "id": "2",
                    "name": "unit",
                    "entity": {"id": "1", "name": "me"},
                    "bucket": {
                        "id": "x",
                        "name": run,
                        "displayName": "d",
                        "summaryMetrics": json.dumps(server.summary.get(run, {})),
                        "logLineCount": 0,
                        "historyLineCount": len(rows),
                        "eventsLineCount": 0,
                        "eventsTail": "[]",
                        "config": "{}",
                        "historyTail": json.dumps([rows[place] for place in sorted(rows)[-1:]]),
                        "tags": [],
                        "wandbConfig": json.dumps({"t": {"value": 1}}),
                    },
                }
            }
        return None if "__type" in query else {"model": None}

    def stream(self, run: str, sent: dict[str, Any]) -> None:
        files = sent.get("files") or {}
        if part := files.get("wandb-history.jsonl"):
            self.server.rows[run].update(enumerate(part["content"], part["offset"]))
        if part := files.get("wandb-summary.json"):
            self.server.summary[run] = json.loads(part["content"][-1])
        if sent.get("complete"):
            self.server.ends.append(sent["exitcode"])


# --- addresses without a server


def refused() -> str:
    """An address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@contextlib.contextmanager
def black_hole() -> Iterator[tuple[str, list[float]]]:
    """(address, the times of connections) of a server that accepts connections and never answers."""
    seen: list[float] = []
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    seen.append(time.monotonic())

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", seen
    for connection in kept:
        connection.close()
