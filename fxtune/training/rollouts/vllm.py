"""Samples answers from vLLM over HTTP: from servers of the user, or from a process that the run starts and ends.

Prompts are sent and answers come back as token ids, so no text is encoded twice. vLLM gets each version of the
adapter as a folder under a new name: an adapter that is loaded again under its old name may meet cached keys of the
old weights (vllm#42125). The version before it is unloaded afterwards.

    sampler.url=http://host:8000        servers that run already, separated by commas. They must see the run's folder:
                                        VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora
                                        --max-lora-rank 16 --max-loras 2 --logprobs-mode processed_logprobs
                                        --generation-config vllm
    sampler=vllm sampler.venv=FOLDER    the virtual environment that has vLLM. Its torch is not fxtune's, so it has an
                                        environment of its own, and fxtune never imports it

Only what vLLM offers without its development mode is used: /v1/completions, /v1/models, /version, /health, and the two
calls for adapters.
"""

from __future__ import annotations

import atexit
import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from fxtune.config.root import Config
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, UserError
from fxtune.export.vllm import max_rank, refusals
from fxtune.export.weights import ExportedWeights
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import base_dtype
from fxtune.system.files.atomic_files import read_json
from fxtune.system.process.process_group import end_process, start_process
from fxtune.system.terminal.progress import phase
from fxtune.training.rollouts.sampler import Request, Sampled

