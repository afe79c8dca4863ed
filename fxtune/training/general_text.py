"""Measures what tuning forgets: how far a run moves its model on general text, outside its training rows.

Before and after training, a run computes the loss on the text. After training it also computes the KL divergence of
the trained model from its base: KL(base | tuned) of the next token, over the whole vocabulary, in chunks of rows
(kernels/divergence.py). The base is the model with its adapters switched off. Full fine-tuning and
adapters that begin with a part of the base's weights (techniques.lora.init) have no such base. For them the base's
LIKELIEST next tokens are stored before the first step. The divergence over these tokens, with all others as one
outcome, is a lower bound of the KL.

The passes only evaluate, without gradient, dropout or compiled graphs. They draw no random numbers and
change no weight, so a run with this measurement learns the same bits as a run without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from fxtune.data.batches.build import plan_evaluation
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig, MixConfig, OnLong
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.read.files import BUILTIN
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import ConfigError
from fxtune.models.reference import ReferenceModel
from fxtune.objectives.base import Objective
from fxtune.objectives.causal_lm import CausalLM
from fxtune.objectives.distillation import Distillation
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.teacher import BASE, StoredTeacher, Teacher
from fxtune.system.process.oom import RowsPerPass
from fxtune.training.builder import RunBuilder
from fxtune.training.data.stored_numbers import TeacherNumbers

ROW = 512
"""Tokens of the longest row of general text. Rows of a long context would be mostly padding."""
ROWS = 8
"""The largest number of rows in a pass."""
LIKELIEST = 64
FORGOTTEN = 0.1
"""Above this KL, in nats per token, the last lines of a run suggest changes. For comparison: 4 bits a weight (q4_K_M)
move Llama 3 8B by 0.031 (docs/forgetting.md)."""


@dataclass(frozen=True)
class _BaseNumbers(TeacherNumbers):
    """The likeliest tokens of the model before training."""

    kind: ClassVar[str] = "base"
    title: ClassVar[str] = "the base's likeliest tokens"
    key: ClassVar[str] = "data.general"


def general_plan(builder: RunBuilder, tokenizer: Any, images: ImageProcessor | None) -> Plan | None:
    """The plan of the passes over data.general. None if nothing is held out, or the model writes no text. Raises
    ConfigError for rows that are neither texts nor chats, and the errors of tokenize()."""
    config = builder.config
    data = _row_settings(config.data)
    if not (data.general and config.judges_text):
        return None
    shipped = (config.model.path or "").startswith(BUILTIN)
    paths = {BUILTIN + "general": BUILTIN + "tiny_general"} if shipped else {}
    sources = [replace(source, path=paths.get(source.path, source.path)) for source in data.general]
    read = partial(tokenize, data=data, tokenizer=tokenizer, progress=False, images=images)
    tables = builder.world.main_first(lambda: [*map(read, sources)], "waiting for rank 0 to tokenize")
    for table in tables:
        if table.format.is_group or table.format.answers:
            raise ConfigError(
                f"data.general: {table.name} has rows of format {table.format.name}, and the loss of a language model "
                "is measured on texts and chats. Name another file, or set the source's format or columns."
            )
    rows = min(config.train.micro_batch_size * config.data.sequence_length // data.sequence_length, ROWS)
    return plan_evaluation(tables, data, micro_batch_size=rows, pad_id=tokenizer.pad_token_id or 0)


def _row_settings(data: DataConfig) -> DataConfig:
    """`data` with short rows, each document once."""
    length = min(data.sequence_length, ROW)
    short = replace(data, sequence_length=length, length_schedule=[], buckets=[], mix=MixConfig())
    return replace(short, packing=data.packs, share_prompts=False, on_long=OnLong.split)


class GeneralText:
    """Measures a run's model on `plan`. Create it before a checkpoint is loaded, while the model has the weights from
    which the run starts."""

    def __init__(self, builder: RunBuilder, plan: Plan, model: LanguageModel, note: Callable[[str], None]) -> None:
        """`note` gets a line if memory forces fewer rows per pass. Checkpoints do not store this number."""
        self.builder, self.plan = builder, plan
        self.rows_per_pass = RowsPerPass(builder.world.device, note=note, drop=builder.techniques.compile.drop)
        self.model = made = copy.copy(model)  # the objective may have its own teacher and temperature
        made.temperature = 1.0
        lora, vocabulary = builder.techniques.lora, model.model.config.get_text_config().vocab_size
        if lora.enabled and not lora.factored:
            made.teacher = Teacher(made, ReferenceModel(model.prepared, keeps_start=False).active)
            return
        made.teacher, data = StoredTeacher(), _row_settings(builder.config.data)
        numbers = _BaseNumbers(min(LIKELIEST, vocabulary), 1.0, vocabulary)
        with torch.compiler.set_stance("force_eager"):
            builder.store(made, numbers, builder.techniques.options(), [plan], data=data)

    def loss(self) -> dict[str, float]:
        """The loss before training, by its name in the log."""
        return {"general/loss_before": self._figures(CausalLM())["eval/loss"]}

    def moved(self) -> dict[str, float]:
        """The loss and the KL from the base after training, by their names in the log."""
        figures = self._figures(Distillation(teacher=BASE, text_weight=1.0))  # its loss is the text's loss
        return {"general/loss": figures["eval/loss"], "general/kl": figures["eval/kl"]}

    def _figures(self, objective: Objective) -> dict[str, float]:
        held_out = self.builder.held_out(self.plan, self.model, objective, num_workers=0)  # few short rows
        with closing(held_out), torch.compiler.set_stance("force_eager"):
            return held_out.figures(self.rows_per_pass, self.plan.sizes.micro_batch_size)


def forgotten(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line on a run's figures on general text, with advice if the KL is above FORGOTTEN."""
    if (kl := figures.get("general/kl")) is None:
        return
    advice = (
        ". To move less: general rows among data.sources, a smaller optimizer.lr, or objective=distillation "
        "objective.teacher=base objective.text_weight=0.9 (docs/forgetting.md)"
    )
    losses = (figures.get(f"general/{name}") for name in ("loss_before", "loss"))
    shown = " -> ".join(f"{loss:.3f}" for loss in losses if loss is not None)
    yield (
        f"On general text, which it was not tuned on: loss {shown}, KL from the base {kl:.3f} nats a token"
        f"{advice * (kl > FORGOTTEN)}"
    )
