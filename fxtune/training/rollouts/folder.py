"""Rollouts on the disk: the answers of each step, written before the model learns from them.

    RUN/rollouts/step-00000012/  a token table (data/tokenized/table.py) with a document for each answer to learn
                                 from: its prompt, and its tokens, which are supervised
                                 numbers.npy     each token's log-probability under the sampler, and its advantage
                                 answers.jsonl   all answers of the step, with their rewards
                                 step.json       figures of the step, and what wrote the answers

A resumed run reads these steps again, so it learns from the same answers, whatever wrote them.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fxtune.checkpoint.run_folder import ROLLOUT_ANSWERS as ANSWERS
from fxtune.data.chat.encode import Document
from fxtune.data.images.placed import PlacedImage
from fxtune.data.images.processor import ImageProcessor
from fxtune.data.tokenized.table import ShardBuilder, TableWriter, TokenTable
from fxtune.errors import StorageError, readable, writing
from fxtune.system.files.atomic_files import json_or_empty, read_json, replace_text, sync

NUMBERS, STEP, AHEAD = "numbers.npy", "step.json", "ahead.json"
DIGITS = 5
"""Decimals of a log-probability in ANSWERS."""
RECORD = np.dtype([("sampled", "<f4"), ("advantages", "<f4")])
"""The numbers of a token. The names are fields of Batch."""


@dataclass
class Answer:
    where: str
    """File and line of the prompt's row."""
    group: int
    """The number of the prompt in its step."""
    ids: list[int]
    """The sampled tokens, with the token that ended the answer, and between turns the results of tools."""
    log_probs: list[float | None]
    """The log-probability that the sampler gave to each of them. None for tokens that were not sampled."""
    finished: bool
    """Whether the answer ended by itself. False: sampler.max_tokens cut it off."""
    seed: int
    text: str = ""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """By the name of the reward; None if it does not apply."""
    reward: float = 0.0
    """The weighted sum, with the punishment of a long answer."""
    advantage: float | None = None
    """None if the model does not learn from this answer."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the rewards have logged about the answer."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The turns of an answer that may call tools."""

    @property
    def length(self) -> int:
        """The number of sampled tokens."""
        return len(self.log_probs) - self.log_probs.count(None)

    @property
    def is_judged(self) -> bool:
        """Whether a reward applies to the answer. True if the recipe has no rewards."""
        return not self.rewards or any(value is not None for value in self.rewards.values())


@dataclass(frozen=True)
class Asked:
    """A prompt in tokens, with its images."""

    prompt: list[int]
    images: tuple[Any, ...] = ()
    placed: tuple[PlacedImage, ...] = ()

    @staticmethod
    def of(table: TokenTable, document: int) -> Asked:
        """The prompt that is a document of `table`."""
        start, end = (int(at) for at in table.offsets[document : document + 2])
        placed = tuple(table.placed_images(start, end - start))
        return Asked(table.ids[start:end].tolist(), tuple(each.image for each in placed), placed)


