"""Kill runs at random instants, start them again, and count how many end bit for bit as one that was never killed.

    python scripts/faults/kill.py [--kills 200] [--modes lora,full] [--seed 0] [--json FILE] [--folder FOLDER]
    python scripts/faults/kill.py --operations --modes lora       # not at random: once before each thing that a run does to a file

Each run trains a two-layer Llama on a CPU, dies of SIGKILL one to four times and is started again by the same words. Half of
the instants are anywhere in the run, half somewhere in a phase drawn at random (tokenising, saving, ...), since most of a short
run is its start. One kill in four takes only the process itself, as the kernel does for want of memory, and leaves its
workers to notice. Compared with the undisturbed run of the same words: sha256 of the export and of the last checkpoint's weights
and optimizer state, the rest of its state, metrics.jsonl and result.json (less what a clock has a part in), and of each step
the documents that it learnt from and the random state after it. So every document is used as often as without a kill.

The runs are forked from a parent that has imported everything, which makes one cost a second or two in place of seven: what a
kill costs here is without these imports. One run of each mode is started as users do, and must end as the forked one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.endings import Ending
from support.harness import run
from support.killing import MODES, Aim, Fate, ForkServer, Kill, Reference, disturb, prepare

SHARES = {"lora": 5, "full": 4, "packed": 3, "bucketed": 3, "float16": 2, "workers": 2, "tokenisers": 1, "compiled": 1}
"""How many of the kills each mode gets, in proportion: the last three take long."""


def aim(reference: Reference, draw: random.Random) -> Aim:
    """Anywhere in the run, or somewhere in a phase of it."""
    alone = draw.random() < 0.25
    if draw.random() < 0.5:
        return Aim(share=draw.uniform(0.02, 0.9), alone=alone)
    phase = draw.choice(sorted({line["enter"] for line in reference.trace.lines if "enter" in line} - {"starting"}))
    times = len(reference.trace.spans(phase))
    return Aim(phase, draw.randint(1, max(1, times)), draw.uniform(0.0, 1.2), alone)


def same_as_users(reference: Reference, folder: Path, mode: str) -> list[str]:
    """In what a run that was not forked differs from the one that was."""
    words = prepare(folder, mode)
    done = run(words, folder, timeout=600, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
    assert done.code == 0, done.text[-3000:]
    ending = dataclasses.replace(Ending.of(folder / "run", []), steps=reference.ending.steps)  # it was not watched
    return reference.ending.differences(ending)


def campaign(mode: str, kills: int, seed: int, folder: Path, fates: list[Fate]) -> None:
    """Kill runs of `mode` until `kills` kills are done; 0: one run for each thing that it does to a file, killed before that.

    What became of each is added to `fates`. AssertionError where a run that was not killed fails.
    """
    draw = random.Random(f"{seed}/{mode}")
    with ForkServer() as server:
        whole = folder / f"{mode}-whole"
        reference = Reference.of(server, prepare(whole, mode), whole, TORCHINDUCTOR_CACHE_DIR=str(whole / "inductor"))
        uses = Counter(reference.ending.uses().values())
        operations = [line["what"] for line in reference.trace.lines if "operation" in line]
        say(
            f"{mode}: undisturbed {reference.seconds:.1f} s, {len(reference.ending.steps)} steps, {len(operations)} things done "
            f"to files; documents by how often each is used: {dict(uses)}"
        )
        assert len(uses) == 1, "not every document was used equally often"
        if differences := same_as_users(reference, folder / f"{mode}-users", mode):
            say(f"  a run that was not forked differs: {differences}")
            fates.append(Fate([], 0, differences, False))
        while (left := kills - sum(len(fate.kills) for fate in fates)) > 0 or (
            not kills and len(fates) < len(operations)
        ):
            place = folder / f"{mode}-{len(fates)}"
            words = prepare(place, mode)
            assert words == reference.words
            aims = [aim(reference, draw) for _ in range(min(left, draw.randint(1, 4)))] or [
                Aim(operation=len(fates) + 1)
            ]
            fate = disturb(server, reference, place, aims, TORCHINDUCTOR_CACHE_DIR=str(place / "inductor"))
            fates.append(fate)
            fate.twice = _twice_in_an_epoch(fate, len(reference.ending.steps) / max(uses))
            died = ", ".join(f"{kill.phase}@{kill.steps}" for kill in fate.kills) or "none, it was faster"
            before = "" if kills else f" before {operations[len(fates) - 1]}"
            say(
                f"  {place.name}: {died}{before}: "
                + ("identical" if fate.identical else f"DIFFERS {fate.differences} left={fate.left}")
            )
            if fate.identical:
                shutil.rmtree(place)


def say(text: str) -> None:
    print(text, flush=True)


def _twice_in_an_epoch(fate: Fate, steps_per_epoch: float) -> bool:
    epochs = Counter(int(kill.steps / steps_per_epoch) for kill in fate.kills if kill.steps)
    return any(count > 1 for count in epochs.values())


def told(fates: dict[str, list[Fate]], console: Console) -> None:
    """The statistics, by mode and by phase."""
    table = Table(
        "mode", "runs", "kills", "of them alone", "two in an epoch", "ended", "identical", title="Killed runs, by mode"
    )
    for mode, those in fates.items():
        kills = [kill for fate in those for kill in fate.kills]
        table.add_row(
            mode,
            *(
                str(count)
                for count in (
                    len(those),
                    len(kills),
                    sum(kill.aim.alone for kill in kills),
                    sum(fate.twice for fate in those),
                    sum(fate.code == 0 for fate in those),
                    sum(fate.identical for fate in those),
                )
            ),
        )
    console.print(table)
    every = [(kill, fate) for those in fates.values() for fate in those for kill in fate.kills]
    if not every:
        return
    table = Table(
        "died while",
        "kills",
        "identical",
        "median s lost",
        "p95",
        "most",
        "median steps again",
        "most",
        title="Kills, by what the run was doing",
    )
    phases = Counter(kill.phase for kill, _ in every)
    for phase, count in [*phases.most_common(), ("all", len(every))]:
        mine = [(kill, fate) for kill, fate in every if phase in (kill.phase, "all")]
        lost = sorted(kill.lost for kill, _ in mine)
        again = [kill.steps - kill.resumed for kill, _ in mine]
        table.add_row(
            phase,
            str(count),
            str(sum(fate.identical for _, fate in mine)),
            f"{statistics.median(lost):.2f}",
            f"{lost[math.ceil(0.95 * len(lost)) - 1]:.2f}",
            f"{lost[-1]:.2f}",
            f"{statistics.median(again):g}",
            str(max(again)),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument(
        "--operations", action="store_true", help="in place of random instants: before each thing done to a file"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="of " + ", ".join(MODES))
    parser.add_argument("--seed", type=int, default=0, help="of the instants; a machine's speed decides what they hit")
    parser.add_argument("--json", type=Path, help="also write each kill to this file")
    parser.add_argument("--folder", type=Path, help="where runs lie; those that are not identical stay there")
    given = parser.parse_args()
    modes = given.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"no mode {sorted(unknown)}")
    os.nice(10)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fxtune-kills-"))
    console, began = Console(width=130, highlight=False), time.monotonic()
    fates: dict[str, list[Fate]] = {}
    parts = sum(SHARES[mode] for mode in modes)
    for at, mode in enumerate(modes):
        done = sum(len(fate.kills) for those in fates.values() for fate in those)
        share = given.kills - done if at == len(modes) - 1 else round(given.kills * SHARES[mode] / parts)
        fates[mode] = []
        try:
            campaign(mode, 0 if given.operations else share, given.seed, folder, fates[mode])
        except AssertionError as error:  # a run that nobody killed failed, or hangs
            say(f"  {error}")
            fates[mode].append(Fate([], 1, [str(error)], False))
    told(fates, console)
    if given.json:
        given.json.write_text(
            "".join(
                json.dumps(_plain(mode, fate, kill)) + "\n"
                for mode, those in fates.items()
                for fate in those
                for kill in fate.kills
            )
        )
    bad = [fate for those in fates.values() for fate in those if not fate.identical]
    count = sum(len(fate.kills) for those in fates.values() for fate in those)
    print(
        f"{count} kills in {time.monotonic() - began:.0f} s; {len(bad)} runs ended otherwise than one that was not killed"
    )
    if not bad and not given.folder:
        shutil.rmtree(folder)
    return 1 if bad else 0


def _plain(mode: str, fate: Fate, kill: Kill) -> dict[str, Any]:
    return {"mode": mode, **dataclasses.asdict(kill), "phase": kill.phase, "identical": fate.identical}


if __name__ == "__main__":
    sys.exit(main())
