"""GGUF files for llama.cpp: the merged model, or an adapter beside its base, and quantised copies.

llama.cpp converts and quantises. What fxtune adds: the checks before weights are written, the tokens of an unknown
tokenizer compared with training, and the adapters that llama.cpp would scale wrongly. It scales an adapter by
alpha / rank alone (src/llama-adapter.h), which is wrong for rsLoRA and for patterns of ranks and alphas.
"""

from __future__ import annotations

import shlex
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

from fxtune.errors import ConfigError, StorageError
from fxtune.export.vllm import REFUSED
from fxtune.models.kinds.known import kind_of
from fxtune.outputs.merge import require_space, require_writable
from fxtune.outputs.targets.llama_cpp import LlamaCpp
from fxtune.outputs.targets.served import Server
from fxtune.outputs.targets.source import Source
from fxtune.outputs.targets.target import Exported, ExportOptions, Target
from fxtune.system.terminal.progress import phase

CONVERTED = ("f32", "f16", "bf16")
"""Types that the converter itself writes. llama-quantize makes others from the file in f16."""


class GgufTarget(Target):
    name: ClassVar[str] = "gguf"
    reads: ClassVar[set[str]] = {"quantize", "unmerged", "llama_cpp"}

    def __init__(self, source: Source, options: ExportOptions) -> None:
        super().__init__(source, options)
        self.types = list(dict.fromkeys(options.quantize)) or ["f16"]
        self.pre = ""
        """A pre-tokenizer of llama.cpp with the tokens of training; empty if its converter knows the tokenizer."""
        self.notes: list[str] = []

    def check(self, folder: Path | None) -> None:
        source = self.source
        source.require_writes(self.name)
        self.tools = LlamaCpp.find(self.options.llama_cpp)
        if set(self.types) - {*CONVERTED}:
            self.tools.require("llama-quantize")
        self.folder = folder or source.default_folder(self.name)
        place = require_writable(self.folder, "export")
        # At once there are at most the merged model, its copy in 16 bits, and quantised copies.
        weights = sum(file.stat().st_size for file in source.origin.folder.glob("*.safetensors"))
        require_space(weights * (2 + len({*self.types} - {"f16"})), self.folder, place, "copies of the model")
        with tempfile.TemporaryDirectory(prefix="fxtune-") as scratch, phase("Asking llama.cpp about the model"):
            vocabulary = source.write_vocabulary(Path(scratch) / "vocabulary")
            texts = [source.tokenizer.decode(asked.prompt) + asked.answer for asked in source.questions]
            self.pre = self.tools.pre_tokenizer(vocabulary, source.tokenizer, texts)

    def write(self, folder: Path | None) -> Exported:
        staging = self.folder.with_name(f".{self.folder.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            with tempfile.TemporaryDirectory(prefix=".fxtune-", dir=staging) as scratch:
                names = self._write_files(staging, Path(scratch))
            self._write_more(staging, names)
            staging.rename(self.folder)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {error}. Free space there.") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        files = {kind: self.folder / name for kind, name in names.items()}
        return Exported(self.folder, f"{self.name} export", self.command(files), files, self.notes)

    def _write_files(self, staging: Path, scratch: Path) -> dict[str, str]:
        """Write the GGUF files. Returns {type: name of the file}."""
        unmerged = self.options.unmerged and self._takes_adapter()
        if unmerged:
            assert self.source.adapter is not None
            model = self.source.adapter.base.folder
        else:
            model = self.source.whole(scratch / "model")
        title = "base" if unmerged else self.source.title
        quantised = [kind for kind in self.types if kind not in CONVERTED]
        names = {kind: f"{title}-{kind}.gguf" for kind in self.types}
        with phase("Converting to GGUF"):
            plain = {kind: name for kind, name in names.items() if kind in CONVERTED}
            if quantised:
                plain.setdefault("f16", f"{title}-f16.gguf")
            for kind, name in plain.items():
                self.tools.convert(model, staging / name, kind, pre=self.pre)
            if kind_of(self.source.hf_config).images:
                self.tools.convert(model, staging / "mmproj-f16.gguf", "f16", "--mmproj")
            if unmerged and self.source.adapter:
                self.tools.convert_adapter(self.source.adapter.origin.folder, model, staging / "adapter-f16.gguf")
        for kind in quantised:
            with phase(f"Quantising to {kind}"):
                self.tools.quantize(staging / plain["f16"], staging / names[kind], kind)
        return plain | names

    def _takes_adapter(self) -> bool:
        """Whether llama.cpp computes the adapter as it was trained. A note says why not."""
        if self.source.adapter is None:
            raise ConfigError(f"--unmerged: {self.source.name} is no adapter. Leave --unmerged out.")
        lora = self.source.adapter.lora
        wrong = [what.partition(":")[0] for option, what in REFUSED.items() if getattr(lora, option, None)]
        wrong += ["the scale of rsLoRA"] * bool(lora.use_rslora)
        names = {str(name).rpartition(".")[2] for name in lora.target_modules or ()}
        wrong += ["adapters of embeddings and heads"] * bool(names & {"embed_tokens", "lm_head"})
        if lora.init_lora_weights in ("pissa", "olora"):
            wrong.append(f"a base without the first factors of {lora.init_lora_weights}")
        if wrong:
            self.notes.append(f"llama.cpp does not compute {'; '.join(wrong)}: the adapter is merged.")
        return not wrong

    def _write_more(self, folder: Path, names: dict[str, str]) -> None:
        """Write other files of the target. `names`: of the GGUF files, by type."""

    def command(self, files: dict[str, Path]) -> str:
        return f"llama-server {shlex.join(self._words(files[self.types[0]]))}"

    def _words(self, file: Path) -> list[str]:
        """The arguments of llama-server for a GGUF file."""
        words = ["-m", str(file), "-c", str(self.source.length), "--jinja"]
        for option, name in (("--lora", "adapter-f16.gguf"), ("--mmproj", "mmproj-f16.gguf")):
            words += [option, str(file.with_name(name))] if file.with_name(name).exists() else []
        return words

    def serving(self, file: Path) -> AbstractContextManager[Server]:
        return self.tools.serving(self._words(file))
