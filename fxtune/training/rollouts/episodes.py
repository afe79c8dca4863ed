"""Answers of one or several turns: an answer continues after the results of its tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from fxtune.config.root import SamplerConfig
from fxtune.data.batches.segments import splitmix64
from fxtune.data.chat.tool_turns import ToolTurns
from fxtune.training.rollouts.folder import Answer, Asked
from fxtune.training.rollouts.scoring import Group, RewardWorkers

KEYS = count(1)
"""Group.key of the next group."""


@dataclass(frozen=True)
class Request:
    """A prompt for one turn of an answer."""

    prompt: list[int]
    seed: int
    """From 0 to 2^63 - 1."""
    images: tuple[Any, ...]
    room: int
    """The maximum number of tokens of the turn."""


@dataclass(frozen=True)
class Sampled:
    """One turn of an answer."""

    ids: list[int]
    """The tokens, with the token that ended the turn."""
    log_probs: list[float]
    """The log-probability of each token at the sampler's temperature."""
    finished: bool
    """Whether the turn ended by itself."""


def seed_of(*key: int) -> int:
    """A seed from 0 to 2^63 - 1 that depends on `key` alone."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = splitmix64(state + np.array([part % (1 << 64)], np.uint64))
    return int(state[0] >> np.uint64(1))


@dataclass
class Episodes:
    """Answers that a sampler writes turn by turn. Only rank 0 needs groups, workers and tools."""

    asked: Sequence[Asked]
    """The prompts."""
    seeds: Sequence[int]
    """The seed of each answer. Each prompt has the same number of answers."""
    config: SamplerConfig
    groups: list[Group] = field(default_factory=list)
    workers: RewardWorkers | None = None
    tools: ToolTurns | None = None
    """None: each answer has one turn."""
    answers: list[Answer] = field(default_factory=list)

    def begin(self) -> list[Request]:
        """The requests for the first turn of all answers. A second call starts over."""
        self.groups = [replace(group, key=next(KEYS)) for group in self.groups]
        self._each = len(self.seeds) // len(self.asked)
        self.answers = [Answer("", at // self._each, [], [], False, seed) for at, seed in enumerate(self.seeds)]
        self._open, self._turns = [*range(len(self.answers))], 0
        return [self._request(at) for at in self._open]

    def _request(self, at: int) -> Request:
        asked, answer = self.asked[at // self._each], self.answers[at]
        seed = seed_of(answer.seed, self._turns) if self._turns else answer.seed
        room = self.config.max_tokens - len(answer.ids)
        return Request([*asked.prompt, *answer.ids], seed, asked.images, room)

    def go_on(self, turns: Sequence[Sampled]) -> list[Request]:
        """Add a turn to each open answer, and call its tools. Returns the next requests; empty: all are complete."""
        calls: dict[int, dict[int, Any]] = {}
        for at, turn in zip(self._open, turns, strict=True):
            answer = self.answers[at]
            answer.ids += turn.ids
            answer.log_probs += turn.log_probs
            answer.finished = turn.finished
            if self.tools is not None and self.groups[answer.group].environment:
                message, found = self.tools.read(turn.ids)
                answer.messages.append(message)
                if found and turn.finished:
                    calls.setdefault(answer.group, {})[at % self._each] = found
                    answer.finished = False  # until the next turn
        self._open, self._turns = [], self._turns + 1
        if self.tools is None or self.workers is None or self._turns == self.config.turns:
            return []
        asked = [replace(self.groups[group], calls=own) for group, own in calls.items()]
        for group, scores in zip(calls, self.workers.score(asked), strict=True):
            for number, results in scores.replies.items():
                answer, (messages, ids) = self.answers[group * self._each + number], self.tools.write(results)
                if len(answer.ids) + len(ids) < self.config.max_tokens:
                    answer.ids += ids
                    answer.log_probs += [None] * len(ids)
                    answer.messages += messages
                    self._open.append(group * self._each + number)
        return [self._request(at) for at in self._open]
