"""vLLM: an adapter beside its base, if vLLM computes the adapter as training did; otherwise the merged model.

fxtune/export/vllm.py has vLLM's rules. An adapter stays in its folder, and the command names this folder.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from fxtune.errors import ConfigError
from fxtune.export.vllm import max_rank, refusals_of, rope_overrides, rope_types
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.load import DType, rows_of_base
from fxtune.models.proof import PROOF, proof_digest
from fxtune.outputs.merge import require_writable
from fxtune.outputs.targets.served import SECONDS, TOP, Answer, Server, Unproven, number, started
from fxtune.outputs.targets.target import Exported, Target, staged
from fxtune.system.files.atomic_files import read_json
from fxtune.training.rollouts.client import Client, ServerError


class VllmTarget(Target):
    name: ClassVar[str] = "vllm"
    reads: ClassVar[set[str]] = {"merged", "url", "venv"}

    def check(self) -> None:
        if self.source.adapter is None and (self.options.merged or self.folder):
            raise ConfigError(
                f"{self.source.name} is a whole model, which vLLM serves where it is: nothing is merged or written. "
                "Give --to vllm alone."
            )
        adapter = self.source.adapter
        self.copied = bool(self.folder and adapter and self.source.digest == proof_digest(self.folder) is not None)
        if self.folder is not None and not self.copied and not self.source.has_made(self.folder / PROOF):
            require_writable(self.folder, "export")

    def write(self) -> Exported:
        source, adapter = self.source, self.source.adapter
        if adapter is not None and not self.options.merged:
            place = adapter.origin.folder
            refused = refusals_of(place)
            if rows_of_base(source.model) < source.hf_config.get_text_config().vocab_size:
                refused.append("no rows for tokens that its base lacks")
            if not refused:
                if self.folder and not self.copied:
                    with staged(self.folder) as staging:
                        shutil.copytree(place, staging, dirs_exist_ok=True)
                place = self.folder or place
                return Exported(place, "adapter", self._adapter_command(place), {"adapter": place})
            self.notes.append(f"vLLM serves {'; '.join(refused)}: it gets the merged model.")
        model = source.whole(self.folder).resolve()
        return Exported(model, "merged model", self._command(str(model)), {"merged model": model})

    def _command(self, model: str, *words: str) -> str:
        source = self.source
        words = (model, "--max-model-len", str(source.length), *(words or ("--served-model-name", source.title)))
        if source.dtype is DType.float32:
            words += ("--dtype", "float32")  # vLLM would take 16 bits
        if variables := source.data.chat_template_kwargs:
            words += ("--default-chat-template-kwargs", json.dumps(variables))
        return f"vllm serve {shlex.join(words)}"

    def _adapter_command(self, folder: Path) -> str:
        source, options = self.source, read_json(folder / "adapter_config.json")
        words = ["--enable-lora", "--max-lora-rank", str(max_rank(options["r"]))]
        words += ["--lora-modules", f"{source.title}={folder.resolve()}", "--tokenizer", str(folder.resolve())]
        if (folder / GENERATION_CONFIG).exists():
            words += ["--generation-config", str(folder.resolve())]
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        if rope_types(config):
            positions = (config.get("text_config") or config)["max_position_embeddings"]
            words += ["--hf-overrides", rope_overrides(config, positions)]
        revision = options.get("revision")
        words += ["--revision", revision] if revision else []
        return self._command(str(options["base_model_name_or_path"]), *words)

    def serving(self, file: Path) -> AbstractContextManager[Server]:
        """The server at --url, or a new server from the virtual environment --venv."""
        url, venv, name = self.options.url, self.options.venv, self.source.title
        is_adapter = (file / "adapter_config.json").exists()
        if url:
            client = Client(url, SECONDS)
            try:
                served = [str(model["id"]) for model in client.served()]
            except ServerError as error:
                raise Unproven(f"vLLM is not reachable ({error})") from error
            if name not in served:
                raise Unproven(f"{url} serves {', '.join(served)}, and no {name}: start it by the command below")
            return nullcontext(VllmServer(client, name))
        if venv:
            program = Path(venv, "bin", "vllm").expanduser()
            if not program.is_file():
                raise Unproven(f"--venv {venv} has no bin/vllm ({venv}/bin/pip install vllm)")
            words = shlex.split(self._adapter_command(file) if is_adapter else self._command(str(file)))
            words = [str(program), *words[1:], "--enforce-eager"]  # compiling takes longer than a few answers
            return started("vLLM", words, partial(VllmServer, model=name))
        raise Unproven("vLLM is not reachable: name a running server (--url), or its environment (--venv)")


@dataclass(frozen=True)
class VllmServer(Server):
    client: Client
    model: str

    def write_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        asked = {"messages": messages, "add_generation_prompt": True}
        return list(self.client.call("/tokenize", {"model": self.model, **asked})["tokens"])

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        told: dict[str, Any] = {"logprobs": TOP, "return_token_ids": True, "return_tokens_as_token_ids": True}
        told |= {"temperature": 0, "repetition_penalty": 1.0}
        asked = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens}
        choice = self.client.call("/v1/completions", asked | told)["choices"][0]
        likely = choice["logprobs"]["top_logprobs"][0].items()
        first = {int(token.rpartition(":")[2]): number(value) for token, value in likely}
        return Answer(choice["token_ids"], choice["finish_reason"] == "stop", first)
