"""What an objective needs from the data and from the run. Its needs are checked before weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fxtune.data.formats.registry import FORMATS, learned_by
from fxtune.data.tokenized.table import TokenTable
from fxtune.distributed.parallel import Degrees
from fxtune.facts.run import Facts


@dataclass(frozen=True)
class Needs:
    documents: tuple[int, int | None] = (1, 1)
    """The fewest and the most documents of a group; None: any number."""
    labels: bool | None = False
    """True: at least one document of each group has a label. None: labels are optional. False: labels are refused,
    because the objective would not read them."""
    whole_documents: bool = False
    """Whether the loss needs one number for each document, so that ranks may not divide documents. An objective with
    groups or labels always needs whole documents."""
    reference: bool = False
    """Whether the objective compares the model with a reference. Such an objective has an option `reference`
    (objectives/reference.py)."""
    whole_step: bool = False
    """Whether the loss of a micro-batch depends on the other micro-batches of its step (Objective.step_values())."""
    rollouts: bool = False
    """Whether the objective learns from answers that the model writes in each step. The rows are then prompts."""
    row_format: str = ""
    """The row format of sources with format=auto. Empty: it is detected from the rows."""
    head: str = "lm"
    """The head of the model (Decoder.head): `lm` for log-probabilities of tokens, `score` for numbers of a
    document, `pool` for a vector of a document."""
    pair_rate: ClassVar[float] = 5.0e-6
    """The learning rate of LoRA on pairs and judged answers, as in recipes/llama_dpo.yaml."""

    @property
    def reads_groups(self) -> bool:
        """Whether the objective compares documents or reads labels. Objectives for supervised text do neither."""
        return self.documents != (1, 1) or self.labels is not False

    @property
    def writes(self) -> bool:
        """Whether the trained model writes text."""
        return self.head == "lm"

    @property
    def are_pairs(self) -> bool:
        """Whether each group is a pair of answers to one prompt."""
        return self.documents == (2, 2)

    @property
    def answers_share_prompts(self) -> bool:
        """Whether the documents of a group are answers to one prompt."""
        return self.are_pairs or self.rollouts

    def refusals(self, name: str, degrees: Degrees) -> Iterator[str]:
        """Yield each reason, with its key, why the objective `name` cannot run on ranks with these degrees."""
        if degrees.context > 1 and (self.whole_documents or self.reads_groups):
            yield (
                f"parallel.context: objective={name} reads whole documents, and {degrees.context} ranks would divide "
                "each row. Set parallel.context=1."
            )

    def row_refusals(self, name: str, tables: Iterable[TokenTable]) -> Iterator[str]:
        """Yield a message for each table whose groups the objective `name` cannot learn from."""
        fewest, most = self.documents
        for table in tables:
            sizes = np.diff(table.groups)
            wrong_sizes = sizes[(sizes < fewest) | (sizes > (most or len(table)))]
            rows_have = _rows_have(len(wrong_sizes), len(sizes))
            documents = _documents(int(wrong_sizes.min()), int(wrong_sizes.max())) if len(wrong_sizes) else ""
            has_one_answer = len(table.format.answers) == 1
            if table.format.name != self.row_format and (self.row_format or table.format.as_tokenized):
                columns = f"Give rows with {self._fitting_rows()}" if self.row_format else "Give other rows"
                yield (
                    f"{table.name}: its rows are {table.format.name}, from which objective={name} does not learn. "
                    f"{columns} (the source's `columns` renames columns), or choose another objective "
                    "(docs/companions.md)."
                )
            elif table.format.answers and (len(wrong_sizes) or (has_one_answer and not self.labels)):
                ignores = most == 1 and not self.labels
                why = "would learn good and bad answers alike" if ignores else f"needs {self._fitting_rows()}"
                yield (
                    f"{table.name}: its rows are preferences ({table.format.name}), and objective={name} {why}. Set "
                    f"objective={learned_by(table.format)}"
                    + "; or, if `label` judges no answer, the source's `unused: [label]`." * has_one_answer
                    + "." * (not has_one_answer)
                )
            elif len(wrong_sizes) and most == 1:
                yield (
                    f"{table.name}: {rows_have} {documents}, and "
                    f"objective={name} learns from one document a row. Choose an objective for groups "
                    "(`fxtune help objective`), or rows of one document."
                )
            elif len(wrong_sizes):
                yield (
                    f"{table.name}: {rows_have} {documents}, and "
                    f"objective={name} learns from groups of {_documents(fewest, most)}. Give {self._fitting_rows()} "
                    "(docs/data.md), or choose another objective."
                )
            elif self.labels is False and not table.format.answers and has_labels(table):
                yield (
                    f"{table.name}: its rows have `labels`, which objective={name} does not read. Leave them out, or "
                    "choose an objective that learns from labels."
                )
            elif self.labels and (unlabelled := _unlabelled_groups(table)):
                yield (
                    f"{table.name}: {_rows_have(unlabelled, len(sizes))} no label, and objective={name} learns from "
                    f"labels. Give {self._fitting_rows()} (docs/data.md)."
                )

    def _fitting_rows(self) -> str:
        """A phrase that describes the rows from which the objective can learn."""
        if self.row_format:
            return ", ".join(f"`{column}`" for column in FORMATS[self.row_format].columns)
        if self.are_pairs:
            return "rows with `prompt`, `chosen` and `rejected`"
        if self.documents == (1, 1):
            return "rows with an answer and its `label`, true or false"
        return f"rows with so many `documents`{', and their `labels`' * bool(self.labels)}"


def one_number_refusals(what: str, facts: Facts) -> Iterator[str]:
    """Yield a reason if the base has a head for several numbers, and `what` is one number."""
    if (labels := len(facts.model.get("id2label") or {0})) != 1:
        yield f"model.path: it has {labels} labels, and {what} is one number. Use another model."


def same_label_refusals(name: str, tables: Iterable[TokenTable]) -> Iterator[str]:
    """Yield a message if all answers of the tables have the same label. The objective `name` then has nothing to
    compare."""
    tables = [table for table in tables if has_labels(table)]
    found = {label for table in tables for label in np.unique(np.asarray(table.labels)) if not np.isnan(label)}
    if len(found) == 1:
        word, other = ("good", "bad") if found == {1.0} else ("bad", "good")
        names = ", ".join(table.name for table in tables)
        yield (
            f"{names}: all answers are {word} by their `label`, and objective={name} learns from good and bad ones. "
            f"Add rows with {other} answers."
        )


def has_labels(table: TokenTable) -> bool:
    return table.labels is not None and not np.isnan(table.labels).all()


def _unlabelled_groups(table: TokenTable) -> int:
    if table.labels is None or not len(table):
        return len(table.groups) - 1
    labelled = np.add.reduceat((~np.isnan(table.labels)).astype(np.int64), table.groups[:-1])
    return int((labelled == 0).sum())


def _rows_have(count: int, total: int) -> str:
    """The beginning of a sentence about `count` of a table's `total` rows."""
    return "its rows have" if count == total else f"{count:,} of its {total:,} rows have"


def _documents(fewest: int, most: int | None) -> str:
    if most is None:
        return f"{fewest} or more documents"
    return f"{fewest} to {most} documents" if fewest < most else f"{fewest} document{'s' * (fewest > 1)}"
