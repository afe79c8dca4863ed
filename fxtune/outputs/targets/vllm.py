"""vLLM: an adapter beside its base, where vLLM serves it as it was trained; otherwise the merged model.

fxtune/export/vllm.py has vLLM's rules. An adapter stays in its folder: the command names it.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import ClassVar

from fxtune.errors import ConfigError
from fxtune.export.vllm import max_rank, refusals_of, rope_overrides, rope_types
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.load import DType, rows_of_base
from fxtune.outputs.merge import merge, require_writable
from fxtune.outputs.targets.source import Source
from fxtune.outputs.targets.target import Exported, ExportOptions
from fxtune.system.files.atomic_files import read_json


class VllmTarget:
    reads: ClassVar[set[str]] = {"merged", "url", "venv"}

    def __init__(self, source: Source, options: ExportOptions) -> None:
        self.source, self.options = source, options

    def check(self, folder: Path | None) -> None:
        self.source.require_writes("vllm")
        if self.options.merged and not self.source.adapts:
            raise ConfigError(
                f"{self.source.name} is a whole model, so there is nothing to merge. Leave --merged out."
            )
        if folder is not None and not self.source.adapts and not self.source.is_checkpoint:
            raise ConfigError(
                f"{self.source.name} is a whole model, which vLLM serves where it is. Leave {folder} out."
            )
        if folder is not None:
            require_writable(folder, "export")

    def write(self, folder: Path | None) -> Exported:
        source, adapter, notes = self.source, self.source.adapter, list[str]()
        if source.adapts and not self.options.merged:
            if adapter is None:
                place = merge(source.name, folder, unmerged=True, trust_remote_code=source.trust_remote_code)
            else:
                place = adapter.origin.folder
            refused = refusals_of(place)
            if rows_of_base(source.model) < source.hf_config.get_text_config().vocab_size:
                refused.append("no rows for tokens that its base lacks")
            if not refused:
                if adapter is not None and folder is not None:
                    place = Path(shutil.copytree(place, folder))
                return Exported(place, "adapter", self._adapter_command(place), {"adapter": place}, notes)
            notes.append(f"vLLM serves {'; '.join(refused)}: it gets the merged model.")
        model = source.whole(folder)
        return Exported(model, "merged model", self._command(str(model)), {"merged model": model}, notes)

    def _command(self, model: str, *words: str) -> str:
        source = self.source
        words = (model, "--max-model-len", str(source.length), *words)
        if source.dtype is DType.float32:
            words += ("--dtype", "float32")  # vLLM would take 16 bits
        if source.template_variables:
            words += ("--default-chat-template-kwargs", json.dumps(source.template_variables))
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
