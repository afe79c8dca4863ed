"""A model that gives numbers to texts, as `fxtune chat` asks it: the shares of a text's classes, or a score."""

from __future__ import annotations

import json
from typing import Any

import torch

from fxtune.models.kinds.scorer import Scorer
from fxtune.objectives.classification import ALL_ABOVE
from fxtune.objectives.registry import OBJECTIVES
from fxtune.outputs.conversation import load_tuned
from fxtune.outputs.run_output import RunOutput

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
        self.chosen: dict[str, float] = getattr(config, "thresholds", None) or {}
        """The thresholds that an evaluation has chosen."""
        several = config.id2label.values() if config.problem_type == MULTI else ()
        self.thresholds = dict.fromkeys(several, ALL_ABOVE) | self.chosen
        """The share from which on a text has a class. Empty if a text has one class, or a score."""

    @torch.inference_mode()
    def read(self, text: str) -> dict[str, float]:
        """The share of each class, the largest first; or the score of a text under the name of its label."""
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"].to(next(self.model.parameters()).device)
        numbers, config = self.model(input_ids=ids).logits[0].float(), self.model.config
        if config.problem_type == SINGLE:
            numbers = numbers.softmax(-1)
        elif self.thresholds:
            numbers = numbers.sigmoid()
        named = zip(config.id2label.values(), numbers.tolist(), strict=True)
        return dict(sorted(named, key=lambda pair: -pair[1]))
