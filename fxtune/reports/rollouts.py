"""The answers that a run learned from, for its page: the best and the worst answer of a few steps, with rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import ROLLOUT_ANSWERS, ROLLOUTS
from fxtune.errors import StorageError

STEPS = 6
"""How many steps are shown: the first, the last, and steps between them."""
LONGEST = 600
"""Characters of an answer that are shown."""
COLUMNS = ["step", "mean reward", "prompt", "best answer", "worst answer"]


def rollout_rows(folder: Path) -> Iterator[list[str]]:
    """Yield a row for some steps of the run in `folder`, with the prompt whose answers differ most in reward. Nothing
    for a run without rollouts. Raises StorageError if answers cannot be read."""
    steps = sorted(file.parent for file in (folder / ROLLOUTS).glob(f"step-*/{ROLLOUT_ANSWERS}"))
    last = len(steps) - 1
    for number in sorted({round(last * part / (STEPS - 1)) for part in range(STEPS)}) if steps else ():
        answers = _read(steps[number] / ROLLOUT_ANSWERS)
        by_prompt: dict[int, list[dict[str, Any]]] = {}
        for answer in answers:
            by_prompt.setdefault(answer["group"], []).append(answer)
        ordered = [sorted(own, key=lambda answer: float(answer["reward"])) for own in by_prompt.values()]
        widest = max(ordered, key=lambda own: float(own[-1]["reward"]) - float(own[0]["reward"]))
        mean = sum(float(answer["reward"]) for answer in answers) / len(answers)
        step = str(int(steps[number].name.removeprefix("step-")))
        yield [step, f"{mean:.3g}", widest[0]["where"], _shown(widest[-1]), _shown(widest[0])]


def _shown(answer: dict[str, Any]) -> str:
    text = str(answer["text"])
    more = "…" if len(text) > LONGEST else ""
    return f"{float(answer['reward']):.3g}: {text[:LONGEST]}{more}" + " (cut off)" * (not answer["finished"])


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise StorageError(f"{file} cannot be read: {error}. Bring it back, or remove its folder.") from error