class Rollouts:
    """The steps in `folder`. `images`: the processor of a model that reads images."""

    def __init__(self, folder: Path, images: ImageProcessor | None = None) -> None:
        self.folder, self.images = folder, images

    def step_folder(self, step: int) -> Path:
        """The folder of `step`, which counts from 0. Folders count from 1, as log lines do."""
        return self.folder / f"step-{step + 1:08d}"

    def has(self, step: int) -> bool:
        return (self.step_folder(step) / STEP).exists()

    def table(self, step: int) -> TokenTable:
        """The answers of `step` to learn from. Raises StorageError if they cannot be read."""
        folder = self.step_folder(step)
        try:
            return TokenTable(folder, f"the rollouts of step {step + 1}", {"stored": NUMBERS}, self.images)
        except (OSError, ValueError, KeyError, EOFError, AssertionError) as error:
            raise StorageError(
                f"{folder} cannot be read ({error}). Remove this folder and the later ones: their answers are "
                "written again, and the run differs from here on."
            ) from error

    def figures(self, step: int) -> dict[str, Any]:
        """The content of step.json. Raises StorageError if it cannot be read."""
        with readable(str(self.step_folder(step) / STEP), "Remove its folder."):
            return read_json(self.step_folder(step) / STEP)

    def write_ahead(self, step: int, weights: str) -> None:
        """Keep the name of the weights that sample `step`, so that a resumed run can use them. Raises StorageError."""
        with self._writing(self.folder / AHEAD):
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / AHEAD, json.dumps({"step": step, "weights": weights}))

    def ahead(self, step: int) -> str:
        """The weights of write_ahead(); empty if they are unknown."""
        found = json_or_empty(self.folder / AHEAD)
        return str(found["weights"]) if found.get("step") == step else ""

    def remove(self, step: int) -> None:
        shutil.rmtree(self.step_folder(step), ignore_errors=True)

    def clear(self) -> None:
        """Remove all files of an earlier run that failed."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def answers(self, step: int) -> Iterator[dict[str, Any]]:
        """Yield each answer of `step`, with the fields of Answer."""
        with (self.step_folder(step) / ANSWERS).open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def stage(self, step: int, asked: Sequence[Asked], answers: Sequence[Answer], longest: int | None = None) -> None:
        """Write the token table of a step, which counts only after finish(). `asked`: the prompts by the answers'
        `group`. `longest`: answers to a prompt share it in rows of so many tokens; None: each answer has its own
        prompt. Raises StorageError."""
        staging = self._staging(step)
        with self._writing(staging):
            shutil.rmtree(staging, ignore_errors=True)
            with TableWriter(staging, []) as writer:
                shard = ShardBuilder()
                for group in _groups(_learned(answers), asked, longest):
                    documents = [_document(asked[answer.group], answer) for answer in group]
                    shard.add(documents, group[0].seed, None if longest is None else [math.nan] * len(group))
                writer.append(shard.shard())
                writer.finish(name=staging.name, format="prompt")

    def staged(self, step: int) -> TokenTable:
        """The token table that stage() has written."""
        return TokenTable(self._staging(step), f"the rollouts of step {step + 1}", image_processor=self.images)

    def finish(
        self,
        step: int,
        answers: Sequence[Answer],
        weights: np.ndarray,
        figures: Mapping[str, Any],
        teacher: np.ndarray | None = None,
        teacher_weight: float = 1.0,
    ) -> None:
        """Write the other files of a staged step, after which the step exists. `weights`: the factor of each answer's
        advantage, float64 [answers with an advantage]. `teacher`: the log-probability that a teacher gives to each
        sampled token, float32 [tokens of the table]. Raises StorageError."""
        final, staging = self.step_folder(step), self._staging(step)
        with self._writing(final):
            table = self.staged(step)
            numbers = np.zeros(len(table.ids), RECORD)
            ends = np.asarray(table.offsets[1:])
            for answer, weight, end in zip(_learned(answers), weights.tolist(), ends.tolist(), strict=True):
                own = slice(end - len(answer.ids), end)
                numbers["sampled"][own] = sampled = np.array(answer.log_probs, np.float64)
                advantages = np.full(len(answer.ids), answer.advantage)
                if teacher is not None:
                    advantages += teacher_weight * (teacher[own] - sampled)
                numbers["advantages"][own] = weight * advantages
            np.save(staging / NUMBERS, numbers)
            lines = [json.dumps(_as_json(answer), ensure_ascii=False) for answer in answers]
            # A call that the model wrote may hold a lone surrogate. This writes it as JSON's \uXXXX.
            (staging / ANSWERS).write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
            (staging / STEP).write_text(json.dumps(figures, indent=1), encoding="utf-8")
            for name in (NUMBERS, ANSWERS, STEP):
                sync(staging / name)
            sync(staging)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(staging, final)
            sync(self.folder)

    def _staging(self, step: int) -> Path:
        final = self.step_folder(step)
        return final.with_name(f".{final.name}")

    def _writing(self, folder: Path) -> AbstractContextManager[None]:
        return writing(f"{folder} cannot be written", "or set run.dir to another disk")


def _as_json(answer: Answer) -> dict[str, Any]:
    """The fields of an answer. Log-probabilities are rounded, because NUMBERS has them."""
    return {**asdict(answer), "log_probs": [value and round(value, DIGITS) for value in answer.log_probs]}


def _learned(answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.advantage is not None]


def _document(asked: Asked, answer: Answer) -> Document:
    ids = [*asked.prompt, *answer.ids]
    supervised = [False] * len(asked.prompt) + [value is not None for value in answer.log_probs]
    return Document(ids, supervised, images=asked.placed)


def _groups(answers: Sequence[Answer], asked: Sequence[Asked], longest: int | None) -> Iterator[list[Answer]]:
    """Yield the answers that are in one row, in order: answers to one prompt that fit `longest` tokens with it, or
    each answer by itself if `longest` is None."""
    group, tokens = list[Answer](), 0
    for answer in answers:
        own = len(answer.ids) + 1  # with the last token of the prompt
        if group and (longest is None or group[0].group != answer.group or tokens + own > longest):
            yield group
            group = []
        tokens = tokens + own if group else len(asked[answer.group].prompt) + own - 1
        group.append(answer)
    if group:
        yield group
