"""A plugin for bench_peers.py: `fxtune bench` of a policy trains on the answers of a file in place of made-up ones.

`fxtune bench` draws an answer's length evenly, and a peer must train on the same tokens. The file is named by the
environment variable FXTUNE_ROLLOUTS. Task.write_documents() of companions.py writes the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fxtune
from fxtune.training.rollouts import made_up
from fxtune.training.rollouts.folder import Answer, Asked, Rollouts


@fxtune.reward("given")
def given(completions: list[Any], **columns: Any) -> list[float]:
    """The reward of the case. `fxtune bench` computes no rewards: the file has advantages."""
    return [0.0] * len(completions)


class GivenRollouts(Rollouts):
    """Writes the file's answers to the same prompts in place of the answers that it gets."""

    def stage(self, step: int, asked: Sequence[Asked], answers: Sequence[Answer], longest: int | None = None) -> None:
        rows = map(json.loads, Path(os.environ["FXTUNE_ROLLOUTS"]).read_text(encoding="utf-8").splitlines())
        known: dict[tuple[int, ...], list[dict[str, Any]]] = {tuple(row["prompt_ids"]): row["answers"] for row in rows}
        for answer in answers:
            given = known[tuple(asked[answer.group].prompt)][answer.seed]  # made-up answers have their number as seed
            answer.ids, answer.log_probs, answer.advantage = given["ids"], given["log_probs"], given["advantage"]
        super().stage(step, asked, answers, longest)


made_up.Rollouts = GivenRollouts  # type: ignore[misc]
