"""Finds and runs llama.cpp's tools: its converters, llama-quantize, llama-tokenize and llama-server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxtune.errors import ConfigError
from fxtune.outputs.targets.served import TOP, Answer, Unproven, number, started
from fxtune.system.process.process_group import run_process, start_process
from fxtune.training.rollouts.client import Client
from fxtune.upstream import llama_cpp as driver

VARIABLE = "LLAMA_CPP"
HOW = (
    "Unpack the source package of llama-cpp-python (pip download --no-deps --no-binary :all: llama-cpp-python) or "
    "clone https://github.com/ggml-org/llama.cpp, build it there (cmake -B build -DLLAMA_USE_PREBUILT_UI=OFF && cmake "
    "--build build -t llama-quantize llama-server llama-tokenize), and name the folder of convert_hf_to_gguf.py: "
    f"--llama-cpp FOLDER, or {VARIABLE}=FOLDER."
)
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2")
"""llama.cpp's pre-tokenizers to try for a tokenizer that its converter does not know."""
TEXT = (
    "Hello  World, it's 3 pm; we'll pay 1,234.50 € on 2026-01-31!\n\n\tdef f(x):\n        return x**2  # 99 %\n"
    "ÄÖÜ straße, 你好世界, Привет, नमस्ते 🚀🙂 can't I'VE 1234567 don’t...   \r\n {\"a\": [1, 2]} <b> __x__ ÷×"
)
"""A text whose tokens differ between pre-tokenizers."""


class UnknownTokenizer(Exception):
    """The converter does not know the tokenizer."""


@dataclass(frozen=True)
class LlamaCpp:
    folder: Path | None
    """The source folder, with `build/bin` in it; None: all tools are on PATH."""

    @staticmethod
    def find(folder: str | None) -> LlamaCpp:
        """Find the tools in `folder`, in VARIABLE's folder, or on PATH. Raises ConfigError without a converter."""
        named = folder or os.environ.get(VARIABLE)
        found = LlamaCpp(Path(named).expanduser() if named else None)
        found.require("convert_hf_to_gguf.py")
        return found

    def program(self, name: str) -> Path | None:
        places = [self.folder / name, self.folder / "build" / "bin" / name] if self.folder else []
        on_path = shutil.which(name)
        return next((place for place in places if place.is_file()), Path(on_path) if on_path else None)

    def require(self, name: str) -> Path:
        """The path of a tool. Raises ConfigError without it."""
        if (found := self.program(name)) is None:
            where = f"in {self.folder}, in its build/bin and on PATH" if self.folder else "on PATH"
            raise ConfigError(f"llama.cpp: there is no {name} (looked {where}). {HOW}")
        return found

    def convert(
        self, folder: Path, file: Path, kind: str, *words: str, pre: str = "", script: str = "convert_hf_to_gguf.py"
    ) -> None:
        """Convert the model or adapter in `folder` to a GGUF file of type `kind`. `pre`: the name of a pre-tokenizer
        that replaces the converter's own choice. Raises ConfigError, and UnknownTokenizer."""
        command = [sys.executable, str(driver.__file__), str(self.require(script)), pre, str(folder), *words]
        code, output, _ = run_process([*command, "--outfile", str(file), "--outtype", kind])
        if not code:
            return
        if "pre-tokenizer was not recognized" in output:
            raise UnknownTokenizer
        if unknown := re.search(r"Model (\S+) is not supported", output):
            raise ConfigError(
                f"llama.cpp's {script} does not know the architecture {unknown[1]}. Use a newer llama.cpp, or serve "
                "the model with vLLM: --to vllm."
            )
        if missing := re.search(r"No module named '(\w+)'", output):
            raise ConfigError(f"llama.cpp's {script} needs the package {missing[1]}. pip install 'fxtune[gguf]'.")
        raise ConfigError(f"llama.cpp's {script} failed: {_last(output)}. Try another version of llama.cpp: {HOW}")

    def quantize(self, file: Path, target: Path, kind: str) -> None:
        """Write the GGUF file `target` of type `kind`, such as q4_k_m. Raises ConfigError."""
        code, output, _ = run_process([str(self.require("llama-quantize")), str(file), str(target), kind.upper()])
        if code:
            raise ConfigError(f"--quantize {kind}: llama-quantize failed: {_last(output)}")

    def pre_tokenizer(self, vocabulary: Path, tokenizer: Any, texts: Iterable[str]) -> str:
        """The name of a pre-tokenizer that gives the ids of `tokenizer` on `texts`; empty if the converter knows the
        tokenizer. `vocabulary`: a folder with the model's config and tokenizer. Raises ConfigError if the converter
        refuses the model, or if no pre-tokenizer fits."""
        file, text = vocabulary / "vocabulary.gguf", "\n".join([TEXT, *texts])
        for pre in ("", *PRE_TOKENIZERS):
            try:
                self.convert(vocabulary, file, "f16", "--vocab-only", pre=pre)
            except UnknownTokenizer:
                self.require("llama-tokenize")
                continue
            if not pre or self._ids(file, text) == tokenizer(text, add_special_tokens=False)["input_ids"]:
                return pre
        raise ConfigError(
            "llama.cpp does not know this tokenizer, and with none of its pre-tokenizers that fxtune tries "
            f"({', '.join(PRE_TOKENIZERS)}) it divides a text into the tokens of training. Keep the tokenizer of a "
            "published base, or serve the model with vLLM: --to vllm."
        )

    def _ids(self, file: Path, text: str) -> list[int]:
        """The token ids of a text with the vocabulary of a GGUF file; empty if llama-tokenize fails."""
        given = file.with_suffix(".txt")
        given.write_text(text, encoding="utf-8", newline="")
        words = ["-m", str(file), "-f", str(given), "--ids", "--no-bos", "--no-escape"]
        tool = str(self.require("llama-tokenize"))
        process = start_process([tool, *words], foreign=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        output = process.communicate()[0].decode(errors="replace").strip()
        return list(json.loads(output)) if re.fullmatch(r"\[[\d, ]*\]", output) else []

    def serving(self, words: list[str]) -> AbstractContextManager[LlamaServer]:
        """A context manager that runs llama-server with these arguments. Raises Unproven without llama-server. The
        context raises HardwareError if llama-server does not start."""
        if (tool := self.program("llama-server")) is None:
            raise Unproven(f"there is no llama-server. {HOW}")
        return started("llama-server", [str(tool), *words, "-np", "1"], LlamaServer)


def _last(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


@dataclass(frozen=True)
class LlamaServer:
    """See Server (served.py)."""

    client: Client

    def write_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        text = self.client.call("/apply-template", {"messages": messages})["prompt"]
        return list(self.client.call("/tokenize", {"content": text, "add_special": True})["tokens"])

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        found = self._complete(prompt, n_predict=max_tokens, n_probs=TOP)
        likely = found["completion_probabilities"][0]["top_logprobs"]
        first = {int(token["id"]): number(token["logprob"]) for token in likely}
        return Answer(found["tokens"], found["stop_type"] == "eos", first)

    def rate(self, prompt: list[int], token: int) -> float | None:
        # The bias makes the server choose the token. The reported log-probability does not include the bias.
        found = self._complete(prompt, n_predict=1, n_probs=1, logit_bias=[[token, 1e4]], cache_prompt=True)
        return number(found["completion_probabilities"][0]["logprob"])

    def _complete(self, prompt: list[int], **options: Any) -> Any:
        plain = {"temperature": 0, "repeat_penalty": 1.0, "return_tokens": True, "cache_prompt": False}
        return self.client.call("/completion", {"prompt": prompt, **plain, **options})
