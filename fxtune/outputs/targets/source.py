"""The trained adapter or model that a target exports, before its weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fxtune.checkpoint.folder import step_of
from fxtune.config import compose
from fxtune.config.root import Config
from fxtune.errors import ConfigError
from fxtune.export.tokenizer import write_tokenizer
from fxtune.models import load as models
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import DType, ModelConfig
from fxtune.outputs.adapter import OpenedAdapter, open_adapter, stored_dtype
from fxtune.outputs.merge import find, merge
from fxtune.outputs.run_output import OutputKind
from fxtune.system.files.atomic_files import read_json
from fxtune.system.files.hub import Origin, locate

CONTEXT = 8192
"""The least context length that a server gets, if the model has it."""
TAKEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling options of a generation config that servers take."""


@dataclass
class Source:
    name: str
    """A run, a checkpoint, a folder, or the hub id of an adapter."""
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        self.output = find(self.name)
        """None: an adapter of the hub."""

    @property
    def run(self) -> Path | None:
        return self.output.run if self.output else None

    @property
    def is_checkpoint(self) -> bool:
        return self.output is not None and self.output.kind is OutputKind.checkpoint

    @cached_property
    def config(self) -> Config | None:
        """The config of the run; None without a run."""
        return compose.of_run(self.run, self.trust_remote_code) if self.run else None

    @cached_property
    def adapter(self) -> OpenedAdapter | None:
        """The adapter with checked files; None for a checkpoint or a whole model."""
        if self.output and self.output.kind is not OutputKind.adapter:
            return None
        name = str(self.output.folder) if self.output else self.name
        return open_adapter(name, "exported", self.trust_remote_code)

    @property
    def adapts(self) -> bool:
        """Whether the weights are an adapter's."""
        if self.is_checkpoint:
            assert self.config is not None
            return self.config.techniques.lora.enabled
        return self.adapter is not None

    @cached_property
    def model(self) -> ModelConfig:
        """Where the config and the tokenizer of the model are."""
        if self.adapter:
            return self.adapter.model
        if self.is_checkpoint:
            assert self.config is not None
            return self.config.model
        assert self.output is not None
        return ModelConfig(path=str(self.output.folder), trust_remote_code=self.trust_remote_code)

    @cached_property
    def origin(self) -> Origin:
        """Where the files of the base are, or of the whole model."""
        return locate(str(self.model.path), self.model.revision, code=self.model.trust_remote_code)

    @cached_property
    def hf_config(self) -> Any:
        """The Hugging Face config, with the changes of training."""
        if self.adapter:
            return self.adapter.hf_config
        found = models.load_config(self.model)
        if self.is_checkpoint:
            assert self.config is not None
            self.config.techniques.rope.configure(found)
        return found

    @cached_property
    def tokenizer(self) -> Any:
        if self.adapter:
            return self.adapter.tokenizer
        tokenizer = models.load_tokenizer(self.model, self.hf_config)
        if self.is_checkpoint:
            assert self.config is not None
            self.config.objective.set_template(tokenizer, self.config.data)
        return tokenizer

    @property
    def dtype(self) -> DType:
        """The dtype of the stored weights."""
        return stored_dtype(self.hf_config, str(self.model.path))

    @property
    def title(self) -> str:
        """A name for the model in a server: of its run, or of its folder."""
        if self.run is None:
            return Path(self.name).name
        folder = self.run.resolve().name
        return f"{folder}-step-{step_of(self.output.folder)}" if self.is_checkpoint and self.output else folder

    @property
    def length(self) -> int:
        """The context length for a server: of training, and at least CONTEXT, within the model's positions."""
        longest = getattr(self.hf_config.get_text_config(), "max_position_embeddings", None) or CONTEXT
        trained = self.config.data.sequence_length if self.config else 0
        return int(min(longest, max(trained, CONTEXT)))

    @property
    def system(self) -> str | None:
        """The system turn that training gave each chat without one."""
        return self.config.data.system if self.config else None

    @property
    def template_variables(self) -> dict[str, Any]:
        return dict(self.config.data.chat_template_kwargs or {}) if self.config else {}

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The generation config of the model, with the end tokens of training. Raises StorageError."""
        places = [*([self.adapter.origin.folder] if self.adapter else []), self.origin.folder]
        found: dict[str, Any] = {}
        for place in reversed(places):
            found |= read_json(place / GENERATION_CONFIG) if (place / GENERATION_CONFIG).exists() else {}
        return found

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that the author of the base has set; empty if answers are the likeliest tokens."""
        if not self.generation.get("do_sample"):
            return {}
        return {name: value for name in TAKEN if (value := self.generation.get(name)) is not None}

    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        ends = self.generation.get("eos_token_id")
        found = [*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id]
        return list(dict.fromkeys(int(end) for end in found if end is not None))

    def require_writes(self, target: str) -> None:
        """Raise ConfigError for a model that scores documents or gives vectors: `target` would serve no answers."""
        head = self.config.objective.needs.head if self.config else kind_of(self.hf_config).head
        if not kind_of(self.hf_config).writes or head != "lm":
            raise ConfigError(f"{self.name} writes no answers, and --to {target} serves answers. Use fxtune merge.")

    def write_vocabulary(self, folder: Path) -> Path:
        """Write the config and the tokenizer alone into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        self.hf_config.save_pretrained(folder)
        write_tokenizer(self.tokenizer, folder)
        return folder

    def default_folder(self, what: str) -> Path:
        """The folder `what` of the run, or of the checkpoint. Raises ConfigError without a run."""
        if self.output is None or self.run is None:
            raise ConfigError(f"Where shall the files go? Name a new folder behind {self.name}.")
        return self.run / (f"{what}-step-{step_of(self.output.folder)}" if self.is_checkpoint else what)

    def whole(self, folder: Path | None) -> Path:
        """The folder of the whole model: where it is already, or `folder`, into which the adapter is merged."""
        if self.output and self.output.kind is OutputKind.model:
            return self.output.folder
        return merge(self.name, folder, trust_remote_code=self.trust_remote_code)

    def bytes(self) -> int:
        """The bytes of the whole model, from the files of its base."""
        return sum(file.stat().st_size for file in self.origin.folder.glob("*.safetensors"))
