"""Answers of one turn, or of several: while an answer calls tools, it goes on after their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np

from fxtune.config.root import SamplerConfig
from fxtune.data.batches.segments import splitmix64
from fxtune.data.chat.tool_turns import ToolCall, ToolTurns
from fxtune.training.rollouts.scoring import Group, RewardWorkers

KEYS = count(1)
"""For Group.key."""


@dataclass(frozen=True)
class Request:
    """A prompt for one turn of an answer."""

    prompt: list[int]
    seed: int
    """From 0 to 2^63 - 1."""
    images: tuple[Any, ...] = ()
    room: int | None = None
    """The tokens that are left for the answer; None: sampler.max_tokens."""


@dataclass
class Sampled:
    ids: list[int]
    """The tokens of the answer, with the token that ended it. Of several turns: with the results of tools."""
    log_probs: list[float | None]
    """The log-probability of each token at the sampler's temperature. None for tokens that were not sampled."""
    finished: bool
    """Whether the answer ended by itself."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The turns of an answer with an environment."""


def seed_of(*key: int) -> int:
    """A seed from 0 to 2^63 - 1 that depends on `key` alone."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = splitmix64(state + np.array([part % (1 << 64)], np.uint64))
    return int(state[0] >> np.uint64(1))


class Episodes:
    """The answers to `requests`, the same number for each of `groups`. Without `tools` each has one turn. Rank 0 alone
    needs groups and calls go_on()."""

    def __init__(
        self,
        requests: Sequence[Request],
        config: SamplerConfig,
        groups: Sequence[Group] = (),
        tools: ToolTurns | None = None,
        workers: RewardWorkers | None = None,
    ) -> None:
        self.requests, self.config, self.groups, self.tools, self.workers = requests, config, groups, tools, workers
        self.each = len(requests) // max(len(groups), 1)

    def begin(self) -> Sequence[Request]:
        """The first turn of all answers. A second call begins again."""
        self.groups = [replace(group, key=next(KEYS)) for group in self.groups]
        self.sampled = [Sampled([], [], False) for _ in self.requests]
        self._open: Sequence[int] = range(len(self.requests))
        self._turns = 0
        return self.requests

    def go_on(self, answers: Sequence[Sampled]) -> list[Request]:
        """Add a turn to the answers that called tools, and call their tools. Returns the prompts of the next turn;
        none if all answers are complete."""
        calls: dict[int, dict[int, list[ToolCall]]] = {}
        for at, turn in zip(self._open, answers, strict=True):
            own, group, number = self.sampled[at], at // self.each, at % self.each
            own.ids, own.log_probs, own.finished = own.ids + turn.ids, own.log_probs + turn.log_probs, turn.finished
            if self.tools is not None and self.groups[group].environment:
                message, found = self.tools.read(turn.ids)
                own.messages.append(message)
                if found and turn.finished:
                    own.finished = False
                    calls.setdefault(group, {})[number] = found
        self._turns += 1
        self._open, requests = list[int](), list[Request]()
        if not calls or self._turns == self.config.turns:
            return []
        assert self.workers is not None
        asked = [replace(self.groups[group], calls=own) for group, own in calls.items()]
        for group, scores in zip(calls, self.workers.score(asked), strict=True):
            for number, results in scores.replies.items():
                requests += self._next(group * self.each + number, results)
        return requests

    def _next(self, at: int, results: list[tuple[str, str]]) -> list[Request]:
        """The prompt of an answer's next turn. None if sampler.max_tokens leaves no room for a turn."""
        assert self.tools is not None
        own, request, added = self.sampled[at], self.requests[at], self.tools.encode(results)
        room = self.config.max_tokens - len(own.ids) - len(added)
        if room < 1:
            return []
        own.ids, own.log_probs = own.ids + added, own.log_probs + [None] * len(added)
        own.messages += [{"role": "tool", "name": name, "content": text} for name, text in results]
        self._open = [*self._open, at]
        return [Request([*request.prompt, *own.ids], seed_of(request.seed, self._turns), request.images, room)]
