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
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from fxtune.checkpoint.run_folder import RUNS
from fxtune.config.root import Config
from fxtune.diagnostics.system_report import Finding, State
from fxtune.errors import StorageError, writing
from fxtune.training.rollouts.client import Client, ServerError, clients_of
from fxtune.training.rollouts.vllm import ALLOW, WHOLE_DISTRIBUTION, how_to_start

TIMEOUT = 30.0
"""Seconds that a server has to answer."""
VERSIONS = {"2.11": ">=0.24,<0.27", "2.13": ">=0.27.1,<0.33", "2.14": ">=0.33,<0.34"}
"""{torch: the versions of vLLM that require this torch}."""
PROBE = "fxtune-doctor"
"""The name of the adapter without weights."""


def findings(config: Config) -> Iterator[Finding]:
    """Yield what was found about the recipe's sampler. Nothing for a recipe that samples no answers."""
    if not config.objective.needs.rollouts:
        return
    if not config.sampler.is_vllm:
        yield Finding("sampler", "the trained model writes the answers")
        return
    if not config.sampler.url:
        yield _environment(config.sampler.venv or "null")
    for client in clients_of(config.sampler.url or "", TIMEOUT):
        yield from _server(client, config)


def _environment(venv: str) -> Finding:
    places = [str(path) for path in Path(venv).expanduser().glob("lib/python3*/site-packages")]
    found = {package.name: package.version for package in metadata.distributions(path=places)}
    if "vllm" in found:
        return Finding("vLLM", f"{found['vllm']} with torch {found.get('torch')}, in {venv}", State.works)
    torch = ".".join(metadata.version("torch").split(".")[:2])
    torch = torch if torch in VERSIONS else list(VERSIONS)[-1]
    remedy = (
        f"python -m venv vllm; vllm/bin/pip install 'vllm{VERSIONS[torch]}'; then set sampler.venv=vllm  (these "
        f"versions bring torch {torch}; a server that runs already: sampler.url=http://HOST:8000)"
    )
    return Finding("vLLM", f"sampler.venv={venv}: there is no vLLM", State.broken, remedy)


def _server(client: Client, config: Config) -> Iterator[Finding]:
    start = how_to_start(config)
    try:
        version, model = client.call("/version")["version"], client.call("/v1/models")["data"][0]
        name, longest = model["id"], model.get("max_model_len") or 0
    except (ServerError, LookupError, TypeError, AttributeError) as error:
        yield Finding("vLLM", f"{client.url} is no vLLM server ({error})", State.broken, start)
        return
    needed, own = config.data.sequence_length, config.model.path or ""
    seen = f"{client.url}: version {version} serves {name}, up to {longest:,} tokens"
    served = {path.rstrip("/").rpartition("/")[2].lower() for path in (name, model.get("root") or name)}
    if 0 < longest < needed:
        remedy = f"start it with --max-model-len {needed}"
        yield Finding("vLLM", f"{seen}, and data.sequence_length={needed:,}", State.broken, remedy)
    elif own.replace(":", "/").rpartition("/")[2].lower() not in served:
        remedy = "see that both are the same model: answers of another model end the run"
        yield Finding("vLLM", f"{seen}, and model.path={own}", State.warning, remedy)
    else:
        yield Finding("vLLM", seen, State.works)
    if (lora := config.techniques.lora).enabled:
        good = f"it loads adapters of rank {lora.r} at run time"
        yield _checked("vLLM adapters", client.url, good, _adapter_problem(client, config), start)
    good, problem = "they are taken after the temperature", _log_prob_problem(client, name)
    yield _checked("vLLM log-probabilities", client.url, good, problem, start)


def _checked(what: str, url: str, good: str, problem: str, start: str) -> Finding:
    state, remedy = (State.broken, start) if problem else (State.works, "")
    return Finding(what, f"{url}: {problem or good}", state, remedy)


def _adapter_problem(client: Client, config: Config) -> str:
    """Why the server cannot load an adapter of the recipe's rank at run time; empty if it can."""
    rank = config.techniques.lora.r
    try:
        with beside_run(config) as folder:
            options = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": []}
            (folder / "adapter_config.json").write_text(json.dumps(options), encoding="utf-8")
            client.call("/v1/load_lora_adapter", {"lora_name": PROBE, "lora_path": str(folder)})
            client.call("/v1/unload_lora_adapter", {"lora_name": PROBE})
    except StorageError as error:
        return str(error)
    except ServerError as error:
        reason = f"{ALLOW}=1 was not set" if "Not Found" in error.reason else error.reason
        return "" if "contain tensors" in reason else f"it refuses an adapter of rank {rank}: {reason}"
    return ""


def _log_prob_problem(client: Client, model: str) -> str:
    """What is wrong with the log-probabilities of an answer; empty if nothing is."""
    asked = {"model": model, "prompt": [1], "max_tokens": 1, "logprobs": 5, "return_token_ids": True}
    spreads = list[float]()
    try:
        for temperature in (1.0, 2.0):
            answer = client.call("/v1/completions", {**asked, **WHOLE_DISTRIBUTION, "temperature": temperature})
            likeliest = answer["choices"][0]["logprobs"]["top_logprobs"][0].values()
            spreads.append(max(likeliest) - min(likeliest))
            if not answer["choices"][0].get("token_ids"):
                return f"an answer has no token ids: this needs vLLM{VERSIONS['2.11'].partition(',')[0]}"
    except (ServerError, LookupError, TypeError, ValueError, AttributeError) as error:
        return f"an answer has none ({error})"
    # After the temperature the second spread is half of the first.
    return "they are taken before the temperature" if spreads[1] > 0.75 * spreads[0] else ""


@contextmanager
def beside_run(config: Config) -> Iterator[Path]:
    """A temporary folder on the disk of the run's folder, for servers that see this disk. Raises StorageError."""
    run = Path(config.run.dir or RUNS).expanduser().absolute()
    place = next(path for path in (run, *run.parents) if path.is_dir())
    with writing(f"{place} cannot be written", "or set run.dir to another disk"):
        made = tempfile.TemporaryDirectory(prefix=".fxtune-", dir=place)
    with made as folder:
        os.chmod(folder, 0o755)  # the server may run as another user
        yield Path(folder)
