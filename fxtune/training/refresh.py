"""`fxtune refresh`: tests whether a run's model is worse on new rows. If it is, a second run trains it further on new
and old rows, and a gate decides whether the new model replaces the old one. A model is an adapter over its base, or a
whole model.

1. **Drift.** The loss of each new document is compared with that of each document that the run held out, by a
   permutation test of the means. It is drift if the new ones have a higher loss, at refresh.alpha.
2. **Training.** The model is trained further on a mixture: a share of new rows, and a share of the old ones
   (refresh.replay), so that what they taught is kept. Early stopping looks at the held-out rows of both.
3. **Gate.** Old and new model are compared on the same held-out documents, by tests of the paired differences: the
   new one must be better on the new rows by more than refresh.gain, and on the old ones not worse by refresh.bound or
   more. Both must be shown at refresh.alpha: with too few documents nothing is promoted.

Documents are independent of each other in these tests. Rows that are not (many of one conversation) count as more
evidence than they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.checkpoint.run_folder import SETTING, differences
from fxtune.config.root import Config, Export, RefreshConfig, Resume, StopMetric
from fxtune.data.batches.build import plan_training
from fxtune.data.batches.plan import Plan
from fxtune.data.batches.segments import Side, hold_out_number, is_on_side
from fxtune.data.config import DataConfig, OnOverlap, SourceConfig
from fxtune.data.tokenized.profile import Profile, profile
from fxtune.data.tokenized.rows import usable_rows
from fxtune.data.tokenized.table import TokenTable
from fxtune.data.tokenized.tokenize import tokenize
from fxtune.errors import ConfigError, DataError, StorageError, not_written
from fxtune.models import load as models
from fxtune.system.atomic_files import read_json, replacing
from fxtune.training.document_losses import DocumentLosses, MeasuredDocuments, measure
from fxtune.training.resume_check import describe_tables
from fxtune.training.significance import higher_mean, least_pairs, lower_mean

PATIENCE = 3
"""train.stop.patience of a refresh whose run had none."""


@dataclass(frozen=True)
class Drift:
    """Loss: nats per supervised token, the mean over documents."""

    old_documents: int
    new_documents: int
    old_loss: float
    new_loss: float
    p: float
    """The p-value of "the new rows have no higher loss than the old ones"."""
    found: bool


@dataclass(frozen=True)
class Gate:
    """Differences: the new model's loss less the old one's, nats per supervised token, the mean over documents."""

    old_documents: int
    new_documents: int
    old_loss: tuple[float, float]
    """On the old held-out rows, of the old model and of the new one."""
    new_loss: tuple[float, float]
    """The same on the new ones."""
    p_kept: float
    """The p-value of "the new model is worse on the old rows, by refresh.bound or more"."""
    p_better: float
    """The p-value of "the new model is no better on the new rows, or by refresh.gain or less"."""
    passed: bool


def find_drift(old: DocumentLosses, new: DocumentLosses, settings: RefreshConfig) -> Drift:
    """Whether the documents of `new` have a higher loss than those of `old`."""
    p = higher_mean(old.means, new.means)
    means = float(old.means.mean()), float(new.means.mean())
    return Drift(len(old.digests), len(new.digests), *means, p, p <= settings.alpha)


def judge(
    old: tuple[DocumentLosses, DocumentLosses], new: tuple[DocumentLosses, DocumentLosses], settings: RefreshConfig
) -> Gate:
    """Whether a model may replace another. `old`, `new`: the losses on the old and the new held-out documents, each
    of the (old, new) model."""
    kept, better = (after.means - before.means for before, after in (old, new))
    p_kept, p_better = lower_mean(kept, settings.bound), lower_mean(better, -settings.gain)
    losses = [(float(before.means.mean()), float(after.means.mean())) for before, after in (old, new)]
    passed = max(p_kept, p_better) <= settings.alpha
    return Gate(len(kept), len(better), losses[0], losses[1], p_kept, p_better, passed)


class RefreshData:
    """The rows of a refresh: what the run `parent` learned from and held out, and the new ones.

    Raises DataError for new rows of another format, ConfigError if the run held nothing out, or its data is not what
    it was.
    """

    def __init__(self, parent: Path, before: DataConfig, config: Config) -> None:
        """`before`: the data of the run. `config`: the run's config with the keys of the command; its data.sources are
        the new rows."""
        self.before, self.config, self.settings = before, config, config.refresh
        if not before.holds_out:
            raise ConfigError(
                f"{parent} held no rows out, so there is nothing to compare new rows with. Train it with "
                "data.eval_fraction=0.05 or with data.eval_sources."
            )
        self.tokenizer = models.load_tokenizer(config.model)
        self.pad_id = self.tokenizer.pad_token_id or 0
        self.old_tables, self.eval_tables = (
            [self._tokenize(source) for source in sources] for sources in (before.sources, before.eval_sources)
        )
        _require_same_data(parent, self.old_tables)
        self.new_tables = [self._tokenize(source) for source in config.data.sources]
        self._require_same_format(parent)
        held = [
            table.digests[is_on_side(Side.held_out, table.digests, share)]
            for table, share in zip(self.old_tables, before.held_out_shares, strict=True)
        ]
        held_out = [*held, *(table.digests for table in self.eval_tables)]
        self.old = MeasuredDocuments([*self.old_tables, *self.eval_tables], self._first(np.concatenate(held_out)))
        known = np.concatenate([table.by_row.digests for table in (*self.old_tables, *self.eval_tables)])
        all_new = np.unique(np.concatenate([table.digests for table in self.new_tables]))
        self.unknown = all_new[~np.isin(all_new, known)]
        """Digests of the new documents that the run has neither learned nor held out, ascending."""
        self.known = len(all_new) - len(self.unknown)
        self.new = MeasuredDocuments(self.new_tables, self._first(self.unknown))
        shares = [self.share(source) for source in config.data.sources]
        self.new_held_out = self.new.digests[
            np.isin(
                self.new.digests,
                np.concatenate(
                    [
                        table.digests[is_on_side(Side.held_out, table.digests, share)]
                        for table, share in zip(self.new_tables, shares, strict=True)
                    ]
                ),
            )
        ]
        """Digests of those of `new` that are not trained on."""

    def share(self, source: SourceConfig) -> float:
        """The share of a new source that is held out."""
        return self.settings.held_out if source.eval_fraction is None else source.eval_fraction

    def _tokenize(self, source: SourceConfig) -> TokenTable:
        return tokenize(source, self.config.data, self.tokenizer)

    def _first(self, digests: np.ndarray) -> np.ndarray:
        """At most refresh.sample of `digests`, each once: those that are held out first."""
        distinct = np.unique(digests)
        return distinct[np.argsort(hold_out_number(distinct), kind="stable")][: self.settings.sample]

    def _require_same_format(self, parent: Path) -> None:
        def kind(table: TokenTable) -> str:
            return "chats" if table.format.is_chat else table.format.name

        formats = {kind(table) for table in self.old_tables}
        for table in self.new_tables:
            if kind(table) not in formats:
                raise DataError(
                    f"{table.name} has rows of format {table.format.name}, and {parent} learned from "
                    f"{' and '.join(sorted(formats))}. Convert it, or set the source's format or columns."
                )

    def require_enough(self, parent: Path) -> None:
        """Raise DataError or ConfigError if there are too few documents for the tests."""
        if not len(self.unknown):
            raise DataError(
                f"All {self.known:,} documents of data.sources are among those that {parent} has learned or held out: "
                "there is nothing new in them."
            )
        least = least_pairs(self.settings.alpha)
        if len(self.old.digests) < least:
            raise ConfigError(
                f"{parent} held out {len(self.old.digests)} documents, and a test at refresh.alpha="
                f"{self.settings.alpha:g} needs {least} or more. Raise refresh.alpha, or train a run that holds out "
                "more."
            )
        if len(self.new_held_out) < least:
            raise DataError(
                f"data.sources have {len(self.unknown):,} new documents, of which {len(self.new_held_out)} are held "
                f"out for the tests, and a test at refresh.alpha={self.settings.alpha:g} needs {least} or more. Wait "
                f"for more rows, or raise refresh.held_out={self.settings.held_out:g}."
            )

    def profiles(self) -> tuple[Profile, Profile]:
        """The profiles of the old held-out documents and of the new ones that are tested."""
        old, new = (profile(group.tables, group.digests, self.tokenizer) for group in (self.old, self.new))
        return old, new

    def drift(self, weights: Path) -> Drift:
        """Whether the new rows have a higher loss under the weights in the folder `weights`."""
        old, new = measure(self.config, weights, (self.old, self.new), self.pad_id)
        return find_drift(old, new, self.settings)

    def gate(self, before: Path, after: Path) -> Gate:
        """Whether the weights in the folder `after` may replace those in `before`."""
        groups = self.old, MeasuredDocuments(self.new_tables, self.new_held_out)
        one, two = (measure(self.config, weights, groups, self.pad_id) for weights in (before, after))
        return judge((one[0], two[0]), (one[1], two[1]), self.settings)

    def digests(self) -> list[dict[str, Any]]:
        """What the new sources are: path, documents and a digest of their tokens."""
        return [
            {"path": table.name, "documents": len(table), "digest": table.fingerprint} for table in self.new_tables
        ]

    def candidate(self, weights: Path, folder: Path, rows: Sequence[SourceConfig]) -> Config:
        """The config of the run that goes on from `weights`, in `folder`. `rows`: the new sources without known rows,
        as write_new_rows() returns them."""
        config, before, replay = self.config, self.before, self.settings.replay
        old, new = (
            replace(config.data, sources=[replace(source, eval_fraction=share) for source, share in side])
            for side in (
                zip(before.sources, before.held_out_shares, strict=True),
                ((source, self.share(source)) for source in rows),
            )
        )
        new.eval_sources = []
        tables = [self._tokenize(source) for source in rows]
        if not np.isin(np.concatenate([table.digests for table in tables]), self.unknown).all():
            raise DataError("data.sources changed while they were read. Start again when nothing writes to them.")
        old_plan, new_plan = self._plan(self.old_tables, old), self._plan(tables, new)
        weighted = [
            replace(source, weight=share * one["share"])
            for side, plan, share in ((old, old_plan, replay), (new, new_plan, 1 - replay))
            for source, one in zip(side.sources, plan.summary()["sources"], strict=True)
        ]
        # An epoch of a mixture has as many supervised tokens as all its sources.
        fresh, total = sum(new_plan.stream.supply), sum(old_plan.stream.supply) + sum(new_plan.stream.supply)
        stop, limit = config.train.stop, self.settings.sample
        # A key that nothing reads is refused: on_overlap needs held-out data of its own, or questions.
        overlap = OnOverlap.drop if old.eval_sources or old.questions.path is not None else old.on_overlap
        return replace(
            config,
            run=replace(config.run, dir=str(folder), resume=Resume.auto, export=Export.best),
            model=models.starting_from(config.model, weights),
            data=replace(old, sources=weighted, eval_limit=limit, on_overlap=overlap),
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
        """The plan of an epoch of some sources alone."""
        train = self.config.train
        return plan_training(
            tables, data, micro_batch_size=train.micro_batch_size, global_batch_size=train.global_batch_size
        )

    def write_new_rows(self, folder: Path, name: str) -> list[SourceConfig]:
        """Write the rows that the run does not know yet to JSONL files in `folder`, so that they are still there when
        a later refresh replays them. Returns the sources that read them. Raises StorageError."""
        written = []
        for number, (source, table) in enumerate(zip(self.config.data.sources, self.new_tables, strict=True)):
            file = folder / f"{name}.rows-{number}.jsonl"
            fresh = np.isin(table.by_row.digests, self.unknown)
            if not fresh.any():
                continue
            try:
                with replacing(file) as out:
                    for row, is_new in zip(usable_rows(source, table, self.config.data), fresh, strict=True):
                        if is_new:
                            out.write(f"{json.dumps(row.value, default=str)}\n".encode())
            except OSError as error:
                raise not_written(f"{file} cannot be written", error) from error
            written.append(
                SourceConfig(
                    str(file), table.format.name, source.weight, unused=source.unused, eval_fraction=self.share(source)
                )
            )
        return written


def _require_same_data(parent: Path, tables: Sequence[TokenTable]) -> None:
    """Raise ConfigError if the rows that the run learned from are not there any more."""
    try:
        before = read_json(parent / SETTING).get("data")
    except ValueError as error:
        raise StorageError(f"{parent}: {error}. It holds what the run was trained on: restore it.") from error
    if before and (changed := differences({"data": before}, {"data": describe_tables(tables)})):
        raise ConfigError(
            f"The rows that {parent} learned from are not there any more. So they cannot be replayed, and it is not "
            "known which of data.sources are new:\n" + "\n".join(changed) + "\nRestore these sources as they were."
        )
