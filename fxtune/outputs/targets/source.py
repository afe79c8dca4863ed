"""The trained adapter or model that a target exports: its config and its tokenizer, without its weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fxtune.config import compose
from fxtune.data.config import DataConfig, OnBadRow, QuestionsConfig, SourceConfig
from fxtune.data.formats.registry import row_format
from fxtune.data.formats.row_format import Conversation, LearnConfig, Preference
from fxtune.data.read.sources import open_source
from fxtune.errors import ConfigError, UserError
from fxtune.models import load as models
from fxtune.models.end_tokens import GENERATION_CONFIG
from fxtune.models.kinds.known import kind_of
from fxtune.models.load import DType, ModelConfig
from fxtune.models.proof import MADE_FROM, PROOF, proof_digest
from fxtune.outputs.adapter import OpenedAdapter, open_adapter, stored_dtype
from fxtune.outputs.merge import find, merge
from fxtune.outputs.run_output import OutputKind
from fxtune.system.files.atomic_files import read_json
from fxtune.system.files.hub import locate
from fxtune.training.answers import Question, load_questions

CONTEXT = 8192
"""The smallest context length for a server, unless the model allows less."""
ROWS = 20
"""The number of rows to ask if a run has no questions."""


class Source:
    """`name`: a run, the folder of an adapter or a model, or the hub id of an adapter. Raises the errors of
    open_adapter(), load_config() and load_tokenizer()."""

    def __init__(self, name: str, trust_remote_code: bool = False) -> None:
        self.name, self.trust_remote_code = name, trust_remote_code
        self.output = find(name)
        self.run = self.output.run if self.output else None
        self.config = compose.of_run(self.run, trust_remote_code) if self.run else None
        self.data = self.config.data if self.config else DataConfig()
        place = str(self.output.folder) if self.output else name
        if self.output is None or self.output.kind is OutputKind.adapter:
            self.adapter: OpenedAdapter | None = open_adapter(place, "exported", trust_remote_code)
            self.model, self.hf_config = self.adapter.model, self.adapter.hf_config
            self.tokenizer = self.adapter.tokenizer
        else:
            self.adapter, self.model = None, ModelConfig(path=place, trust_remote_code=trust_remote_code)
            self.hf_config = models.load_config(self.model)
            self.tokenizer = models.load_tokenizer(self.model, self.hf_config)
        self.origin = locate(str(self.model.path), self.model.revision, code=self.model.trust_remote_code)
        """The place of the base's files, or of the whole model's files."""
        self.dtype = stored_dtype(self.hf_config, str(self.model.path))
        self.unasked = "there are no questions: it belongs to no run, or the model reads images"
        """Why `questions` is empty."""
        longest = getattr(self.hf_config.get_text_config(), "max_position_embeddings", None) or CONTEXT
        self.length = int(min(longest, max(self.data.sequence_length, CONTEXT)))
        """The context length for a server."""
        step = re.search(r"-step-\d+$", Path(place).name)
        self.step = step[0] if step else ""
        """-step-70 for the export of a checkpoint."""
        self.title = (self.run.resolve().name if self.run else Path(name).resolve().name) + self.step
        """A name for the model in a server."""

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The content of generation_config.json, with the end tokens of training. Raises StorageError."""
        places = [self.origin.folder, *([self.adapter.origin.folder] if self.adapter else [])]
        files = [place / GENERATION_CONFIG for place in places]
        return {name: value for file in files if file.exists() for name, value in read_json(file).items()}

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        ends = self.generation.get("eos_token_id")
        found = [*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id]
        return list(dict.fromkeys(int(end) for end in found if end is not None))

    @cached_property
    def questions(self) -> list[Question]:
        """The run's questions, or else the first ROWS rows of its held-out data, or else of its training data. Empty
        without a run, and for a model that reads images."""
        asked = self.data.questions
        return self._read(asked) if asked.path else self._rows([*self.data.eval_sources, *self.data.sources])

    @cached_property
    def rated(self) -> list[Question]:
        """The questions with the reference answers whose perplexity is measured: the first ROWS rows of
        data.eval_sources, or else `questions`."""
        return self._rows(self.data.eval_sources) or self.questions

    def _rows(self, sources: Sequence[SourceConfig]) -> list[Question]:
        if not sources:
            return []
        with suppress(UserError):  # _read() meets it again
            if not (form := open_source(sources[0]).format()).is_question:
                self.unasked = (
                    f"there are no questions: the rows of {sources[0].path} are {form.name}, without answers"
                )
                return []
        skips = self.data.on_bad_row is OnBadRow.quarantine
        return self._read(replace(self.data.questions, path=sources[0].path, limit=ROWS), skips)

    def _read(self, asked: QuestionsConfig, skips: bool = False) -> list[Question]:
        if kind_of(self.hf_config).images:
            return []
        try:
            found = load_questions(replace(self.data, questions=asked), self.tokenizer, skips=skips)
            if skips and not found:
                self.unasked = f"there are no questions: the first {asked.limit} rows are in quarantine"
            return found
        except UserError as error:  # data that moved, or rows of plain text
            self.unasked = f"there are no questions: {error}"
            return []

    def messages(self, question: Question) -> list[dict[str, Any]] | None:
        """The messages that ask a question, with the system turn of training; None if the row is not a plain chat."""
        row = question.row.value if question.row else None
        format = row_format(row) if row else None
        content = format.read(row, LearnConfig(), ()) if row and format else None
        content = content.answers[0] if isinstance(content, Preference) else content
        if not isinstance(content, Conversation) or content.tools or content.messages[-1]["role"] != "assistant":
            return None
        asked = [{name: turn[name] for name in ("role", "content")} for turn in content.messages[:-1]]
        system = self.data.system if all(turn["role"] not in ("system", "developer") for turn in asked) else None
        return [{"role": "system", "content": system}] * bool(system) + asked

    def require_writes(self, target: str) -> None:
        """Raise ConfigError for a model that scores documents or gives vectors: `target` serves answers."""
        head = self.config.objective.needs.head if self.config else "lm"
        if not kind_of(self.hf_config).writes or head != "lm":
            raise ConfigError(f"{self.name} writes no answers, and --to {target} serves answers. Use fxtune merge.")

    def whole(self, folder: Path | None) -> Path:
        """The folder of the whole model. An adapter is first merged into `folder` (None: a folder in the run), unless
        an earlier export has done so."""
        if self.output and self.output.kind is OutputKind.model:
            return self.output.folder
        place = folder or (self.output.folder.with_name(f"merged{self.step}") if self.output else None)
        if not (place and self.has_made(place / PROOF)):
            place = merge(self.name, place, trust_remote_code=self.trust_remote_code)
        self.dtype = DType(read_json(place / "config.json").get("dtype", self.dtype))
        return place

    @cached_property
    def digest(self) -> str | None:
        """The unique digest of the adapter or model; None without a proof.json."""
        return proof_digest(self.adapter.origin.folder if self.adapter else self.origin.folder)

    def has_made(self, record: Path) -> bool:
        """Whether `record`, a JSON file of an earlier export, has the digest of this adapter or model."""
        return record.is_file() and f'"{MADE_FROM}": "{self.digest}"' in record.read_text("utf-8", "replace")
