"""Runs of two ranks on the CPU, forked from parents that have imported all packages."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from support.killing import Forked, ForkServer


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass
class Ranks:
    """Starts runs of two ranks, as torchrun does. Use it as a context manager. One run at a time."""

    servers: list[ForkServer] = field(default_factory=lambda: [ForkServer(), ForkServer()])

    def __enter__(self) -> Ranks:
        for server in self.servers:
            server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self.servers:
            server.__exit__(*error)

    def start(self, words: list[str], folder: Path, trace: str = "trace") -> list[Forked]:
        """Start a run in `folder`. The output of all ranks is appended to `folder`/log.txt."""
        shared = {"WORLD_SIZE": str(len(self.servers)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [
            server.start(words, folder, f"{trace}-{rank}.jsonl", RANK=str(rank), LOCAL_RANK=str(rank), **shared)
            for rank, server in enumerate(self.servers)
        ]

    def run(self, words: list[str], folder: Path, trace: str = "trace") -> list[int]:
        """start(), and the exit codes."""
        return [forked.wait() for forked in self.start(words, folder, trace)]
