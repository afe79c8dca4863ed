"""Steps that went wrong, put aside for inspection: which samples they were made of, and the batches as the model got them.

    RUN/skipped/step-00000123/samples.json        why, the step's figures, and each row's samples: source, document, text
                              batch-0.safetensors  input_ids, targets, position_ids, ... of its first micro-batch, and so on

The batch at a step is a function of (data plan, step), so nothing is kept while steps run: it is made again when the figures are
read. A step counts from 0 as in the data plan; the step in the folder's name counts from 1, as in every log line.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from fxtune.data.batches.batch import Batch
from fxtune.data.batches.plan import Plan
from fxtune.training.interval import Taken

MOST = 8
"""Steps of a run whose batches are put aside, of each kind."""
TEXT = 2000
"""Characters of a sample's text that are written."""
NAMED = 6
"""Samples that a message names."""


class BadBatches:
    """Those of the run in `folder`. `decode` turns token ids into text; `note` takes a line for the user."""

    def __init__(
        self, folder: Path, plan: Plan, decode: Callable[[list[int]], str], note: Callable[[str], None]
    ) -> None:
        self.folder, self.plan, self.decode, self.note = folder, plan, decode, note

    def tell(self, rows: list[Taken], skips_spikes: bool) -> None:
        """One note for each kind of them, and their samples on the disk. Raises nothing: a full disk must not end the run."""
        spikes = [row for row in rows if row.spike]
        for kind, found, why in (
            ("skipped", [row for row in rows if not row.spike], "its loss or gradient was not finite"),
            ("spikes", spikes, "a loss spike" + ", skipped" * skips_spikes),
        ):
            if not found:
                continue
            first = found[0]
            figures = f" (loss {first.loss:.4g}, above {first.limit:.4g})" if first.spike else ""
            more = f", and {len(found) - 1} more steps like it" if len(found) > 1 else ""
            kept = [place for row in found if (place := self._keep(kind, row, why))]
            where = f" See {kept[0]}" + (f" and {len(kept) - 1} more there." if len(kept) > 1 else ".") if kept else ""
            self.note(f"step {first.step + 1}: {why}{figures}{more}. Its samples: {self._named(first.step)}.{where}")

    def _named(self, step: int) -> str:
        found = [pair for micro in range(self.plan.micro_batches(step)) for pair in self.plan.documents(step, micro)]
        by_source: dict[int, list[str]] = {}
        for source, document in found[:NAMED]:
            by_source.setdefault(source, []).append(str(document))
        named = "; ".join(
            f"{self.plan.tables[source].name} documents {', '.join(those)}" for source, those in by_source.items()
        )
        return named + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")

    def _keep(self, kind: str, row: Taken, why: str) -> Path | None:
        """Where the step lies now, whole; None where there are MOST of them, or where the disk does not take it (said)."""
        parent = self.folder / kind
        place = parent / f"step-{row.step + 1:08d}"
        staging = parent / f".{place.name}"
        try:
            if place.exists():  # done before, by a process that was killed after it
                return place
            if parent.exists() and len(list(parent.glob("step-*"))) >= MOST:
                return None
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            micro_batches = range(self.plan.micro_batches(row.step))
            for micro in micro_batches:
                batch = self.plan.batch(row.step, micro)
                tensors = {
                    item.name: value
                    for item in fields(Batch)
                    if isinstance(value := getattr(batch, item.name), torch.Tensor)
                }
                save_file(tensors, staging / f"batch-{micro}.safetensors")
            told = {
                "step": row.step + 1,
                "why": why,
                **{name: _number(getattr(row, name)) for name in ("loss", "norm", "scale", "limit")},
                "micro_batches": [self._rows(row.step, micro) for micro in micro_batches],
            }
            (staging / "samples.json").write_text(json.dumps(told, indent=1, ensure_ascii=False), encoding="utf-8")
            os.replace(staging, place)
            return place
        except (OSError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            self.note(f"{place} could not be written ({error}); training goes on")
            return None

    def _rows(self, step: int, micro: int) -> list[list[dict[str, Any]]]:
        rows = []
        for contents in self.plan.contents(step, micro):
            row = []
            for piece in contents:
                table = self.plan.tables[piece.source]
                start = int(table.offsets[piece.document]) + piece.first
                text = self.decode(table.ids[start : start + piece.length].tolist())
                row.append(
                    {
                        "source": table.name,
                        "document": piece.document,
                        "first_token": piece.first,
                        "tokens": piece.length,
                        "text": text[:TEXT],
                    }
                )
            rows.append(row)
        return rows


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
