"""GGUF files for llama.cpp: the merged model, or an adapter beside its base, and quantised copies.

llama.cpp converts and quantises. fxtune checks the model before weights are written, and compares the tokens of an
unknown tokenizer with training. It merges adapters that llama.cpp would scale wrongly: llama.cpp scales an adapter by
alpha / rank alone (src/llama-adapter.h), which is wrong for rsLoRA and for patterns of alphas.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from fxtune.errors import ConfigError
from fxtune.export.tokenizer import TEMPLATE, write_tokenizer
from fxtune.export.vllm import refusals_of
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.kinds.known import kind_of
from fxtune.models.proof import MADE_FROM
from fxtune.models.untrusted import named_code
from fxtune.outputs.merge import require_space, require_writable
from fxtune.outputs.targets.llama_cpp import LlamaCpp
from fxtune.outputs.targets.served import Server
from fxtune.outputs.targets.target import Exported, Target, staged
from fxtune.system.terminal.progress import phase

CONVERTED = ("f32", "f16", "bf16")
"""Types that the converter itself writes. llama-quantize makes other types from the f16 file."""
ADAPTER, IMAGES = "adapter-f16.gguf", "mmproj-f16.gguf"
WEIGHTS = ("*.safetensors", "*.bin")
RECORD = "export.json"
"""This file has the digest of the exported adapter or model."""


class GgufTarget(Target):
    name: ClassVar[str] = "gguf"
    reads: ClassVar[set[str]] = {"quantize", "unmerged", "llama_cpp"}

    def check(self) -> None:
        source, self.types = self.source, list(dict.fromkeys(self.options.quantize)) or ["f16"]
        self.tools = LlamaCpp.find(self.options.llama_cpp)
        for file in ("config.json", "tokenizer_config.json"):
            if (code := named_code(source.origin.folder / file)) and not source.trust_remote_code:
                raise ConfigError(
                    f"{source.origin.folder / file} names Python code ({code}), which llama.cpp's converter may run. "
                    "If you trust it, add --trust-remote-code."
                )
        self.quantised = [kind for kind in self.types if kind not in CONVERTED]
        if self.quantised:
            self.tools.require("llama-quantize")
        if source.run is None and self.folder is None:
            raise ConfigError(f"Where shall the files go? Name a new folder behind {source.name}.")
        self.place = self.folder or Path(source.run or "", self.name + source.step)
        self.adapter = source.adapter if self.options.unmerged and self._takes_adapter() else None
        title = "base" if self.adapter else source.title
        self.converted = [kind for kind in self.types if kind in CONVERTED] or ["f16"]
        self.converted += ["f16"] * bool(self.quantised and "f16" not in self.converted)
        self.names = {kind: f"{title}-{kind}.gguf" for kind in [*self.converted, *self.quantised]}
        self.made = source.has_made(self.place / RECORD) and all(
            (self.place / name).exists() for name in [*self.names.values(), *[ADAPTER] * bool(self.adapter)]
        )
        if self.made:
            return
        disk = require_writable(self.place, "export")
        # The disk holds at most the merged model, its 16-bit copy and quantised copies at once.
        weights = max(sum(file.stat().st_size for file in source.origin.folder.glob(kind)) for kind in WEIGHTS)
        copies = 2 + len({*self.types} - {"f16"}) + ("f32" in self.types)
        require_space(weights * copies, self.place, disk, "copies of the model")
        with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch, phase("Asking llama.cpp about the model"):
            source.hf_config.save_pretrained(scratch)
            write_tokenizer(source.tokenizer, Path(scratch))
            texts = [source.tokenizer.decode(asked.prompt) + asked.answer for asked in source.questions]
            self.pre = self.tools.pre_tokenizer(Path(scratch), source.tokenizer, texts)

    def write(self) -> Exported:
        if not self.made:
            with staged(self.place) as staging:
                with tempfile.TemporaryDirectory(prefix=".fxtune-", dir=staging) as scratch:
                    self._write_files(staging, Path(scratch))
                (staging / RECORD).write_text(json.dumps({MADE_FROM: self.source.digest}), encoding="utf-8")
        files = {kind: self.place / name for kind, name in self.names.items()}
        return Exported(self.place, f"{self.name} export", self._command(files[self.types[0]]), files)

    def _write_files(self, staging: Path, scratch: Path) -> None:
        source, tools, adapter, names = self.source, self.tools, self.adapter, self.names
        model = source.origin.folder if adapter else source.whole(scratch / "model")
        with phase("Converting to GGUF"):
            for kind in self.converted:
                tools.convert(model, staging / names[kind], kind, pre=self.pre)
            if kind_of(source.hf_config).images:
                tools.convert(model, staging / IMAGES, "f16", "--mmproj")
            if adapter:
                base, script = ("--base", str(model)), "convert_lora_to_gguf.py"
                tools.convert(adapter.origin.folder, staging / ADAPTER, "f16", *base, script=script)
        for kind in self.quantised:
            with phase(f"Quantising to {kind}"):
                tools.quantize(staging / names["f16"], staging / names[kind], kind)

    def _takes_adapter(self) -> bool:
        """Whether llama.cpp computes the adapter as training did. A note says why not."""
        if self.source.adapter is None:
            raise ConfigError(f"--unmerged: {self.source.name} is no adapter. Leave --unmerged out.")
        folder = self.source.adapter.origin.folder
        # llama.cpp has no limit of ranks, and reads each module's rank from its tensors.
        wrong = refusals_of(folder, "merged models", r=1, rank_pattern={})
        wrong += ["no scale of rsLoRA"] * bool(self.source.adapter.lora.use_rslora)
        wrong += ["no change of the base's config"] * (folder / "config.json").exists()
        wrong += ["no end tokens but the base's"] * (folder / GENERATION_CONFIG).exists()
        ours, theirs = (place / TEMPLATE for place in (folder, self.source.origin.folder))
        if ours.exists() and (not theirs.exists() or ours.read_bytes() != theirs.read_bytes()):
            wrong.append("no chat template but the base's")
        if wrong:
            self.notes.append(f"llama.cpp takes an adapter with {'; '.join(wrong)}: this one is merged.")
        return not wrong

    def _command(self, file: Path) -> str:
        return f"llama-server {shlex.join(self._words(file))}"

    def _words(self, file: Path) -> list[str]:
        words = ["-m", str(file), "-c", str(self.source.length), "--jinja"]
        if variables := self.source.data.chat_template_kwargs:
            words += ["--chat-template-kwargs", json.dumps(variables)]
        for option, name in (("--lora", ADAPTER), ("--mmproj", IMAGES)):
            words += [option, str(file.with_name(name))] if file.with_name(name).exists() else []
        return words

    def serving(self, file: Path) -> AbstractContextManager[Server]:
        return self.tools.serving(self._words(file))
