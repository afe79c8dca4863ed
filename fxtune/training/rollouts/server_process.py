"""Starts a model server (vLLM, llama-server) as a separate process, which never outlives this process."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fxtune.errors import HardwareError
from fxtune.system.process.process_group import end_process, start_process
from fxtune.system.terminal.progress import phase
from fxtune.training.rollouts.client import Client


def start_server(
    name: str, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start the command `words` on a free port, and wait until it answers. Returns the process, which the caller ends,
    and its URL. `name`: of the server, for messages. Raises HardwareError if it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [*words, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("ab") as output:
        process = start_process(words, environment, foreign=True, stdout=output, stderr=output)
    client = Client(f"http://127.0.0.1:{port}", 5)
    try:
        with phase(f"Starting {name}"):
            if client.wait(lambda: process.poll() is not None, pause=0.5):
                return process, client.url
    except BaseException:  # a signal
        end_process(process)
        raise
    end_process(process)
    raise HardwareError(f"{name} did not start. The end of {log}:\n{end_of(log)}")


def end_of(log: Path) -> str:
    """The last lines of a log, after the first error if it is further up: the cause of the others."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([*[line for line in lines[:-15] if "Error: " in line][:1], *lines[-15:]])
