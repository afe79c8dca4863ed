"""`fxtune refresh`: tests whether a run's model is worse on new rows. If it is, a second run trains the model further
on new and old rows, and a gate decides whether the new model replaces the old model. A model is an adapter over its
base, or a whole model.

1. **Drift.** A permutation test compares the mean loss of the new documents with the mean loss of the documents that
   the run held out. There is drift if the new documents have a higher loss, at refresh.alpha.
2. **Training.** The model is trained further on a mixture of new rows and old rows (refresh.replay is the share of old
   rows), so that it does not forget the old rows. Early stopping uses held-out rows of both kinds.
3. **Gate.** Tests of paired differences compare the old and the new model on the same held-out documents. The new
   model must be better on the new documents by more than refresh.gain, and must not be worse on the old documents by
   refresh.bound or more. Tests must show both at refresh.alpha: with too few documents no model is replaced.

For preferences a document is a pair, or an answer with a judgment, and the tests compare the objective's losses. If
the objective has a reference, all models are compared with the model that the first run of the lineage started from.
If each model had its own start as reference, a refreshed model would begin with the loss of a model that has learned
nothing.

The tests assume that documents are independent. Rows that depend on each other, such as many rows of one conversation,
count as more evidence than they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.checkpoint.run_folder import RESULT, SETTING, differences
from fxtune.config.root import Config, Export, RefreshConfig, Resume, StopMetric
from fxtune.data.batches.build import plan_training
from fxtune.data.batches.plan import Plan
from fxtune.data.batches.segments import Side, hold_out_number, is_on_side
from fxtune.data.config import DataConfig, OnOverlap, SourceConfig
from fxtune.data.tokenized.profile import Profile, profile
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import ConfigError, DataError, readable, writing
from fxtune.models import load as models
from fxtune.objectives.reference import Reference, WithReference
from fxtune.outputs.document_losses import DocumentLosses, MeasuredDocuments, measure, store_common_reference
from fxtune.outputs.significance import higher_mean, least_pairs, lower_mean
from fxtune.settle.images import image_processor
from fxtune.system.files.atomic_files import read_json, replacing
from fxtune.training.run.resume_check import describe_tables

MEASURED = 1000
"""The largest number of old documents in a test, and of new documents."""
PATIENCE = 3
"""train.stop.patience of a refresh, if the refreshed run had no early stopping."""


@dataclass(frozen=True)
class Drift:
    """The result of the drift test. Losses are means over documents, in nats per supervised token. For groups they are
    means of the objective's loss."""

    old_documents: int
    new_documents: int
    old_loss: float
    new_loss: float
    p: float
    """The p-value of "the new rows have no higher loss than the old rows"."""
    found: bool


@dataclass(frozen=True)
class Gate:
    """The result of the gate's tests, with losses as in Drift."""

    old_documents: int
    new_documents: int
    old_loss: tuple[float, float]
    """On the old held-out documents: the loss of the old model, and of the new model."""
    new_loss: tuple[float, float]
    """On the new held-out documents: the loss of the old model, and of the new model."""
    p_kept: float
    """The p-value of "the new model is worse on the old rows, by refresh.bound or more"."""
    p_better: float
    """The p-value of "the new model is better on the new rows by refresh.gain or less, or not better"."""
    general_loss: tuple[float, float] | None
    """On general text: the loss a token of the old model, and of the new model; None if it was not measured."""
    forgot: bool
    """Whether the loss on general text has risen by more than refresh.forgotten."""
    passed: bool


def find_drift(old: DocumentLosses, new: DocumentLosses, settings: RefreshConfig) -> Drift:
    """Test whether the documents of `new` have a higher loss than the documents of `old`."""
    p = higher_mean(old.means, new.means)
    means = float(old.means.mean()), float(new.means.mean())
    return Drift(len(old.digests), len(new.digests), *means, p, p <= settings.alpha)


