"""What `fxtune doctor` says about a recipe's sampler: the servers of sampler.url, or the environment sampler.venv.

A server does not show its options, so it gets small requests. It is asked to load an adapter of the recipe's rank
without weights, and its reason for not loading it says whether a real adapter would load. A token that it samples at
two temperatures says which log-probabilities it returns.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import RUNS
from fxtune.config.root import Config
from fxtune.diagnostics.system_report import Finding, State
from fxtune.training.rollouts.vllm import ALLOW, WHOLE_DISTRIBUTION, Client, ServerError, clients_of, how_to_start

TIMEOUT = 30.0
"""Seconds that a server has to answer."""
VERSIONS = {"2.11": ">=0.24,<0.27", "2.13": ">=0.27.1,<0.33", "2.14": ">=0.33,<0.34"}
"""{torch: the versions of vLLM that require this torch}."""
PROBE = "fxtune-doctor"
"""The name of the adapter without weights."""


def findings(config: Config) -> Iterator[Finding]:
    """Yield what is there of the recipe's sampler. Nothing for a recipe that samples no answers."""
    if not config.objective.needs.rollouts:
        return
    if not config.sampler.is_vllm:
        yield Finding("sampler", "the trained model writes the answers")
        return
    if not config.sampler.url:
        yield _environment(config.sampler.venv or "null")
    for client in clients_of(config):
        yield from _server(Client(client.url, TIMEOUT), config)


def _environment(venv: str) -> Finding:
    folder = Path(venv).expanduser()
    places = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    found = {package.name: package.version for package in metadata.distributions(path=places)}
    if "vllm" in found and (folder / "bin" / "vllm").exists():
        return Finding("vLLM", f"{found['vllm']} with torch {found.get('torch')}, in {venv}", State.works)
    torch = ".".join(metadata.version("torch").split(".")[:2])
    torch = torch if torch in VERSIONS else list(VERSIONS)[-1]
    remedy = (
        f"python -m venv vllm; vllm/bin/pip install 'vllm{VERSIONS[torch]}'; then set sampler.venv=vllm  (these "
        f"versions bring torch {torch}; a server that runs already: sampler.url=http://HOST:8000)"
    )
    return Finding("vLLM", f"sampler.venv={venv}: there is no vLLM", State.broken, remedy)


def _server(client: Client, config: Config) -> Iterator[Finding]:
    try:
        version, model = client.call("/version")["version"], client.call("/v1/models")["data"][0]
        name, longest = model["id"], model.get("max_model_len") or 0
    except (ServerError, LookupError, TypeError, AttributeError) as error:
        yield Finding("vLLM", f"{client.url} is no vLLM server ({error})", State.broken, how_to_start(config))
        return
    needed, own = config.data.sequence_length, config.model.path or ""
    seen = f"{client.url}: version {version} serves {name}, up to {longest:,} tokens"
    served = {path.rstrip("/").rpartition("/")[2].lower() for path in (name, model.get("root") or name)}
    if 0 < longest < needed:
        remedy = f"start it with --max-model-len {needed}"
        yield Finding("vLLM", f"{seen}, and data.sequence_length={needed:,}", State.broken, remedy)
    elif own.rpartition("/")[2].lower() not in served:
        remedy = "see that both are the same model: answers of another model end the run"
        yield Finding("vLLM", f"{seen}, and model.path={own}", State.warning, remedy)
    else:
        yield Finding("vLLM", seen, State.works)
    yield _adapters(client, config)
    yield _log_probs(client, name, how_to_start(config))


def _adapters(client: Client, config: Config) -> Finding:
    """Whether the server loads an adapter of the recipe's rank from the disk of the run's folder."""
    what, rank, run = "vLLM adapters", config.techniques.lora.r, Path(config.run.dir or RUNS).expanduser().absolute()
    place = next(path for path in (run, *run.parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{PROBE}-", dir=place) as folder:
            os.chmod(folder, 0o755)  # the server may run as another user
            options = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
            Path(folder, "adapter_config.json").write_text(json.dumps(options), encoding="utf-8")
            client.call("/v1/load_lora_adapter", {"lora_name": PROBE, "lora_path": folder})
            client.call("/v1/unload_lora_adapter", {"lora_name": PROBE})
    except OSError as error:
        return Finding(what, f"not tried: {place} cannot be written ({error.strerror})", State.warning)
    except ServerError as error:
        known = {
            "max_lora_rank": f"its --max-lora-rank is lower than techniques.lora.r={rank}",
            "not enabled": "it was started without --enable-lora",
            "No adapter": f"it does not see {place}, where the run writes its adapters",
            "Not Found": f"it was started without {ALLOW}=1",
        }
        for sign, problem in known.items():
            if sign in error.reason:
                return Finding(what, f"{client.url}: {problem}", State.broken, how_to_start(config))
        if "contain tensors" not in error.reason:
            return Finding(
                what, f"an adapter without weights is refused with an unknown reason: {error}", State.warning
            )
    return Finding(what, f"{client.url} loads adapters of rank {rank} at run time, and sees {place}", State.works)


def _log_probs(client: Client, model: str, start: str) -> Finding:
    """Whether the server returns token ids, and log-probabilities after the temperature."""
    what, spreads, choice = "vLLM log-probabilities", list[float](), dict[str, Any]()
    asked = {"model": model, "prompt": [1], "max_tokens": 1, "logprobs": 5, "return_token_ids": True}
    try:
        for temperature in (1.0, 2.0):
            answer = client.call("/v1/completions", {**asked, **WHOLE_DISTRIBUTION, "temperature": temperature})
            choice = answer["choices"][0]
            likeliest = choice["logprobs"]["top_logprobs"][0].values()
            spreads.append(max(likeliest) - min(likeliest))
    except (ServerError, LookupError, TypeError, ValueError, AttributeError) as error:
        return Finding(what, f"{client.url} gives no answer with log-probabilities ({error})", State.broken, start)
    if not choice.get("token_ids"):
        remedy = f"use a newer version of vLLM: {VERSIONS['2.13']}"
        return Finding(what, f"{client.url} returns no token ids", State.broken, remedy)
    if spreads[1] > 0.75 * spreads[0]:  # half, after the temperature
        return Finding(what, f"{client.url} returns them before the temperature", State.broken, start)
    return Finding(what, f"{client.url} returns them after the temperature, with token ids", State.works)
