"""The answers that a run learned from: the best and the worst answer of a few steps, and the first answers that differ
from another run's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fxtune.checkpoint.run_folder import ROLLOUT_ANSWERS, ROLLOUTS
from fxtune.errors import readable

STEPS = 6
"""How many steps are shown: the first, the last, and steps between them."""
ANSWERS = 3
"""How many answers that differ are shown."""
LONGEST = 600
"""Characters of an answer that are shown."""
COLUMNS = ["step", "mean reward", "prompt", "best answer", "worst answer"]


def rollout_rows(folder: Path) -> Iterator[list[str]]:
    """Yield a row for some steps of the run in `folder`, with the prompt whose answers differ most in reward. Nothing
    for a run without rollouts. Raises StorageError if answers cannot be read."""
    files = _files(folder)
    steps, last = list(files), len(files) - 1
    for number in sorted({round(last * part / (STEPS - 1)) for part in range(STEPS)}) if steps else ():
        answers = _read(files[steps[number]])
        by_prompt: dict[int, list[dict[str, Any]]] = {}
        for answer in answers:
            by_prompt.setdefault(answer["group"], []).append(answer)
        ordered = [sorted(own, key=lambda answer: float(answer["reward"])) for own in by_prompt.values()]
        widest = max(ordered, key=lambda own: float(own[-1]["reward"]) - float(own[0]["reward"]))
        mean = sum(float(answer["reward"]) for answer in answers) / len(answers)
        yield [str(steps[number]), f"{mean:.3g}", widest[0]["where"], _shown(widest[-1]), _shown(widest[0])]


def first_difference(first: Path, second: Path) -> tuple[int, int | None, list[tuple[str, str | None, str | None]]]:
    """Compare the answers of two runs by their tokens and rewards. Returns the number of steps that both have stored,
    the first of them whose answers differ (None if there is none), and for some answers of this step: the row of the
    prompt, and the answer of each run. Raises StorageError if answers cannot be read."""
    files, others = _files(first), _files(second)
    common = [step for step in files if step in others]
    for step in common:
        pairs = zip_longest(_read(files[step]), _read(others[step]))
        if apart := [(own, other) for own, other in pairs if _content(own) != _content(other)]:
            shown = [
                (str((own or other)["where"]), _shown(own) if own else None, _shown(other) if other else None)
                for own, other in apart[:ANSWERS]
            ]
            return len(common), step, shown
    return len(common), None, []


def _content(answer: dict[str, Any] | None) -> Any:
    return answer and (answer["ids"], answer["reward"])


def _files(folder: Path) -> dict[int, Path]:
    """{step: the file with its answers} of a run, in order."""
    found = sorted((folder / ROLLOUTS).glob(f"step-*/{ROLLOUT_ANSWERS}"))
    return {int(file.parent.name.removeprefix("step-")): file for file in found}


def _shown(answer: dict[str, Any]) -> str:
    text = str(answer["text"])
    more = "…" if len(text) > LONGEST else ""
    return f"{float(answer['reward']):.3g}: {text[:LONGEST]}{more}" + " (cut off)" * (not answer["finished"])


def _read(file: Path) -> list[dict[str, Any]]:
    with readable(f"{file} cannot be read", "Bring it back, or remove its folder."):
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
