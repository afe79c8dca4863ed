"""The steps of a run that learns from rollouts: which prompts a step has, and the batches of their answers."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Optional

from fxtune.data.batches.epochs import EpochStream, StreamSettings
from fxtune.data.batches.layout import BatchSizes, Layout
from fxtune.data.batches.plan import Plan
from fxtune.data.batches.segments import Side
from fxtune.data.config import DataConfig, OnLong
from fxtune.data.tokenized.table import TokenTable
from fxtune.training.rollouts.folder import Rollouts


class RolloutPlan(Plan):
    """A plan whose rows are prompts. The batches of a step exist as soon as its rollouts are written: of_step()."""

    def __init__(
        self,
        stream: EpochStream,
        sizes: BatchSizes,
        layout: Optional[Layout] = None,
        *,
        rollouts: Rollouts,
        settings: StreamSettings,
    ) -> None:
        """`settings`: how the answers of a step are laid out in rows."""
        super().__init__(stream, sizes, layout)
        self.rollouts, self.settings = rollouts, settings
        self._of_step = lru_cache(maxsize=2)(lambda step: self._plan(rollouts.table(step), step))

    @staticmethod
    def of(prompts: Plan, rollouts: Rollouts, data: DataConfig) -> RolloutPlan:
        """The plan with the steps of `prompts`. `data`: the run's, with all rows decided."""
        settings = StreamSettings(
            data.sequence_length,
            data.packs,
            OnLong.error,
            0.0,
            Side.all,
            weights=None,
            seed=None,
            share_prompts=data.shares_prompts or None,
        )
        sizes = replace(prompts.sizes, row_lengths=data.row_lengths())
        return RolloutPlan(prompts.stream, sizes, prompts.layout, rollouts=rollouts, settings=settings)

    def prompts(self, step: int) -> list[tuple[int, int]]:
        """(table, document) of each prompt of a step."""
        found = self.row_sequence.spans(self._rows(step)[0])
        return list(zip(found.source.tolist(), found.document.tolist(), strict=True))

    def of_step(self, step: int) -> Plan:
        return self._of_step(step)

    def staged(self, step: int) -> Plan:
        """of_step(), before the rollouts are complete: without log-probabilities and advantages."""
        return self._plan(self.rollouts.staged(step), step)

    def _plan(self, table: TokenTable, step: int) -> Plan:
        stream = EpochStream([table], self.settings)
        rows = len(stream.epoch(0)) * stream.rows_of_group
        sizes = replace(
            self.sizes, global_batch_size=rows, max_steps=None, epochs=None, last=None, dropped=step, stages=()
        )
        return Plan(stream, sizes)

    def _changed(self, **sizes: Any) -> RolloutPlan:
        changed = replace(self.sizes, **sizes)
        return RolloutPlan(self.stream, changed, self.layout, rollouts=self.rollouts, settings=self.settings)
