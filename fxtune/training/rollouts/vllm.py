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

Adapters need only calls that vLLM offers without its development mode: /v1/completions, /v1/models, /tokenize,
/version, /health, /v1/load_lora_adapter and /v1/unload_lora_adapter. Full fine-tuning needs that mode
(VLLM_SERVER_DEV_MODE=1): the weights of each step are written to the disk, /collective_rpc makes vLLM read them in the
place of the old weights, and /reset_prefix_cache drops cached keys. sampler.sleep needs it, too: /sleep and /wake_up.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxtune.config.root import Config
from fxtune.distributed.world import World
from fxtune.errors import ConfigError, HardwareError, UserError, writing
from fxtune.export.vllm import max_rank, refusals
from fxtune.export.weights import ExportedWeights, on_main
from fxtune.models.prepared import PreparedModel
from fxtune.models.structure import base_dtype
from fxtune.system.files.atomic_files import read_json
from fxtune.system.process.process_group import end_process
from fxtune.system.terminal.progress import Phase, phase
from fxtune.training.rollouts.client import TRIES, Client, ServerError, clients_of, side_by_side
from fxtune.training.rollouts.episodes import Episodes, Request, Sampled
from fxtune.training.rollouts.folder import Answer
from fxtune.training.rollouts.server_process import start_server

WHOLE_DISTRIBUTION = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Options of a request that leave out no token. vLLM would take others from the model's generation_config.json."""
REFUSALS = ("max_lora_rank", "LoRA is not enabled")
"""Parts of vLLM's reasons for not loading an adapter."""
ALLOW, DEVELOPMENT = "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"


def require_ready(config: Config, tokenizer: Any) -> None:
    """Raise ConfigError if the servers of the recipe cannot be reached, if they have other tokens than the model or
    read shorter texts than this run needs, or if there is no vLLM in sampler.venv."""
    sampler = config.sampler
    clients = _clients(config)
    if sampler.is_vllm and not clients and (sampler.venv is None or not _program(config).exists()):
        raise ConfigError(
            f"sampler.venv={sampler.venv}: there is no vLLM. Make an environment with it and name that: python -m "
            "venv vllm && vllm/bin/pip install vllm; or give the address of a server in sampler.url."
        )
    calls = ["/version", *["/is_sleeping"] * (DEVELOPMENT in _environment(config))]  # the second only in this mode
    for client in _clients(config):
        client.require_fit("sampler.url", tokenizer, config.data.sequence_length, how_to_start(config), calls)


