"""Runs the jobs of a study at the same time, each on a core of its own, and keeps their results in a JSON file.

A job is a process. os.sched_setaffinity pins it to its core and torch has one thread, so no job takes another's core.
Of two hardware threads that share a core, one is used as long as there are other cores. Jobs still share the caches,
the memory's bandwidth and the chip's clock, so their seconds of wall clock are those of an idle core in a busy machine.
Processor seconds are measured, too.

The JSON file has an entry for each job that is done. A call with --minutes starts a job only if there is time for the
longest one so far, and stops the jobs that still run when the time is over. The next call does what is left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GRACE = 20.0
"""Seconds for a process to save its state when the time is over."""
BEGAN = time.monotonic()
PARTIAL = "unfinished"
"""The key of an entry whose job was stopped by the time limit. The next call continues it."""


@dataclass(frozen=True)
class Job:
    """A process that prints its result as its last line of output: an object of JSON."""

    key: str
    """Its name in the JSON file."""
    command: Sequence[str]
    resumes: bool = False
    """The process continues the work of one that was stopped, so the seconds of both are added."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all studies share."""
    parser.add_argument("--json", type=Path, required=True, help="the results; the same call again continues")
    parser.add_argument(
        "--jobs", type=int, default=1, help="jobs at the same time, each on its own core (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes (%(default)s)")


def run_jobs(
    jobs: Sequence[Job], options: argparse.Namespace, report: Callable[[dict[str, Any]], str]
) -> dict[str, Any]:
    """Run the jobs that the file lacks. Returns all of its entries. `report`: a line for a finished job.

    Each entry has what the job printed, `wall_seconds` and `processor_seconds` of its processes from start to end.
    Ends the script if a job failed, after the others.
    """
    found = read(options.json)
    waiting = [job for job in jobs if done(found, job.key) is None]
    free = idle_cores(options.jobs) if waiting else []
    running: list[_Process] = []
    failures, longest = [], 0.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the jobs, too
    try:
        while waiting or running:
            left = BEGAN + 60 * options.minutes - time.monotonic()
            while waiting and free and left > (0.0 if waiting[0].resumes else longest):
                running.append(_Process(waiting.pop(0), free.pop(0)))
            if left <= 0 or not running:
                break
            time.sleep(0.05)
            for process in [each for each in running if each.poll()]:
                running.remove(process)
                free.append(process.core)
                longest = max(longest, process.wall_seconds)
                key = process.job.key
                if process.code:
                    failures.append(f"{key} ended with {process.code}: {process.errors()[-2000:]}")
                    continue
                found[key] = {**process.result(), **process.seconds(found.get(key, {}))}
                write(options.json, found)
                print(f"{key}: {report(found[key])}", flush=True)
    finally:
        end(running)
        for process in running:
            if process.job.resumes and process.code == 0 and process.has_result():  # it ended within GRACE
                found[process.job.key] = {**process.result(), **process.seconds(found.get(process.job.key, {}))}
                write(options.json, found)
            elif process.job.resumes:
                found[process.job.key] = {PARTIAL: True, **process.seconds(found.get(process.job.key, {}))}
                write(options.json, found)
    if missing := [job.key for job in jobs if done(found, job.key) is None]:
        print(
            f"Not done yet: {len(missing)} of {len(jobs)} ({missing[0]} ...). The same call again continues.",
            flush=True,
        )
    if failures:
        raise SystemExit("\n".join(failures))
    return found


def done(found: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """The entry of a job that is done."""
    entry = found.get(key)
    return None if entry is None or PARTIAL in entry else entry


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def forget(file: Path, key: str) -> None:
    """Have a job done again."""
    found = read(file)
    if found.pop(key, None):
        write(file, found)


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Replace the file, so that a kill leaves the old one or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_name(f".{file.name}")
    staging.write_text(json.dumps(found, indent=1))
    os.replace(staging, file)


def idle_cores(count: int) -> list[int]:
    """`count` hardware threads that this process may use: one of each core first. Ends the script if there are fewer."""
    allowed = sorted(os.sched_getaffinity(0))
    if count > len(allowed):
        raise SystemExit(f"--jobs {count}, but this process may use {len(allowed)} cores")
    first, second, taken = [], [], set[str]()
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        name = str(core)
        with suppress(OSError):
            name = siblings.read_text().strip()
        (second if name in taken else first).append(core)
        taken.add(name)
    if count > len(first):
        print(f"{count} jobs share {len(first)} cores of two hardware threads each: seconds of wall clock are longer.")
    return [*first, *second][:count]


class _Process:
    """A job that runs."""

    def __init__(self, job: Job, core: int) -> None:
        self.job, self.core = job, core
        self.output, self.error = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115  closed with it
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            list(job.command),
            stdout=self.output,
            stderr=self.error,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, [core]),
        )
        self.code, self.wall_seconds, self.processor_seconds = 0, 0.0, 0.0

    def poll(self) -> bool:
        """Whether it has ended."""
        pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
        if not pid:
            return False
        self.code = self.process.returncode = os.waitstatus_to_exitcode(status)
        self.wall_seconds = time.monotonic() - self.began
        self.processor_seconds = used.ru_utime + used.ru_stime  # with those of its own children
        return True

    def seconds(self, before: Mapping[str, Any]) -> dict[str, float]:
        """Its seconds. If it resumes, those of the calls `before` are added."""
        return {
            name: round(getattr(self, name) + (before.get(name, 0.0) if self.job.resumes else 0.0), 3)
            for name in ("wall_seconds", "processor_seconds")
        }

    def result(self) -> dict[str, Any]:
        self.output.seek(0)
        return dict(json.loads(self.output.read().splitlines()[-1]))

    def has_result(self) -> bool:
        return self.process.returncode is not None and os.fstat(self.output.fileno()).st_size > 0

    def errors(self) -> str:
        self.error.seek(0)
        return self.error.read()


def end(processes: Sequence[_Process]) -> None:
    """End them and their children. They may save their state first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.process.pid, number)
        until = time.monotonic() + GRACE
        while (alive := [each for each in processes if each.process.returncode is None and not each.poll()]) and (
            time.monotonic() < until
        ):
            time.sleep(0.05)
        processes = alive


def again(script: str, *words: str) -> list[str]:
    """The command of a job that is done by the script itself."""
    return [sys.executable, str(Path(script).resolve()), "--run", *words]