CONNECTIONS = 256
"""Requests that a server gets at once. It queues what it cannot compute."""
TRIES = 3
"""How often a request is sent before the run ends."""
WAIT_SECONDS = 5.0
"""The pause before a request is sent again."""
START_SECONDS = 900.0
"""How long a server may take to start: it reads the weights and compiles."""
WHOLE_DISTRIBUTION = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Options of a request that leave out no token. vLLM would take others from the model's generation_config.json."""
LOCAL = ("127.0.0.1", "localhost")
ALLOW = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class ServerError(Exception):
    """A server refused a request, or could not be reached. `status`: of HTTP; 0 without an answer."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.status, self.reason = url, status, reason


class Client:
    """Calls one server."""

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


def require_ready(config: Config) -> None:
    """Raise ConfigError if the servers of the recipe cannot be reached, if they read shorter texts than this run
    needs, or if there is no vLLM in sampler.venv."""
    sampler = config.sampler
    clients = clients_of(config)
    if sampler.is_vllm and not clients and (sampler.venv is None or not _program(config).exists()):
        raise ConfigError(
            f"sampler.venv={sampler.venv}: there is no vLLM. Make an environment with it and name that: python -m "
            "venv vllm && vllm/bin/pip install vllm; or give the address of a server in sampler.url."
        )
    needed = config.data.sequence_length
    for client in clients:
        try:
            longest = client.call("/v1/models")["data"][0].get("max_model_len")
            client.call("/version")["version"]
        except (ServerError, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"sampler.url={client.url}: there is no vLLM server ({error}). {_how(config)}."
            ) from error
        if longest is not None and longest < needed:
            raise ConfigError(
                f"sampler.url={client.url}: the server reads {longest:,} tokens, and data.sequence_length={needed:,}. "
                f"Start it with --max-model-len {needed}, or lower data.sequence_length."
            )


def clients_of(config: Config) -> list[Client]:
    """A client for each server of sampler.url."""
    urls = (config.sampler.url or "").split(",")
    return [Client(url.strip(), config.sampler.request_seconds) for url in urls if url.strip()]


class VllmSampler:
    """`model`: the trained model, with adapters. `ends`: tokens that end an answer. `folder`: for the adapters. Call
    close() at the end.

    Raises HardwareError if vLLM does not start.
    """

    def __init__(
        self, model: PreparedModel, config: Config, world: World, ends: set[int], folder: Path, rank: int
    ) -> None:
        """`rank`: of the adapters."""
        self.model, self.config, self.world, self.ends, self.folder = model, config, world, ends, folder
        self.adapters, self.rank = folder / "adapters", rank
        self.process: subprocess.Popen[bytes] | None = None
        self.clients = list[Client]()
        self.name, self.repeats = "vLLM", False
        self.loaded = ""
        """The newest adapter that all servers have."""
        world.from_main(self._connect, "waiting for vLLM")

    def _connect(self) -> None:
        self.clients = clients_of(self.config) or [Client(self._start(), self.config.sampler.request_seconds)]
        try:
            self.name = f"vLLM {self.clients[0].call('/version')['version']}"
        except ServerError as error:
            raise self._failed(error) from error

    def sample(self, requests: Sequence[Request], weights_version: str) -> list[Sampled]:
        """An answer to each request, on rank 0; the other ranks get none. Raises HardwareError if the servers fail."""
        name = f"fxtune-{weights_version[:16]}"
        if any(request.images for request in requests):
            raise ConfigError("sampler.name=vllm: prompts with images need sampler.name=model.")
        folder = self._write_adapter(name)

        found = list[Sampled]()
        self.world.from_main(lambda: found.extend(self._sample(requests, name, folder)), "waiting for vLLM")
        return found

    def _sample(self, requests: Sequence[Request], name: str, folder: Path) -> list[Sampled]:
        answers, left = dict[int, Sampled](), TRIES
        with phase(f"Writing {len(requests):,} answers", len(requests), "answers", announce=False) as work:
            while missing := [number for number in range(len(requests)) if number not in answers]:
                try:
                    if self._load(name, folder):
                        answers.clear()  # a server that starts again may have other weights, and a step has one model
                    self._ask_all(requests, missing, answers, work.advance)
                except ServerError as error:
                    left -= 1
                    # A server that has started again does not know the adapter: 404.
                    if not left or (400 <= error.status < 500 and error.status != 404):
                        raise self._failed(error) from error
                    self.loaded = ""
                    if self.process is not None and self.process.poll() is not None:
                        self.close()  # its children may still hold the card
                        self.clients = [Client(self._start(), self.config.sampler.request_seconds)]
                    for client in self.clients:
                        _wait_for(client)
        return [answers[number] for number in range(len(requests))]

    def _ask_all(
        self, requests: Sequence[Request], missing: Sequence[int], answers: dict[int, Sampled], done: Any
    ) -> None:
        """Add the answers to the requests of these numbers to `answers`. Raises the ServerError of a request after all
        requests have ended."""
        failed = None

        def ask(number: int) -> Sampled | ServerError:
            try:
                return self._ask(requests[number], self.clients[number % len(self.clients)])
            except ServerError as error:
                return error

        with ThreadPoolExecutor(min(CONNECTIONS * len(self.clients), len(missing))) as threads:
            for number, answer in zip(missing, threads.map(ask, missing), strict=True):
                if isinstance(answer, ServerError):
                    failed = answer
                else:
                    answers[number] = answer
                    done(1)
        if failed is not None:
            raise failed

    def close(self) -> None:
        """End the process that this run has started, and take the adapter from servers of the user."""
        process, self.process = self.process, None
        if process is not None:
            end_process(process)
        elif self.loaded:
            for client in self.clients:
                with suppress(ServerError):
                    client.call("/v1/unload_lora_adapter", {"lora_name": self.loaded})
        self.loaded = ""

    def _write_adapter(self, name: str) -> Path:
        """Write the adapter for vLLM, unless it is there. All ranks call this together."""
        folder = self.adapters / name
        is_there = self.world.from_main((folder / "adapter_config.json").exists, "looking for an adapter")
        if not is_there:
            staging = folder.with_name(f".{name}")
            self.world.from_main(lambda: _make_empty(staging), "making room for an adapter")
            written = ExportedWeights.write(self.model, staging, self.world)
            self.world.from_main(lambda: _require_servable(staging, written.files), "reading an adapter")
            self.world.from_main(lambda: os.replace(staging, folder), "writing an adapter")
        return folder

    def _load(self, name: str, folder: Path) -> bool:
        """Give all servers the adapter `name`, and take the one before from them. Returns whether a server did not
        have it. Raises ServerError."""
        if name == self.loaded:
            return False
        before, is_new = self.loaded, False
        for client in self.clients:
            is_new |= self._load_on(client, name, folder)
            if before:
                try:
                    client.call("/v1/unload_lora_adapter", {"lora_name": before})
                except ServerError as error:
                    if error.status not in (400, 404):  # the server has started again, and lost it
                        raise
        self.loaded = name
        for old in self.adapters.iterdir():
            if old.name not in (name, before):
                shutil.rmtree(old, ignore_errors=True)
        return is_new

    def _load_on(self, client: Client, name: str, folder: Path) -> bool:
        """Give a server the adapter `name`. Returns whether it did not have it."""
        try:
            client.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        except ServerError as error:
            if "already" in error.reason:
                return False
            if not error.status or error.status >= 500:
                raise
            raise ConfigError(
                f"sampler.url={client.url}: vLLM does not load the adapter {folder} ({error.reason}). "
                f"{_how(self.config)}; it must see this folder."
            ) from error
        return True

    def _ask(self, request: Request, client: Client) -> Sampled:
        """The answer of a server, checked. Raises ServerError, and HardwareError if something that training needs is
        missing."""
        sampler = self.config.sampler
        content = {
            "model": self.loaded,
            "prompt": request.prompt,
            "max_tokens": sampler.max_tokens,
            "temperature": sampler.temperature,
            **WHOLE_DISTRIBUTION,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(self.ends),
            "skip_special_tokens": False,
            **({"seed": request.seed} if sampler.request_seeds else {}),
        }
        return self._read(client.call("/v1/completions", content), request, client)

    def _read(self, answer: Any, request: Request, client: Client) -> Sampled:
        try:
            choice = answer["choices"][0]
            ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            reason, prompt = choice["finish_reason"], choice["prompt_token_ids"]
            model = answer["model"]
        except (LookupError, TypeError) as error:
            raise HardwareError(
                f"{client.url}: an answer lacks {error}. Use a version of vLLM that has `return_token_ids`."
            ) from error
        if model != self.loaded or prompt != request.prompt:
            raise HardwareError(
                f"{client.url}: asked {self.loaded} with {len(request.prompt)} tokens, the server says that {model} "
                f"read {len(prompt)}. Its answers are not of the trained weights."
            )
        if len(log_probs) != len(ids) or any(value is None or not math.isfinite(value) for value in log_probs):
            raise HardwareError(
                f"{client.url}: {len(ids)} tokens have the log-probabilities {log_probs[:4]}... . Start vLLM with "
                "--logprobs-mode processed_logprobs."
            )
        if reason not in ("stop", "length"):
            raise HardwareError(f"{client.url}: an answer ended with {reason!r}, so it is not whole.")
        end = next((at for at, token in enumerate(ids) if token in self.ends), len(ids) - 1)
        return Sampled(list(ids[: end + 1]), list(log_probs[: end + 1]), reason == "stop")

    def _failed(self, error: ServerError) -> UserError:
        log = f" Its log: {self.folder / 'vllm.log'}." if self.process is not None else ""
        return HardwareError(
            f"vLLM failed: {error}.{log} Answers so far are lost, and earlier steps are saved: the same command goes "
            "on from there."
        )

    def _start(self) -> str:
        """Start vLLM on a free port, and wait for it. Returns its URL."""
        sampler, model, port = self.config.sampler, self.config.model, _free_port()
        words = [str(_program(self.config)), "serve", str(self.model.module.name_or_path)]
        words += ["--host", "127.0.0.1", "--port", str(port), "--generation-config", "vllm"]
        words += ["--revision", model.revision] if model.on_hub and model.revision else []
        words += ["--trust-remote-code"] if model.trust_remote_code else []
        words += ["--enable-lora", "--max-lora-rank", str(max_rank(self.rank) or self.rank), "--max-loras", "2"]
        words += ["--max-model-len", str(self.config.data.sequence_length), "--logprobs-mode", "processed_logprobs"]
        words += ["--dtype", str(base_dtype(self.model.module)).removeprefix("torch."), *sampler.arguments]
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "vllm.log").open("ab") as log:
            self.process = start_process(words, {ALLOW: "1"}, foreign=True, stdout=log, stderr=log)
        atexit.register(self.close)  # for a run that fails before it begins
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        try:
            with phase("Starting vLLM"):
                while time.monotonic() < until and self.process.poll() is None:
                    with suppress(ServerError):
                        Client(url, 5).call("/health")
                        return url
                    time.sleep(0.5)
        except BaseException:  # a signal
            self.close()
            raise
        self.close()
        raise HardwareError(f"vLLM did not start. The end of {self.folder / 'vllm.log'}:\n{_tail(self.folder)}")


def _program(config: Config) -> Path:
    return Path(config.sampler.venv or "", "bin", "vllm").expanduser()


def _how(config: Config) -> str:
    """How to start a server."""
    rank = max_rank(config.techniques.lora.r) or config.techniques.lora.r
    return (
        f"Start it with {ALLOW}=1 and --enable-lora --max-lora-rank {rank} --max-loras 2 --logprobs-mode "
        "processed_logprobs --generation-config vllm"
    )


def _require_servable(folder: Path, tensors: Mapping[str, str]) -> None:
    """Raise ConfigError if vLLM cannot serve the adapter in `folder`."""
    if found := refusals(read_json(folder / "adapter_config.json"), tensors):
        raise ConfigError(f"sampler.name=vllm: vLLM serves {', '.join(found)}. Set sampler.name=model.")


def _wait_for(client: Client) -> None:
    """Wait until a server answers, at most START_SECONDS: it may be starting again."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        time.sleep(WAIT_SECONDS)
        with suppress(ServerError):
            client.call("/health")
            return


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _reason(body: bytes, reason: str) -> str:
    """The message of an error of vLLM."""
    try:
        found = json.loads(body)
        return str((found.get("error") or found).get("message") or found)
    except (ValueError, AttributeError):
        return reason


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _tail(folder: Path) -> str:
    return "\n".join((folder / "vllm.log").read_text(errors="replace").splitlines()[-15:])