def _clients(config: Config) -> list[Client]:
    return clients_of(config.sampler.url or "", config.sampler.request_seconds)


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
        self.rank, self.adapts = rank, config.techniques.lora.enabled
        self.written = folder / ("adapters" if self.adapts else "weights")
        self.config_name = "adapter_config.json" if self.adapts else "config.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.clients = list[Client]()
        self.name, self.repeats, self.sync_seconds = "vLLM", False, 0.0
        self.loaded, self.newest, self.closed = "", "", False
        """`loaded`: the weights that all servers have. `newest`: the weights that they got last."""
        world.from_main(self._connect, "waiting for vLLM")

    def _connect(self) -> None:
        self.clients = _clients(self.config) or [Client(self._start(), self.config.sampler.request_seconds)]
        try:
            self.name = f"vLLM {self.clients[0].call('/version')['version']}"
            self.base = "" if self.adapts else self.clients[0].model
            self._sleep(True)
        except ServerError as error:
            raise self._failed(error) from error

    def sample(self, episodes: Episodes, weights_version: str) -> Callable[[], list[Answer]]:
        """See Sampler. The returned function raises HardwareError if the servers fail."""
        if any(asked.images for asked in episodes.asked):
            raise ConfigError("sampler.name=vllm: prompts with images need sampler.name=model.")
        name, began = _name_of(weights_version), time.perf_counter()
        if self.config.sampler.sleep and self.world.device.type == "cuda":
            torch.cuda.empty_cache()  # vLLM takes its memory back
        folder = self._write_weights(name)
        return partial(self._sample, episodes, name, folder, time.perf_counter() - began)

    def has(self, weights_version: str) -> bool:
        return (self.written / _name_of(weights_version) / self.config_name).exists()

    def _sample(self, episodes: Episodes, name: str, folder: Path, writing_seconds: float) -> list[Answer]:
        requests, answers, left = episodes.begin(), dict[int, Sampled](), TRIES
        self.sync_seconds = writing_seconds
        if not self.adapts:
            self.loaded = ""  # a server that has started again answers by the same name, with its first weights

        def ask(number: int, client: Client) -> None:
            answers[number] = self._ask(requests[number], client, self.base or name)
            work.advance(1)

        while requests:
            if self.closed:  # by the main thread
                raise HardwareError("The run ends, so no answers are written.")
            about = f"Writing {len(requests):,} answers", len(requests), "answers"
            try:
                began = time.perf_counter()
                self._sleep(False)
                if self._load(name, folder):
                    # A server that starts again may have other weights, and a step has one model.
                    requests, answers = episodes.begin(), {}
                self.sync_seconds += time.perf_counter() - began
                missing = [number for number in range(len(requests)) if number not in answers]
                shows = not self.config.sampler.ahead  # else training shows its own progress meanwhile
                with phase(*about, announce=False) if shows else nullcontext(Phase(*about)) as work:
                    side_by_side(ask, missing, self.clients, lambda: self.closed)
                if len(answers) == len(requests):
                    requests, answers = episodes.go_on([answers[at] for at in range(len(requests))]), {}
                    left = TRIES
            except ServerError as error:
                left -= 1
                # A server that has started again does not know the adapter: 404.
                if self.closed or not left or (400 <= error.status < 500 and error.status != 404):
                    raise self._failed(error) from error
                self.loaded = ""
                for client in self.clients:
                    client.wait(self._has_ended)
                if self._has_ended():
                    self._end_process()  # its children may still hold the card
                    self.clients = [Client(self._start(), self.config.sampler.request_seconds)]
        try:
            self._sleep(True)
        except ServerError as error:
            raise self._failed(error) from error
        return episodes.answers

    def _sleep(self, sleeps: bool) -> None:
        """With sampler.sleep: make the servers give the card's memory back, or take it. Raises ServerError."""
        for client in self.clients * self.config.sampler.sleep:
            client.call("/sleep?level=1" if sleeps else "/wake_up", {})

    def close(self) -> None:
        """End the process that this run has started, and take the adapter from servers of the user."""
        self.closed = True
        if self.process is not None:
            self._end_process()
        else:
            with suppress(ServerError):
                self._sleep(False)
            for client in self.clients * bool(self.loaded and self.adapts):
                with suppress(ServerError):
                    client.call("/v1/unload_lora_adapter", {"lora_name": self.loaded})
        self.loaded = ""
        if self.world.main and not self.config.sampler.ahead:  # a resumed run may need them: see has()
            shutil.rmtree(self.written, ignore_errors=True)

    def _has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            end_process(process)

    def _write_weights(self, name: str) -> Path:
        """Write the trained weights for vLLM, unless they are there: an adapter, or a whole model. All ranks call this
        together. Raises StorageError."""
        folder = self.written / name
        is_there = self.world.from_main((folder / self.config_name).exists, "looking for weights")
        if not is_there:
            staging = folder.with_name(f".{name}")
            with writing(f"{folder} cannot be written", "or set run.dir to another disk"):
                on_main(self.world, lambda: _make_empty(staging))
                written = ExportedWeights.write(self.model, staging, self.world)
                if self.adapts:
                    self.world.from_main(lambda: _require_servable(staging, written.files), "reading an adapter")
                on_main(self.world, lambda: os.replace(staging, folder))
        return folder

    def _load(self, name: str, folder: Path) -> bool:
        """Give all servers the weights `name`, and take the adapter before from them. Returns whether a server did not
        have these weights. Raises ServerError."""
        if name == self.loaded:
            return False
        before, is_new = self.loaded, False
        for client in self.clients:
            if not self.adapts:
                self._reload(client, folder)
                is_new = True
                continue
            is_new |= self._load_on(client, name, folder)
            if before:
                try:
                    client.call("/v1/unload_lora_adapter", {"lora_name": before})
                except ServerError as error:
                    if error.status not in (400, 404):  # the server has started again, and lost it
                        raise
        kept = (name, self.newest) if self.config.sampler.ahead else (name,)
        for old in self.written.iterdir() if self.newest else ():  # a resumed run may still need them: see has()
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
        self.loaded = self.newest = name
        return is_new

    def _reload(self, client: Client, folder: Path) -> None:
        """Make a server read a whole model. Raises ServerError."""
        try:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder.resolve())}}
            client.call("/collective_rpc", call)
            emptied = client.call("/reset_prefix_cache", {})  # it holds keys of the old weights
        except ServerError as error:
            if error.status not in (404, 405):
                raise
            raise ConfigError(
                f"sampler.url={client.url}: vLLM does not read new weights ({error.reason}). "
                f"{how_to_start(self.config)}; it must see the run's folder."
            ) from error
        if isinstance(emptied, dict) and emptied.get("success") is False:
            raise ServerError(client.url, 503, "the cache of prompts is in use, so it keeps keys of old weights")

    def _load_on(self, client: Client, name: str, folder: Path) -> bool:
        """Give a server the adapter `name`. Returns whether it did not have it."""
        try:
            client.call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())})
        except ServerError as error:
            if "already" in error.reason:
                return False
            refused = any(word in error.reason for word in REFUSALS)  # vLLM 0.32 answers them with 500
            if not refused and (not error.status or error.status >= 500):
                raise
            raise ConfigError(
                f"sampler.url={client.url}: vLLM does not load the adapter {folder} ({error.reason}). "
                f"{how_to_start(self.config)}; it must see this folder."
            ) from error
        return True

    def _ask(self, request: Request, client: Client, model: str) -> Sampled:
        """The answer of a server, checked. Raises ServerError, and HardwareError if something that training needs is
        missing."""
        sampler = self.config.sampler
        content = {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.room,
            "temperature": sampler.temperature,
            **WHOLE_DISTRIBUTION,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(self.ends),
            "skip_special_tokens": False,
            **({"seed": request.seed} if sampler.request_seeds else {}),
        }
        return self._read(client.call("/v1/completions", content), request, client, model)

    def _read(self, answer: Any, request: Request, client: Client, asked: str) -> Sampled:
        try:
            choice = answer["choices"][0]
            ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            reason, prompt = choice["finish_reason"], choice["prompt_token_ids"]
            model = answer["model"]
        except (LookupError, TypeError) as error:
            raise HardwareError(
                f"{client.url}: an answer lacks {error}. Use a version of vLLM that has `return_token_ids`."
            ) from error
        if model != asked or prompt != request.prompt:
            raise HardwareError(
                f"{client.url}: asked {asked} with {len(request.prompt)} tokens, the server says that {model} read "
                f"{len(prompt)}. Its answers are not of the trained weights."
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
            f"vLLM failed: {error}.{log} The answers of this step are lost. The same command goes on from "
            "the last checkpoint, and learns stored answers again."
        )

    def _start(self) -> str:
        """Start vLLM on a free port, and wait for it. Returns its URL."""
        sampler, model = self.config.sampler, self.config.model
        words = [str(_program(self.config)), "serve", str(self.model.module.name_or_path)]
        words += ["--revision", model.revision] if model.on_hub and model.revision else []
        words += ["--trust-remote-code"] if model.trust_remote_code else []
        words += _flags(self.config)
        words += ["--max-model-len", str(self.config.data.sequence_length)]
        words += ["--dtype", str(base_dtype(self.model.module)).removeprefix("torch."), *sampler.arguments]
        log = self.folder / "vllm.log"
        self.process, url = start_server("vLLM", words, log, _environment(self.config))
        atexit.register(self._end_process)  # for a run that fails before it begins
        return url


