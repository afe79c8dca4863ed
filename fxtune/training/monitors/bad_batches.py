"""Saves the samples and batches of bad steps for inspection. A bad step was not finite or was a loss spike.

    RUN/skipped/step-00000123/samples.json         the reason, the step's figures, and the samples of each row
                              batch-0.safetensors  input_ids, targets, position_ids, ... of its first micro-batch

A step's batch depends only on the data plan and the step, so it is built again when the figures are read. Steps and
documents count from 0 in the data plan, and from 1 in folder names, samples.json and log lines.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import DocumentSlice, Plan
from fxtune.training.monitors.step_record import StepRecord

MAX_STEPS = 8
"""How many steps of each kind a run saves."""
MAX_TEXT = 2000
"""How many characters of a sample's text are written."""
MAX_NAMED = 6
"""How many samples a message names."""


@dataclass
class BadBatches:
    """Reports and saves bad batches of the run in `folder`. `decode` turns token ids into text; `note` prints a line
    for the user. `writes`: whether this rank writes and prints."""

    folder: Path
    plan: Plan
    decode: Callable[[list[int]], str]
    note: Callable[[str], None]
    writes: bool = True

    def report(self, kind: str, records: list[StepRecord], reason: str) -> None:
        """Print one note on these steps, and write their samples to the subfolder `kind`.

        Raises no error: a full disk must not end the run.
        """
        if not records or not self.writes:
            return
        first, others = records[0], len(records) - 1
        figures = f" (loss {first.loss:.4g}, above {first.spike_limit:.4g})" if first.spike else ""
        count = f", and {others} more steps like it" if others else ""
        written = [path for record in records if (path := self._write(kind, record, reason))]
        message = f"step {first.step + 1}: {reason}{figures}{count}. Its samples: {self._sample_names(first.step)}."
        if written:
            message += f" See {written[0]}" + f" and {len(written) - 1} more there" * (len(written) > 1) + "."
        self.note(message)

    def _sample_names(self, step: int) -> str:
        plan = self.plan.of_step(step)
        pairs = [pair for micro_batch in range(plan.micro_batches(step)) for pair in plan.documents(step, micro_batch)]
        by_source: dict[int, list[str]] = {}
        for source, document in pairs[:MAX_NAMED]:
            by_source.setdefault(source, []).append(str(document + 1))
        named = [f"{plan.tables[source].name} documents {', '.join(names)}" for source, names in by_source.items()]
        return "; ".join(named) + (f" and {len(pairs) - MAX_NAMED} more" if len(pairs) > MAX_NAMED else "")

    def _write(self, kind: str, record: StepRecord, reason: str) -> Path | None:
        """Write a step's samples and batches, and return their folder.

        Returns None if MAX_STEPS steps are saved already. If the write fails, prints a line and returns None.
        """
        parent = self.folder / kind
        final = parent / f"step-{record.step + 1:08d}"
        staging = parent / f".{final.name}"
        try:
            if final.exists():  # written by an earlier process, which was killed later
                return final
            if parent.exists() and len(list(parent.glob("step-*"))) >= MAX_STEPS:
                return None
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            plan = self.plan.of_step(record.step)
            micro_batches = range(plan.micro_batches(record.step))
            for micro_batch in micro_batches:
                batch = plan.batch(record.step, micro_batch)
                columns = {column.name: getattr(batch, column.name) for column in fields(Batch)}
                tensors = {name: value for name, value in columns.items() if isinstance(value, torch.Tensor)}
                save_file(tensors, staging / f"batch-{micro_batch}.safetensors")
            figures = dict(loss=record.loss, norm=record.grad_norm, scale=record.loss_scale, limit=record.spike_limit)
            samples = {
                "step": record.step + 1,
                "why": reason,
                **{name: value if math.isfinite(value) else None for name, value in figures.items()},
                "micro_batches": [self._row_samples(record.step, micro_batch) for micro_batch in micro_batches],
            }
            (staging / "samples.json").write_text(json.dumps(samples, indent=1, ensure_ascii=False), encoding="utf-8")
            os.replace(staging, final)
            return final
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            self.note(f"{final} could not be written ({error}); training goes on")
            return None

    def _row_samples(self, step: int, micro_batch: int) -> list[list[dict[str, Any]]]:
        plan = self.plan.of_step(step)
        return [[self._sample(piece, plan) for piece in row] for row in plan.contents(step, micro_batch)]

    def _sample(self, piece: DocumentSlice, plan: Plan) -> dict[str, Any]:
        table = plan.tables[piece.source]
        start = int(table.offsets[piece.document]) + piece.first
        text = self.decode(table.ids[start : start + piece.length].tolist())
        place = dict(source=table.name, document=piece.document + 1, first_token=piece.first, tokens=piece.length)
        return {**place, "text": text[:MAX_TEXT]}