def judge(
    old: tuple[DocumentLosses, DocumentLosses],
    new: tuple[DocumentLosses, DocumentLosses],
    settings: RefreshConfig,
    general: tuple[float, float] | None = None,
) -> Gate:
    """Test whether the new model may replace the old model. `old`: (losses of the old model, losses of the new model)
    on the old held-out documents. `new`: the same on the new held-out documents. `general`: Gate.general_loss."""
    kept, better = (after.means - before.means for before, after in (old, new))
    p_kept, p_better = lower_mean(kept, settings.bound), lower_mean(better, -settings.gain)
    losses = [(float(before.means.mean()), float(after.means.mean())) for before, after in (old, new)]
    bound = math.inf if settings.forgotten is None else settings.forgotten
    forgot = general is not None and not general[1] - general[0] <= bound  # also for a loss that is NaN
    passed = max(p_kept, p_better) <= settings.alpha and not forgot
    return Gate(len(kept), len(better), losses[0], losses[1], p_kept, p_better, general, forgot, passed)


class RefreshData:
    """The rows of a refresh: the rows that the run `parent` trained on and held out, and the new rows.

    Raises DataError for new rows of another format, ConfigError if the run held no rows out or its data has changed.
    """

    def __init__(self, parent: Path, before: DataConfig, config: Config, start: models.ModelConfig) -> None:
        """`before`: the run's data config. `config`: the run's config with the keys of the command; its data.sources
        are the new rows. `start`: the model with which an objective with a reference compares all models."""
        self.before, self.config, self.settings, self.start = before, config, config.refresh, start
        if not before.holds_out:
            raise ConfigError(
                f"{parent} held no rows out, so there is nothing to compare new rows with. Train it with "
                "data.eval_fraction=0.05 or with data.eval_sources."
            )
        self.tokenizer = models.load_tokenizer(config.model)
        self.images = image_processor(config.model, config.data, self.tokenizer)
        self.pad_id = self.tokenizer.pad_token_id or 0
        old, held, new = (
            [self._tokenize(source) for source in sources]
            for sources in (before.sources, before.eval_sources, config.data.sources)
        )
        _require_same_format(parent, old, new)
        self.old_rows, self.new_rows = old, new
        """Tables as they were tokenized. The objective makes `old_tables` and `new_tables` from these."""
        tables, self.eval_tables = config.objective.accept([*old, *new], held, config.data)
        self.old_tables, self.new_tables = tables[: len(old)], tables[len(old) :]
        with readable(str(parent), "This file says what the run was trained on: restore it."):
            trained_on = read_json(parent / SETTING).get("data")
        if trained_on and (changed := differences({"data": trained_on}, {"data": describe_tables(self.old_tables)})):
            raise ConfigError(
                f"The rows that {parent} was trained on have changed. So they cannot be replayed, and fxtune cannot "
                "know which rows of data.sources are new:\n"
                + "\n".join(changed)
                + "\nRestore these sources as they were."
            )
        self.noun = old[0].format.noun
        """A word for the compared documents, for messages: `documents`, `pairs`, ..."""
        tables = [*self.old_tables, *self.eval_tables]
        held_out = [_held_out(self.old_tables, before.held_out_shares), *(table.digests for table in self.eval_tables)]
        self.old = self._sample(tables, np.concatenate(held_out))
        of_run = np.concatenate([table.by_row.digests for table in tables])
        of_sources = np.unique(np.concatenate([table.digests for table in self.new_tables]))
        self.unknown = of_sources[~np.isin(of_sources, of_run)]
        """Digests of the documents of data.sources that the run has neither trained on nor held out, ascending."""
        self.known = len(of_sources) - len(self.unknown)
        """Number of documents of data.sources that the run has trained on or held out."""
        self.new = self._sample(self.new_tables, self.unknown)
        shares = [self.share(source) for source in config.data.sources]
        self.new_held_out = self.new.digests[np.isin(self.new.digests, _held_out(self.new_tables, shares))]
        """Digests of the documents of `new` that are not trained on."""

    def share(self, source: SourceConfig) -> float:
        """The share of a new source that is held out."""
        return self.settings.held_out if source.eval_fraction is None else source.eval_fraction

    def _tokenize(self, source: SourceConfig) -> TokenTable:
        return tokenize(source, self.config.data, self.tokenizer, images=self.images)

    def _sample(self, tables: Sequence[TokenTable], digests: np.ndarray) -> MeasuredDocuments:
        """At most MEASURED documents of `tables` that are in `digests`, in the order in which documents are held
        out."""
        of_tables = np.concatenate([table.digests for table in tables])
        distinct, first = np.unique(of_tables, return_index=True)
        held_out_by = np.concatenate([table.held_out_by for table in tables])[first]
        order = np.argsort(hold_out_number(held_out_by), kind="stable")
        ordered = distinct[order]
        return MeasuredDocuments(tables, ordered[np.isin(ordered, digests)][:MEASURED])

    def require_enough(self, parent: Path) -> None:
        """Raise DataError or ConfigError if there are too few documents for the tests."""
        if not len(self.unknown):
            raise DataError(
                f"{parent} was trained on or has held out all {self.known:,} {self.noun} of data.sources: none is "
                "new. Name files with new rows."
            )
        least = least_pairs(self.settings.alpha)
        if len(self.old.digests) < least:
            raise ConfigError(
                f"{parent} held out {len(self.old.digests)} {self.noun}, and a test at refresh.alpha="
                f"{self.settings.alpha:g} needs {least} or more. Raise refresh.alpha, or train a run that holds out "
                "more."
            )
        if len(self.new_held_out) < least:
            raise DataError(
                f"data.sources have {len(self.unknown):,} new {self.noun}, {len(self.new_held_out)} of them held out, "
                f"and a test at refresh.alpha={self.settings.alpha:g} needs {least} held-out {self.noun}. Wait for "
                f"more rows, or raise refresh.held_out={self.settings.held_out:g}."
            )

    def profiles(self) -> tuple[Profile, Profile]:
        old, new = (profile(group.tables, group.digests, self.tokenizer) for group in (self.old, self.new))
        return old, new

    def drift(self, weights: Path) -> Drift:
        """Test whether the new rows have a higher loss under the weights in the folder `weights`."""
        self._store_reference()
        old, new = measure(self.config, weights, (self.old, self.new), self.pad_id)
        return find_drift(old, new, self.settings)

    def gate(self, before: Path, after: Path) -> Gate:
        """Test whether the weights in the folder `after` may replace the weights in the folder `before`."""
        self._store_reference()
        groups = self.old, MeasuredDocuments(self.new_tables, self.new_held_out)
        old_model, new_model = (measure(self.config, weights, groups, self.pad_id) for weights in (before, after))
        on_old, on_new = zip(old_model, new_model, strict=True)
        result = read_json(after.parent / RESULT)  # the run began with the weights in `before`
        losses = [float(result[name]) for name in ("general/loss_before", "general/loss") if name in result]
        general = (losses[0], losses[1]) if len(losses) == 2 else None
        return judge(on_old, on_new, self.settings, general)

    def _store_reference(self) -> None:
        if self.config.objective.needs.reference:
            store_common_reference(self.config, self.start, (self.old, self.new), self.pad_id)

    def digests(self) -> list[dict[str, Any]]:
        """The path, the number of documents and the digest of the tokens, for each new source."""
        return [
            {"path": table.name, "documents": len(table.by_group), "digest": table.fingerprint}
            for table in self.new_tables
        ]

    def candidate(self, weights: Path, folder: Path, rows: Sequence[SourceConfig]) -> Config:
        """The config of the run that trains `weights` further in `folder`. `rows`: the sources that write_new_rows()
        returned."""
        config, before, replay = self.config, self.before, self.settings.replay
        old, new = (
            replace(config.data, sources=[replace(source, eval_fraction=share) for source, share in side])
            for side in (
                zip(before.sources, before.held_out_shares, strict=True),
                ((source, self.share(source)) for source in rows),
            )
        )
        new.eval_sources = []
        written = [self._tokenize(source) for source in rows]
        accepted, _ = config.objective.accept([*self.old_rows, *written], [], config.data)
        tables = accepted[len(self.old_rows) :]
        if not np.isin(np.concatenate([table.digests for table in tables]), self.unknown).all():
            raise DataError("data.sources changed while they were read. Start again when nothing writes to them.")
        old_plan, new_plan = self._plan(self.old_tables, old), self._plan(tables, new)
        weighted = [
            replace(source, weight=share * summary["share"])
            for side, plan, share in ((old, old_plan, replay), (new, new_plan, 1 - replay))
            for source, summary in zip(side.sources, plan.summary()["sources"], strict=True)
        ]
        # One epoch of a mixture has the supervised tokens of all its sources together.
        fresh, total = sum(new_plan.stream.supply), sum(old_plan.stream.supply) + sum(new_plan.stream.supply)
        stop = config.train.stop
        # New pairs may have prompts of held-out old pairs. Where no row can be on both sides, on_overlap has no
        # effect, and a line of the run would say so.
        shares = {source.eval_fraction for source in weighted}
        has_other_sides = old.eval_sources or old.questions.path is not None or len(shares) > 1
        overlap = OnOverlap.drop if has_other_sides else OnOverlap.error
        objective, lora = config.objective, config.techniques.lora
        began_as_base = lora.enabled and not lora.factored and self.start.adapter is None
        if isinstance(objective, WithReference) and objective.reference is Reference.auto and began_as_base:
            # The run gets the gate's reference. If the adapter that it continues were its reference, the run would add
            # to margins that the old pairs have already.
            objective = replace(objective, reference=Reference.base)
        return replace(
            config,
            objective=objective,
            run=replace(config.run, dir=str(folder), resume=Resume.auto, export=Export.best),
            model=models.starting_from(config.model, weights),
            data=replace(old, sources=weighted, eval_limit=MEASURED, on_overlap=overlap),
            train=replace(
                config.train,
                max_steps=None,
                epochs=self.settings.epochs * fresh / ((1 - replay) * total),
                eval_every=0,
                stop=replace(stop, patience=stop.patience or PATIENCE, metric=StopMetric.loss),
            ),
            checkpoint=replace(config.checkpoint, keep_best=True),
        )

    def _plan(self, tables: Sequence[TokenTable], data: DataConfig) -> Plan:
        train = self.config.train
        return plan_training(
            tables, data, micro_batch_size=train.micro_batch_size, global_batch_size=train.global_batch_size
        )

    def write_new_rows(self, folder: Path, name: str) -> list[SourceConfig]:
        """Write the new rows to JSONL files in `folder`, from which a later refresh can replay them. Returns the
        sources that read these files. Raises StorageError."""
        written = []
        for number, (source, table) in enumerate(zip(self.config.data.sources, self.new_rows, strict=True)):
            file = folder / f"{name}.rows-{number}.jsonl"
            fresh = np.isin(table.by_row.digests, self.unknown)
            if not fresh.any():
                continue
            with writing(f"{file} cannot be written"), replacing(file) as out:
                for row, is_new in zip(usable_rows(source, table, self.config.data), fresh, strict=True):
                    if is_new:
                        out.write(f"{json.dumps(row.value, default=str)}\n".encode())
            written.append(
                SourceConfig(
                    str(file), table.format.name, source.weight, unused=source.unused, eval_fraction=self.share(source)
                )
            )
        return written


def _held_out(tables: Sequence[TokenTable], shares: Sequence[float]) -> np.ndarray:
    """Digests of the documents of `tables` that are held out, if each table holds out its share of `shares`."""
    sides = zip(tables, shares, strict=True)
    return np.concatenate(
        [table.digests[is_on_side(Side.held_out, table.held_out_by, share)] for table, share in sides]
    )


def _require_same_format(parent: Path, old: Sequence[TokenTable], new: Sequence[TokenTable]) -> None:
    """Raise DataError if a table of `new` has other rows than the tables of the run."""

    def kind(table: TokenTable) -> str:
        if table.format.answers:
            return table.format.noun
        return "chats" if table.format.is_chat else table.format.name

    formats = {kind(table) for table in old}
    for table in new:
        if kind(table) not in formats:
            raise DataError(
                f"{table.name} has rows of format {table.format.name}, and {parent} was trained on "
                f"{' and '.join(sorted(formats))}. Convert these rows, or set the source's format or columns."
            )
