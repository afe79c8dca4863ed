"""Classifiers: a model gives each document a number for each class, or one number that is learned itself.

    single_label  loss = cross-entropy of the document's class
    multi_label   loss = mean over the classes of binary cross-entropy: a document has several classes, or none
    regression    loss = (number - label)^2

These are the losses of transformers' AutoModelForSequenceClassification for its `problem_type`, with a mean over the
documents of a step. Class weights multiply a document's loss (single_label) or a class's part of it (multi_label). The
mean stays one over documents; torch would divide by the sum of the weights.
"""

from __future__ import annotations

import copy
import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import Plan
from fxtune.data.config import DataConfig
from fxtune.data.formats.labelled import NUMBER, classes_of
from fxtune.data.tokenized.table import TokenTable
from fxtune.errors import ConfigError
from fxtune.models.kinds.scorer import NUMBER_LABEL, RELEVANCE_LABEL, SCORE_LABEL
from fxtune.objectives.base import GroupLosses, GroupObjective, Objective
from fxtune.objectives.language_model import LanguageModel
from fxtune.objectives.needs import Needs
from fxtune.objectives.score_model import ScoreModel

MOST_SHOWN = 12
"""Messages and the confusion matrix show at most this many classes."""
BINS = 10
"""The number of bins of the expected calibration error."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number that regression can learn."""
ALL_ABOVE = 0.5
"""The threshold of a class until an evaluation has chosen one."""


class Problem(str, Enum):
    auto = "auto"
    single_label = "single_label"
    multi_label = "multi_label"
    regression = "regression"


