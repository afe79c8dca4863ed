"""Exchanges values between ranks from a thread beside the training loop.

Every rank must call the collectives of a process group in the same order, and a thread's collectives have no fixed
place among the collectives of the loop. So the thread has a separate gloo group. Its connections are between CPUs, and
never wait for a GPU. A rank that dies closes its connections, and the other ranks get a LostRankError at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from fxtune.distributed.world import PATIENCE, World
from fxtune.errors import LostRankError, first_line

Result = TypeVar("Result")


class BackgroundGroup:
    """A group of the ranks of `world`, for one thread at a time. All ranks make it together. Without `world`: a group
    of this process alone."""

    def __init__(self, world: World | None = None) -> None:
        self.rank, self.size = (world.rank, world.size) if world else (0, 1)
        self._heartbeat = world.heartbeat if world else None
        self._group: Any = None
        if world and world.size > 1:  # agree() fails at once if a rank is gone; new_group() waits for hours
            world.agree(0, "making a group of the ranks")
            with world.waiting("making a group of the ranks"):
                self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        hosts = self.gather(socket.gethostname(), "counting the ranks of each host")
        self.on_this_host = hosts.count(hosts[self.rank])
        """How many ranks share the memory of this host."""
        self.name = f"rank {self.rank} ({hosts[self.rank]})" if self.size > 1 else ""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def gather(self, value: Result, doing: str) -> list[Result]:
        """Return a list of every rank's `value`, by rank, on all ranks. Raises LostRankError if a rank is gone."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise LostRankError(
                f"Rank {self.rank} of {self.size} ({socket.gethostname()}) lost another rank while {doing}: "
                f"{first_line(error)}. The same command goes on from the last checkpoint."
            ) from error
        return values

    def together(self, work: Callable[[], Result], doing: str, expected: type[Exception] = OSError) -> list[Result]:
        """Run work() on every rank, and return the results of all ranks, by rank.

        If work() raises an `expected` error on a rank, all ranks raise it, with the same text. After any other error
        only its rank raises it, and the other ranks raise LostRankError.
        """
        if self.size == 1:
            return [work()]
        error: BaseException | None = None
        result: Any = None
        try:
            result = work()
        except BaseException as problem:  # noqa: BLE001  the other ranks wait for the outcome
            error = problem
        mine = None if error is None else (isinstance(error, expected), str(error) or type(error).__name__)
        outcomes = self.gather((result, mine), doing)
        failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None}
        if not failures:
            return [result for result, _ in outcomes]
        if error is not None and not isinstance(error, expected):
            raise error
        rank, (usual, words) = min(failures.items(), key=lambda item: (item[1][0], item[0]))
        if usual:
            raise expected(words) from error
        raise LostRankError(
            f"Rank {rank} failed while {doing}: {words}. The same command goes on from the last checkpoint."
        )

    @contextmanager
    def waiting(self, doing: str) -> Iterator[None]:
        """Note that in the body the training loop waits for the thread, and so for other ranks."""
        if self._heartbeat is None or self.size == 1:
            yield
            return
        with self._heartbeat.waiting(doing):
            yield
