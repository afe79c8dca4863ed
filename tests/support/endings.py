"""Reads the trace of a run (traced.py) and compares the results of two runs bit for bit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TELLTALE = ("second", "time", "data_wait", "memory_", "mfu", "compile/", "slowest_", "energy/", "cost/")
"""Figures with one of these in their name depend on the clock, the machine or the process."""


@dataclass
class Traced:
    """The trace lines of a run (traced.py)."""

    lines: list[dict[str, Any]]

    @staticmethod
    def read(file: Path) -> Traced:
        text = file.read_text() if file.exists() else ""
        return Traced([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")])

    def inside(self) -> list[str]:
        """The phases that the run had entered and not left, outermost first."""
        open_: list[str] = []
        for line in self.lines:
            if "enter" in line:
                open_.append(line["enter"])
            elif line.get("leave") in open_:
                open_.remove(line["leave"])
        return open_

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "step" in line]

    def spans(self, phase: str) -> list[tuple[float, float]]:
        """(start, end) of each time that the run was in `phase`, in seconds of the shared clock."""
        enters = [line["at"] for line in self.lines if line.get("enter") == phase]
        return list(zip(enters, [line["at"] for line in self.lines if line.get("leave") == phase], strict=False))


def effective_steps(attempts: list[Traced]) -> list[dict[str, Any]]:
    """The effective steps of several attempts: the steps of each attempt until the next one's first step."""
    kept: list[dict[str, Any]] = []
    for attempt in attempts:
        if steps := attempt.steps():
            kept = [line for line in kept if line["step"] < steps[0]["step"]] + steps
    return kept


@dataclass
class Ending:
    """The results of a finished run: what must be equal in two equal runs, and what each run must satisfy."""

    sums: dict[str, str]
    """sha256 of the export and of the last checkpoint's tensors."""
    state: dict[str, Any]
    """The last checkpoint's state without figures that depend on the clock."""
    lines: list[dict[str, Any]]
    """The lines of metrics.jsonl, also without such figures."""
    result: dict[str, Any]
    steps: list[tuple[int, Any, str]]
    """Each effective step: its number, the documents of its micro-batches, the random state after it."""
    leftovers: list[str]
    """Temporary files of a killed attempt that the run must have deleted."""

    @staticmethod
    def of(folder: Path, attempts: list[Traced]) -> Ending:
        newest = max((folder / "checkpoints").glob("step-*"))
        files = [
            *newest.glob("*.safetensors"),
            *folder.glob("adapter/*.safetensors"),
            *folder.glob("model/*.safetensors"),
        ]
        sums = {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}
        state = json.loads((newest / "state.json").read_text())
        state["figures"] = timeless(state["figures"])
        del state["clock"]
        lines = [timeless(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if set(line) != {"train/step"}]  # a late line with the duration of a save
        steps = [(line["step"], line["documents"], line["random"]) for line in effective_steps(attempts)]
        leftovers = [
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if (path.name.startswith(".") and path.name != ".lock") or path.name.endswith((".part", ".tmp"))
        ]
        return Ending(sums, state, lines, timeless(json.loads((folder / "result.json").read_text())), steps, leftovers)

    def differences(self, other: Ending) -> list[str]:
        """Descriptions of the differences to `other`. Empty if both are bit for bit equal."""
        return [
            f"{name}: {_first_difference(mine, theirs)}"
            for name in vars(self)
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]

    def uses(self) -> dict[str, int]:
        """How often the run used each document."""
        counts: dict[str, int] = {}
        for _, micro_batches, _ in self.steps:
            for name in (name for documents in micro_batches for name in documents):
                counts[name] = counts.get(name, 0) + 1
        return counts


def timeless(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if not any(part in name for part in TELLTALE)}


def _first_difference(mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict):
        return "; ".join(
            f"{key}: {mine.get(key, 'absent')} / {theirs.get(key, 'absent')}"
            for key in sorted(mine | theirs)
            if mine.get(key) != theirs.get(key)
        )[:300]
    if isinstance(mine, list):
        if len(mine) != len(theirs):
            return f"{len(mine)} / {len(theirs)} entries: {str(mine)[-150:]} / {str(theirs)[-150:]}"
        return next(f"entry {at}: {a} / {b}" for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)[
            :300
        ]
    return f"{mine} / {theirs}"
