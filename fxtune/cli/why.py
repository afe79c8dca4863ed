"""`fxtune why RUN`: says where the time of a run went, largest part first, and which keys would save some of it.

    fxtune why quickstart                # the newest of runs/quickstart, runs/quickstart-2, ...; also while it trains
    fxtune why runs/a --json why.json

Each sentence gives a share of the run's time, from times that the run measured. Parts that it did not measure are left
out. With several ranks a step lasts as long as the step of the slowest rank.
"""

from __future__ import annotations

from dataclasses import asdict

from fxtune.cli.answer import ANSWER
from fxtune.outputs.run_output import run_folder
from fxtune.reports.bottlenecks import find_bottlenecks, sentences
from fxtune.reports.run_files import RunFiles, as_written
from fxtune.reports.time_shares import time_shares
from fxtune.system.terminal.console import say


def run(run: str) -> None:
    """Print the sentences. Raises ConfigError if `run` means no run, StorageError if its files cannot be read."""
    files = RunFiles(run_folder(run))
    with as_written(files.folder):
        lines, parts = list(sentences(files)), [asdict(part) for part in time_shares(files)]
        findings = [asdict(finding) for finding in find_bottlenecks(files)]
    say(*lines)
    ANSWER.put({"run": str(files.folder), "parts": parts, "findings": findings})