def _program(config: Config) -> Path:
    return Path(config.sampler.venv or "", "bin", "vllm").expanduser()


def _name_of(weights_version: str) -> str:
    return f"fxtune-{weights_version[:16]}"


def _flags(config: Config) -> list[str]:
    """The arguments of vLLM that this run needs."""
    lora, rank = config.techniques.lora.enabled, max_rank(config.techniques.lora.r) or config.techniques.lora.r
    return [
        *["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"] * lora,
        *["--enable-sleep-mode"] * config.sampler.sleep,
        *["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"],
    ]


def _environment(config: Config) -> dict[str, str]:
    """The variables of vLLM that this run needs."""
    lora, sleep = config.techniques.lora.enabled, config.sampler.sleep
    return {**({ALLOW: "1"} if lora else {}), **({DEVELOPMENT: "1"} if sleep or not lora else {})}


def how_to_start(config: Config) -> str:
    variables = " ".join(f"{name}={value}" for name, value in _environment(config).items())
    return f"Start it with {variables} and {' '.join(_flags(config))}"


def _require_servable(folder: Path, tensors: Mapping[str, str]) -> None:
    if found := refusals(read_json(folder / "adapter_config.json"), tensors):
        raise ConfigError(f"sampler.name=vllm: vLLM serves {', '.join(found)}. Set sampler.name=model.")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