@dataclass
class Classification(GroupObjective):
    needs: ClassVar[Needs] = Needs(labels=True, head="score", row_format="labelled")
    interface: ClassVar[type[LanguageModel]] = ScoreModel
    unit: ClassVar[str] = "mean loss of a document"
    metrics: ClassVar[Mapping[str, str]] = {
        "accuracy": "share of documents whose class, or whose every class, is right",
        "error": "regression: mean distance of number and label",
    }
    compared: ClassVar[tuple[str, ...]] = ("accuracy", "f1", "auc", "calibration_error", "error", "r2")
    problem: Problem = Problem.auto
    """`single_label`: a document has one class. `multi_label`: several or none. `regression`: the label is a number to
    learn. `auto`: multi_label if a row's label is a list, regression if a label is a number with a fraction, else
    single_label."""
    labels: list[str] = field(default_factory=list)
    """The names of the classes, in the order of the head's numbers. Empty: the classes of the rows, sorted."""
    class_weights: dict[str, float] = field(default_factory=dict, metadata={"min": 0})
    """The weight of a class; 1 for a class that is not named."""
    balanced: bool = False
    """Weigh classes by the inverse of their frequency in the rows, so that rare classes count as much as others."""
    label_smoothing: float = field(default=0.0, metadata={"min": 0, "below": 0.5})
    """The share of the target that is spread over all classes."""

    def __post_init__(self) -> None:
        self._names: list[str] = []
        """The names that labels of batches are indices of: classes, or lists of classes."""

    def accept(
        self, tables: Sequence[TokenTable], held_out: Sequence[TokenTable], data: DataConfig
    ) -> tuple[list[TokenTable], list[TokenTable]]:
        super().accept(tables, held_out, data)
        both, problem = [*tables, *held_out], self.problem
        if problem is Problem.auto:
            problem = _problem([name for table in tables for name in table.label_names])
        if problem is Problem.regression:
            return [*map(_with_numbers, tables)], [*map(_with_numbers, held_out)]
        if problem is Problem.single_label:
            for table in both:
                if several := next((name for name in table.label_names if name.startswith("[")), None):
                    raise ConfigError(
                        f"{table.name}: a row has the label {several}, and objective.problem=single_label learns one "
                        "class a row. Set objective.problem=multi_label."
                    )
        seen = {one for table in tables for name in table.label_names for one in classes_of(name)}
        classes = self.labels or _sorted(seen)
        for table in both:
            unknown = {one for name in table.label_names for one in classes_of(name)} - set(classes)
            if unknown:
                where, change = "the rows to train on have", "Add rows"
                if self.labels:
                    where = "objective.labels has"
                    change = "Add it there (a refresh keeps the classes of its run: train a new run on all rows)"
                raise ConfigError(
                    f"{table.name}: {where} no class {_list(_sorted(unknown))}. {change}, or correct the labels."
                )
        if twice := [one for one, count in Counter(classes).items() if count > 1]:
            raise ConfigError(f"objective.labels names {_list(twice)} more than once. Name each class once.")
        if tables and (unseen := [one for one in classes if one not in seen]):
            raise ConfigError(f"objective.labels: no row to train on has the class {_list(unseen)}. Remove it.")
        if len(classes) < (1 if problem is Problem.multi_label else 2):
            raise ConfigError(
                f"{', '.join(table.name for table in tables)}: all rows have the label {_list(classes)}, so there is "
                "nothing to tell apart. Add rows with another label."
            )
        if stray := [name for name in self.class_weights if name not in classes]:
            raise ConfigError(f"objective.class_weights: no class is {_list(stray)}. The classes: {_list(classes)}.")
        names = classes
        if problem is Problem.multi_label:
            names = sorted({name for table in both for name in table.label_names})
        self._names, index = names, {name: at for at, name in enumerate(names)}
        found = [_relabelled(table, [index[name] for name in table.label_names], names) for table in both]
        return found[: len(tables)], found[len(tables) :]

    def plan_notes(self, plan: Plan) -> Iterator[str]:
        for table in plan.tables:
            labels = np.asarray(table.labels, np.float32).view(np.uint32)
            pairs = np.unique(np.stack([table.digests, labels.astype(np.uint64)]), axis=1)
            if count := pairs.shape[1] - len(np.unique(pairs[0])):
                yield f"{table.name}: {count:,} texts have several rows with different labels. Keep one label of each."

        if lost := self._classes_without(plan):
            yield f"no row to train on has the class {_list(lost)}: all its rows are held out or not used."

    def held_out_notes(self, plan: Plan) -> Iterator[str]:
        if lost := self._classes_without(plan):
            yield f"no held-out row has the class {_list(lost)}, so no figure says whether the model learns it."

    def _classes_without(self, plan: Plan) -> list[str]:
        names = plan.tables[0].label_names  # empty if the labels are numbers
        used = {names[int(index)] for index in np.unique(plan.stream.labels())} if names else set()
        seen = {label for name in used for label in classes_of(name)}
        return _sorted({label for name in names for label in classes_of(name)} - seen)

    def informed(self, tables: Sequence[TokenTable]) -> tuple[Objective, list[str]]:
        names = tables[0].label_names
        problem = self.problem if self.problem is not Problem.auto else _problem(names or ["0.5"])
        if problem is Problem.regression:
            return replace(self, problem=problem, labels=[NUMBER_LABEL]), ["labels: numbers, learned by regression"]
        counts: Counter[str] = Counter()
        indices = np.concatenate([np.asarray(table.labels, np.int64) for table in tables])
        for name, count in zip(names, np.bincount(indices, minlength=len(names)).tolist(), strict=True):
            counts.update(dict.fromkeys(classes_of(name), count))
        classes = self.labels or _sorted(counts) if problem is Problem.multi_label else names
        weights = dict(self.class_weights)
        if self.balanced:
            total = sum(counts.values())
            weights = {one: total / (len(classes) * counts[one]) * weights.get(one, 1.0) for one in classes}
        made = replace(self, problem=problem, labels=list(classes), class_weights=weights, balanced=False)
        made._names = names
        shown = _list([f"{one} ({counts[one]:,})" for one in classes])
        same = '; 1 and "1" are one label' if any(map(NUMBER.fullmatch, classes)) else ""
        lines = [f"labels: {len(classes):,} classes, {shown}{same}"]
        folded = Counter(map(str.casefold, classes))
        if alike := [name for name in classes if folded[name.casefold()] > 1]:
            lines.append(f"labels: {_list(alike)} differ in upper and lower case only; each is a separate class")
        if lone := [one for one in classes if counts[one] == 1]:
            lines.append(f"labels: one row alone has the class {_list(lone)}: nothing of it can be held out")
        return made, lines

    def from_rows(self) -> dict[str, Any]:
        return dict(problem=self.problem.value, labels=self.labels, class_weights=self.class_weights, balanced=False)

    def configured(self, hf_config: Any) -> Any:
        present = list(hf_config.id2label.values())
        if present not in ([SCORE_LABEL], [RELEVANCE_LABEL], [NUMBER_LABEL], self.labels):
            raise ConfigError(
                f"model.path: its head has the labels {_list(present)}, and the rows {_list(self.labels)}. Set "
                "objective.labels to the model's labels in their order, or use a model without this head."
            )
        config = copy.deepcopy(hf_config)
        config.id2label = dict(enumerate(self.labels))
        config.label2id = {name: index for index, name in config.id2label.items()}
        config.problem_type = self.problem.value + "_classification" * (self.problem is not Problem.regression)
        return config

    def conclude(self, hf_config: Any, figures: Mapping[str, float]) -> None:
        if self.problem is Problem.multi_label:
            names = {one: f"eval/threshold/{one}" for one in self.labels}
            hf_config.thresholds = {one: figures[name] for one, name in names.items() if name in figures}

    def group_losses(self, model: LanguageModel, batch: Batch) -> GroupLosses:
        numbers, labels = model.numbers(batch), batch.document_labels
        assert labels is not None
        counted, values = ~labels.isnan(), torch.cat([labels[:, None], numbers.detach()], dim=1)
        if self.problem is Problem.regression:
            distance = numbers.squeeze(-1) - labels.nan_to_num(0.0)
            return GroupLosses(counted, distance.square(), {"error": distance.abs()}, values)
        index = labels.nan_to_num(0.0).long()
        if self.problem is Problem.single_label:
            losses = F.cross_entropy(numbers, index, reduction="none", label_smoothing=self.label_smoothing)
            if self.class_weights:
                losses = losses * self._weights(numbers)[index]
            right = numbers.argmax(-1) == index
        else:
            targets = self._targets().to(numbers, non_blocking=True)[index]
            smooth = targets + self.label_smoothing * (0.5 - targets)
            each = F.binary_cross_entropy_with_logits(numbers, smooth, reduction="none")
            losses = (each * self._weights(numbers) if self.class_weights else each).mean(-1)
            right = ((numbers > 0) == (targets > 0)).all(-1)
        return GroupLosses(counted, losses, {"accuracy": right.float()}, values)

    def _weights(self, like: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.class_weights.get(one, 1.0) for one in self.labels]).to(like, non_blocking=True)

    def _targets(self) -> torch.Tensor:
        """For each name of a label, 1 for its classes and 0 for others: float32 [names, classes]."""
        sets = [set(classes_of(name)) for name in self._names]
        return torch.tensor([[float(one in each) for one in self.labels] for each in sets])

    def judge(self, values: np.ndarray) -> dict[str, float]:
        labels, numbers = values[:, 0], values[:, 1:]
        if importlib.util.find_spec("sklearn") is None:
            return {}
        from sklearn import metrics

        if self.problem is Problem.regression:
            return {"r2": float(metrics.r2_score(labels, numbers[:, 0]))} if len(labels) > 1 else {}
        index = labels.astype(np.int64)
        if self.problem is Problem.multi_label:
            return self._judge_several(self._targets().numpy()[index] > 0, 1 / (1 + np.exp(-numbers)))
        shares = np.exp(numbers - numbers.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        chosen = shares.argmax(1)
        present = np.unique(index)
        found = {
            "f1": float(metrics.f1_score(index, chosen, average="macro", labels=present, zero_division=0)),
            "calibration_error": _calibration_error(shares.max(1), chosen == index),
        }
        if len(present) == len(self.labels):
            scores = shares[:, 1] if len(self.labels) == 2 else shares
            found["auc"] = float(metrics.roc_auc_score(index, scores, multi_class="ovr"))
        if len(self.labels) <= MOST_SHOWN:
            matrix = metrics.confusion_matrix(index, chosen, labels=range(len(self.labels)))
            for row, true in zip(matrix.tolist(), self.labels, strict=True):
                found |= {f"confusion/{true}/{one}": float(n) for one, n in zip(self.labels, row, strict=True)}
        return found

    def _judge_several(self, truth: np.ndarray, shares: np.ndarray) -> dict[str, float]:
        """Figures of multi_label: with all thresholds at 0.5, and for each class its best threshold."""
        from sklearn import metrics

        chosen = shares > ALL_ABOVE
        found = {
            "f1": float(metrics.f1_score(truth, chosen, average="macro", zero_division=0)),
            "f1_micro": float(metrics.f1_score(truth, chosen, average="micro", zero_division=0)),
        }
        mixed = [at for at in range(truth.shape[1]) if 0 < truth[:, at].sum() < len(truth)]
        if mixed:
            found["auc"] = float(np.mean([metrics.roc_auc_score(truth[:, at], shares[:, at]) for at in mixed]))
        for at in mixed:
            precision, recall, thresholds = metrics.precision_recall_curve(truth[:, at], shares[:, at])
            f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
            best = f1[:-1].argmax()  # halfway to the next lower share, so that rounding does not change the classes
            found[f"threshold/{self.labels[at]}"] = float(thresholds[max(best - 1, 0) : best + 1].mean())
        return found

    def verdict(self, before: Mapping[str, float], after: Mapping[str, float]) -> Iterator[str]:
        yield from super().verdict(before, after)
        if "f1" not in after and self.problem is not Problem.regression:
            yield "F1, AUC and the confusion matrix need scikit-learn: pip install 'fxtune[metrics]'"


def _problem(names: Sequence[str]) -> Problem:
    if any(name.startswith("[") for name in names):
        return Problem.multi_label
    numbers = all(map(NUMBER.fullmatch, names))
    return Problem.regression if numbers and any("." in name for name in names) else Problem.single_label


def _with_numbers(table: TokenTable) -> TokenTable:
    """`table`, whose labels are the numbers that their names stand for. Raises ConfigError if a name is no number."""
    try:
        numbers = [float(name) for name in table.label_names]
    except ValueError:
        word = next(name for name in table.label_names if not NUMBER.fullmatch(name))
        raise ConfigError(
            f"{table.name}: a row has the label {word}, which is no number, and objective.problem=regression learns "
            "numbers. Correct it, or set objective.problem=single_label."
        ) from None
    if far := [name for name, number in zip(table.label_names, numbers, strict=True) if abs(number) > LARGEST]:
        raise ConfigError(f"{table.name}: a row has the label {float(far[0]):g}, too large for float32. Scale it.")
    return _relabelled(table, numbers, [])


def _relabelled(table: TokenTable, values: Sequence[float], names: list[str]) -> TokenTable:
    return table.relabelled(np.asarray(values, np.float32)[np.asarray(table.labels, np.int64)], names)


def _sorted(names: set[str] | Counter[str]) -> list[str]:
    """Class names in order: numbers by size, then words by spelling."""
    return sorted(names, key=lambda name: (0, float(name), name) if NUMBER.fullmatch(name) else (1, 0.0, name))


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_SHOWN])
    return shown + f" and {len(names) - MOST_SHOWN:,} more" * (len(names) > MOST_SHOWN)


def _calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error (Guo et al., arXiv:1706.04599): the mean distance of confidence and accuracy over
    bins of equal width, weighted by their documents."""
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    return float(np.abs(np.bincount(bins, confidence - right)).sum() / len(confidence))
