"""A model that gives numbers to a text or to two, as `fxtune chat` asks it: the shares of classes, or a score."""

from __future__ import annotations

import json
from itertools import cycle
from typing import Any

import torch

from fxtune.data.chat.encode import EncodedGroup, Encoder
from fxtune.data.chat.template_source import write_pair
from fxtune.data.formats.registry import FORMATS
from fxtune.data.formats.values import unicode_fault
from fxtune.errors import ConfigError, DataError
from fxtune.models.dims import position_limit
from fxtune.models.kinds.scorer import RELEVANCE_LABEL, SCORE_LABEL, Scorer
from fxtune.objectives.classification import ALL_ABOVE
from fxtune.objectives.registry import OBJECTIVES
from fxtune.outputs.conversation import load_tuned
from fxtune.outputs.run_output import RunOutput
from fxtune.system.terminal.console import plain, say
from fxtune.training.run.about import CHATS, PAIRS, TEXTS

PARTS = {"reward": ("a prompt", "an answer"), "ranking": ("a query", "a candidate")}
"""The two texts that the models of an objective read."""
SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def scores_texts(output: RunOutput) -> bool:
    """Whether the model of a run's output gives numbers to texts."""
    name = str((output.config.get("objective") or {}).get("name"))
    if name in OBJECTIVES:
        objective: Any = OBJECTIVES[name]
        return bool(objective.needs.head == Scorer.head)
    try:
        architectures = json.loads((output.folder / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError):
        return False
    return not set(architectures).isdisjoint(Scorer().classes.values())


class TextClassifier:
    """The model of a run's output. Raises the errors of loading it."""

    def __init__(self, output: RunOutput, trust_remote_code: bool = False) -> None:
        model, self.tokenizer, *_ = load_tuned(output, trust_remote_code=trust_remote_code)
        self.model, config = model.eval(), model.config
        self.data, self.are_texts, pairs = output.config.get("data") or {}, output.about(TEXTS), output.about(PAIRS)
        if output.run is None and {*config.id2label.values()} & {SCORE_LABEL, RELEVANCE_LABEL}:
            raise ConfigError(
                f"{output.folder} lies in no run, and its run says how it reads two texts: name the run or RUN/merged."
            )
        self.objective = (output.config.get("objective") or {}).get("name", "")
        self.are_chats = bool(output.about(CHATS))
        if output.run is None and self.tokenizer.chat_template:
            say(plain(f"{output.folder} lies in no run, so a line is a text. For a model of chats name its run."))
        texts = ("the user's turn", "the assistant's turn") if self.are_chats else ("a text", "another text")
        self.parts = PARTS.get(self.objective) or texts[: 2 if pairs or self.are_chats else 1]
        """What the texts of a line are, with a tab between them. A classifier of chats reads any number of turns."""
        self.chosen: dict[str, float] = getattr(config, "thresholds", None) or {}
        """The thresholds that an evaluation has chosen."""
        several = config.id2label.values() if config.problem_type == MULTI else ()
        self.thresholds = dict.fromkeys(several, ALL_ABOVE) | self.chosen
        """The share from which on a text has a class. Empty if a text has one class, or a score."""

    @torch.inference_mode()
    def read(self, line: str) -> dict[str, float]:
        """The share of each class, the largest first; or the score of a line under the name of its label. Raises
        DataError if the line has other texts or more tokens than the model reads, or bytes that are not UTF-8."""
        if fault := unicode_fault(line):
            raise DataError(fault)
        texts = line.split("\t") if len(self.parts) > 1 or self.are_chats else [line]
        if not all(map(str.strip, texts)) or (len(texts) != len(self.parts) and not self.are_chats):
            raise DataError(f"a line for this model is {', a tab and '.join(self.parts)}")
        read, config = self._ids(*texts), self.model.config
        limit = position_limit(config.get_text_config().to_dict())
        if limit and len(read) > limit:
            raise DataError(f"the line has {len(read):,} tokens, and the model reads {limit:,}: shorten it")
        ids = torch.tensor([read], device=next(self.model.parameters()).device)
        numbers = self.model(input_ids=ids).logits[0].float()
        if config.problem_type == SINGLE:
            numbers = numbers.softmax(-1)
        elif self.thresholds:
            numbers = numbers.sigmoid()
        named = zip(config.id2label.values(), numbers.tolist(), strict=True)
        return dict(sorted(named, key=lambda pair: -pair[1]))

    def _ids(self, *texts: str) -> list[int]:
        """The tokens of these texts: of a classifier of texts as its tokenizer writes a text or two, else as training
        does."""
        template, system, variables = map(self.data.get, ("chat_template", "system", "chat_template_kwargs"))
        if self.objective == "ranking" and self.tokenizer.chat_template:
            text, *_ = write_pair(self.tokenizer, system, *texts)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self.objective != "reward" and not self.are_chats:
            return list(self.tokenizer(*texts)["input_ids"])
        row: dict[str, Any] = {"text": "".join(texts)}
        if self.are_chats or (not self.are_texts and (template or self.tokenizer.chat_template)):
            turns = zip(cycle(("user", "assistant")), texts, strict=False)
            row = {"messages": [{"role": role, "content": text} for role, text in turns]}
        if self.are_chats:
            row["label"] = 0
        format = FORMATS["labelled" if self.are_chats else next(iter(row))]
        (found,) = Encoder(self.tokenizer, format, template, system, variables=variables).encode([row])
        if isinstance(found, str):
            raise DataError(f"the line cannot be written as in training: {found}")
        return (found.documents[0] if isinstance(found, EncodedGroup) else found).ids
