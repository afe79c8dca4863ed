"""Watches the ranks of a run. If all other ranks wait for one rank, a line names that rank. A rank that hangs is
ended, and the run with it.

fxtune's launcher watches the ranks that it started. Under torchrun and srun there is no launcher of fxtune, so ranks 0
and 1 watch all ranks through the store: if rank 0 or 1 hangs, the other reports it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from fxtune.distributed import failure
from fxtune.distributed.heartbeat import FORWARD_BACKWARD, HOST, PULSE_SECONDS, Beat, Heartbeat
from fxtune.errors import RankError

STALL_SECONDS = 45.0
"""A rank that does not move while the others wait for it is named after this time, and ended if its process is
stopped."""
STEP_SECONDS = 1800.0
"""A rank that is not stopped is ended if the others have waited for it this long in one step, or if it had no pulse
for this long. A rank may be without a pulse for minutes: with rows of a million tokens a driver's call can hold
Python's lock until the card has done all its work. Outside of steps a rank with a pulse has no limit: it may tokenize
or export for hours."""
AGAIN = "The same command goes on from the last checkpoint."


class Watch:
    """Judges the ranks by their beats, once in PULSE_SECONDS."""

    def __init__(self) -> None:
        self._pulses: dict[int, tuple[int, int]] = {}
        """The pulse of each rank, and how many rounds ago it changed."""
        self._named = -1.0

    def look(self, beats: dict[int, Beat], now: float) -> tuple[int, str] | None:
        """If a rank hangs, return (the rank to end, a sentence with the reason). If all others wait for a rank that
        still runs, print a line about it. `now`: time.monotonic()."""
        for rank, beat in beats.items():
            pulse, rounds = self._pulses.get(rank, (-1, 0))
            # Rounds are counted, not seconds: if the whole machine stood still, this process did, too.
            self._pulses[rank] = (beat.pulse, 0 if beat.pulse != pulse else rounds + 1)
        for rank, (_, rounds) in self._pulses.items():
            if rank not in beats:
                continue
            silent, stopped = rounds * PULSE_SECONDS, is_stopped(beats[rank])
            if silent >= (STALL_SECONDS if stopped else STEP_SECONDS):
                why = f"has not run for {silent:.0f} s" + " (its process is stopped)" * stopped
                return rank, _sentence(rank, beats[rank], why)
        if (waited_for := stalled(beats, now)) is None:
            return None
        rank, beat = waited_for
        if beat.doing == FORWARD_BACKWARD and now - beat.since > STEP_SECONDS:
            why = f"has not moved for {STEP_SECONDS / 60:.0f} min while the others waited for it"
            return rank, _sentence(rank, beat, why)
        if is_stopped(beat):
            return None  # the rank will be ended soon, with a line that names it
        if beat.since > self._named:
            self._named = now
            print(
                f"fxtune: all ranks have waited for rank {rank} for {now - beat.since:.0f} s: it is at {beat}.",
                file=sys.stderr,
                flush=True,
            )
        return None


def is_stopped(beat: Beat) -> bool:
    """Whether the process of a rank is stopped, by a signal or a debugger. False for other hosts and without Linux."""
    if beat.host != HOST:
        return False
    try:
        return Path(f"/proc/{beat.process}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def stalled(beats: dict[int, Beat], now: float) -> tuple[int, Beat] | None:
    """The rank that all others wait for, if it has said nothing for STALL_SECONDS."""
    busy = [(rank, beat) for rank, beat in beats.items() if not beat.waits]
    if len(busy) == 1 and len(beats) > 1 and now - max(beat.since for beat in beats.values()) > STALL_SECONDS:
        return busy[0]
    return None


def _sentence(rank: int, beat: Beat, why: str) -> str:
    return f"Rank {rank} of this run ({beat.host}, process {beat.process}) {why} at {beat}, so the run was ended."


class StoreWatch:
    """For runs without fxtune's launcher: sends this rank's beats to the store, and on ranks 0 and 1 watches the beats
    of all ranks. If the store does not answer, no rank has a pulse. A stopped process is only noticed on its own host,
    so a stopped rank of another host is ended after STEP_SECONDS."""

    def __init__(self, rank: int, processes: Sequence[tuple[int, str]], heartbeat: Heartbeat, run: int) -> None:
        """`processes`: the process id and the host of each rank; `run`: counts the runs of this process."""
        self.rank, self.heartbeat, self.run, now = rank, heartbeat, run, time.monotonic()
        self.beats = {
            rank: Beat(since=now, process=process, host=host) for rank, (process, host) in enumerate(processes)
        }
        """The last beats that the store gave."""
        self._over = threading.Event()
        # Ranks 0 and 1 have two threads, because nothing ends the wait for a store that does not answer.
        works = (self._exchange, self._watch) if rank < 2 else (self._exchange,)
        self._threads = [threading.Thread(target=work, name="fxtune-rank-watch", daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads. Python aborts at its exit if a thread is then in a call of torch, such as to the store."""
        self._over.set()
        until = time.monotonic() + failure.PATIENCE.total_seconds()
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0))
            if thread.is_alive():
                failure.keep_connections()

    def _exchange(self) -> None:
        pulse = 0
        try:
            store = failure.find_store(timedelta(minutes=1), opens=False)
            while not self._over.wait(PULSE_SECONDS):
                pulse += 1
                beat = self.heartbeat.last
                age = round(time.monotonic() - beat.since, 3)
                mine = [beat.step, beat.doing, beat.waits, age, os.getpid(), pulse, socket.gethostname()]
                store.set(self._key(self.rank), json.dumps(mine))
                if self.rank < 2:
                    self.beats = self._read(store)
        except (RuntimeError, ValueError):  # rank 0 is gone, and the next collective fails
            self._over.set()

    def _watch(self) -> None:
        watch = Watch()
        while not self._over.wait(PULSE_SECONDS):
            if verdict := watch.look(self.beats, time.monotonic()):
                self._end(*verdict)

    def _key(self, rank: int) -> str:
        return f"beat {self.run}/{rank}"

    def _read(self, store: Any) -> dict[int, Beat]:
        written = [rank for rank, beat in self.beats.items() if beat.pulse or store.check([self._key(rank)])]
        beats = dict(self.beats)
        for rank, text in zip(written, store.multi_get([self._key(rank) for rank in written]), strict=True):
            step, doing, waits, age, *rest = json.loads(text)
            beats[rank] = Beat(step, doing, waits, time.monotonic() - age, *rest)
        return beats

    def _end(self, rank: int, why: str) -> None:
        error = RankError(f"{why} {AGAIN}")
        if rank == 0 or failure.announce(error).rank == self.rank:  # the store of rank 0 may not answer
            print(f"fxtune: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
