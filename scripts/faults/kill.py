"""Kills runs at random instants, restarts them, and counts how many end bit for bit like a run that was never killed.

    python scripts/faults/kill.py [--kills 200] [--modes lora,full] [--seed 0] [--json FILE] [--folder FOLDER]
    python scripts/faults/kill.py --operations --modes lora  # not at random: one kill before each file operation of a run
    python scripts/faults/kill.py --ranks 2 --kills 100      # runs of two ranks: a rank, the launcher or all are killed
    python scripts/faults/kill.py --ranks 2 --shard 2        # and full fine-tuning with Muon whose weights they divide
    python scripts/faults/kill.py --ranks 2 --modes dpo      # and pairs of answers
    python scripts/faults/kill.py --device cuda --modes kto  # on a card, with the defaults of run.deterministic
    python scripts/faults/kill.py --device cuda --modes lora --set 'techniques=[lora,fast]' --ranks 2

Each run trains a two-layer Llama on a CPU, or with --device cuda on cards. SIGKILL ends it one to four times, and the same command starts it again.
Half of the instants fall anywhere in the run, half into a random phase (tokenising, saving, ...), because most of a
short run is its start. One kill in four ends only the main process, like the kernel's out-of-memory killer, and its
workers must notice that.

Each run is compared with the undisturbed run of the same command: sha256 of the export and of the last checkpoint's
weights and optimizer state, the rest of its state, metrics.jsonl and result.json (without figures that depend on a
clock), and for each step its documents and the random state after it. So every document is used as often as without a
kill.

The runs have the environment of a user: torch chooses the number of threads. They are forked from a parent that has
imported all packages. A run then takes one or two seconds instead of seven,
and the reported costs of a kill do not include the imports. For each mode one run is started as users start it; its
result must equal the forked run's result.

With --ranks or on cards the runs are started as users start them. After each kill every process of the run must be gone within 60
seconds and its port free; a killed rank must be named by one message, with exit code 7. The same command resumes the
run.
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
from support.killing import MODES, Aim, ForkServer, Kill, Outcome, Reference, disturb, prepare
from support.rank_kills import RankKill, finish, kill_once, steps_logged

SHARES = {
    "lora": 5,
    "full": 4,
    "packed": 3,
    "bucketed": 3,
    "float16": 2,
    "early": 2,
    "growing": 2,
    "growing-padded": 1,
    "workers": 2,
    "tokenisers": 1,
    "dpo": 2,
    "dpo-stored": 2,
    "kto": 2,
    "reward": 2,
    "images": 1,
    "hybrid": 1,
    "mixture": 1,
    "compiled": 1,
    "rollouts": 2,
    "distilled": 1,
    "classifier": 1,
    "embedding": 1,
}
"""Relative number of kills per mode. Modes `workers`, `tokenisers` and `compiled` are slow."""


def aim(reference: Reference, draw: random.Random) -> Aim:
    """A random instant: anywhere in the run, or inside a random phase."""
    alone = draw.random() < 0.25
    if draw.random() < 0.5:
        return Aim(share=draw.uniform(0.02, 0.9), alone=alone)
    phase = draw.choice(sorted({line["enter"] for line in reference.trace.lines if "enter" in line} - {"starting"}))
    times = len(reference.trace.spans(phase))
    return Aim(phase, draw.randint(1, max(1, times)), draw.uniform(0.0, 1.2), alone)


def same_as_users(reference: Reference, folder: Path, mode: str) -> list[str]:
    """The differences between a run that was not forked and the forked run."""
    words = prepare(folder, mode)
    done = run(words, folder, timeout=600, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
    assert done.code == 0, done.text[-3000:]
    ending = dataclasses.replace(Ending.of(folder / "run", []), steps=reference.ending.steps)  # it wrote no trace
    return reference.ending.differences(ending)


def campaign(mode: str, kills: int, seed: int, folder: Path, outcomes: list[Outcome]) -> None:
    """Run and kill until `kills` kills are done. With `kills` 0, run once for each file operation and kill before it.

    The result of each run is added to `outcomes`. Raises AssertionError if a run that was not killed fails.
    """
    draw = random.Random(f"{seed}/{mode}")
    with ForkServer() as server:
        place = folder / f"{mode}-reference"
        reference = Reference.of(server, prepare(place, mode), place, TORCHINDUCTOR_CACHE_DIR=str(place / "inductor"))
        uses = Counter(reference.ending.uses().values())
        operations = [line["what"] for line in reference.trace.lines if "operation" in line]
        print_now(
            f"{mode}: undisturbed {reference.seconds:.1f} s, {len(reference.ending.steps)} steps, {len(operations)} file "
            f"operations; documents by number of uses: {dict(uses)}"
        )
        # A run that stops early goes back to its best checkpoint, and ends within an epoch. In `kto` two answers to a
        # prompt have the same mismatched document.
        assert len(uses) == 1 or mode in ("early", "kto"), "not every document was used equally often"
        if differences := same_as_users(reference, folder / f"{mode}-users", mode):
            print_now(f"  a run that was not forked differs: {differences}")
            outcomes.append(Outcome([], 0, differences, False))
        while (left := kills - sum(len(outcome.kills) for outcome in outcomes)) > 0 or (
            not kills and len(outcomes) < len(operations)
        ):
            place = folder / f"{mode}-{len(outcomes)}"
            words = prepare(place, mode)
            assert words == reference.words
            aims = [aim(reference, draw) for _ in range(min(left, draw.randint(1, 4)))] or [
                Aim(operation=len(outcomes) + 1)
            ]
            outcome = disturb(server, reference, place, aims, TORCHINDUCTOR_CACHE_DIR=str(place / "inductor"))
            outcomes.append(outcome)
            outcome.twice = _twice_in_an_epoch(outcome, len(reference.ending.steps) / max(uses))
            died = ", ".join(f"{kill.phase}@{kill.steps}" for kill in outcome.kills) or "no kill, the run ended first"
            before = "" if kills else f" before {operations[len(outcomes) - 1]}"
            print_now(
                f"  {place.name}: {died}{before}: "
                + ("identical" if outcome.identical else f"DIFFERS {outcome.differences} left={outcome.left}")
            )
            if outcome.identical:
                shutil.rmtree(place)


def campaign_of_ranks(given: argparse.Namespace, mode: str, folder: Path, rows: list[dict[str, Any]]) -> int:
    """Kill processes of runs that are started as users start them until as many kills are done as asked. Returns how
    many runs went wrong."""
    ranks, shard, kills = given.ranks, given.shard, given.kills
    draw, bad, number = random.Random(f"{given.seed}/ranks"), 0, 0
    # Without packing both answers of a pair take a row of one micro-batch.
    micro = 2 if any(word.startswith("objective=") for word in MODES[mode]) else 1
    keys = [f"train.micro_batch_size={micro}", f"train.global_batch_size={max(4, micro * ranks)}"]
    keys += [f"run.gpus={ranks}", f"parallel.shard={shard}", f"run.device={given.device}", *given.set]
    title = f"{mode}, {ranks} rank{'s' * (ranks > 1)}" + (f", weights divided by {shard}" if shard > 1 else "")

    def words_in(place: Path) -> list[str]:
        return [*prepare(place, mode), *keys]

    reference, seconds = finish(words_in(folder / "reference"), folder / "reference")
    steps = steps_logged(folder / "reference")
    print_now(f"{title}: undisturbed {seconds:.1f} s, {steps} steps")
    while len(rows) < kills:
        place = folder / f"run-{number}"
        words, number = words_in(place), number + 1
        done: list[RankKill] = []
        for _ in range(min(kills - len(rows), draw.randint(1, 4))):
            if kill := kill_once(words, place, draw, seconds, steps):
                done.append(kill)
                print_now(
                    f"  {place.name}: {kill.victim} killed after step {kill.steps}, all gone {kill.seconds:.1f} s later"
                )
        ending, _ = finish(words, place)
        wrong = [*(problem for kill in done for problem in kill.wrong), *reference.differences(ending)]
        bad += bool(wrong)
        print_now(f"  {place.name}: " + (f"WRONG {wrong}" if wrong else "identical"))
        rows += [{"mode": title, **dataclasses.asdict(kill), "identical": not wrong} for kill in done]
        if not wrong:
            shutil.rmtree(place)
    slowest = max(row["seconds"] for row in rows)
    victims = Counter(row["victim"] for row in rows)
    print_now(
        f"{len(rows)} kills of {number} runs ({dict(victims)}); the slowest end took {slowest:.1f} s; {bad} went wrong"
    )
    return bad


def print_now(text: str) -> None:
    print(text, flush=True)


def _twice_in_an_epoch(outcome: Outcome, steps_per_epoch: float) -> bool:
    epochs = Counter(int(kill.steps / steps_per_epoch) for kill in outcome.kills if kill.steps)
    return any(count > 1 for count in epochs.values())


def print_statistics(outcomes: dict[str, list[Outcome]], console: Console) -> None:
    """Print the statistics by mode and by phase."""
    table = Table(
        "mode",
        "runs",
        "kills",
        "main process only",
        "two in an epoch",
        "ended",
        "identical",
        title="Killed runs, by mode",
    )
    for mode, those in outcomes.items():
        kills = [kill for outcome in those for kill in outcome.kills]
        table.add_row(
            mode,
            *(
                str(count)
                for count in (
                    len(those),
                    len(kills),
                    sum(kill.aim.alone for kill in kills),
                    sum(outcome.twice for outcome in those),
                    sum(outcome.code == 0 for outcome in those),
                    sum(outcome.identical for outcome in those),
                )
            ),
        )
    console.print(table)
    every = [(kill, outcome) for those in outcomes.values() for outcome in those for kill in outcome.kills]
    if not every:
        return
    table = Table(
        "killed while",
        "kills",
        "identical",
        "median s lost",
        "p95",
        "max",
        "median steps repeated",
        "max",
        title="Kills, by phase of the run",
    )
    phases = Counter(kill.phase for kill, _ in every)
    for phase, count in [*phases.most_common(), ("all", len(every))]:
        mine = [(kill, outcome) for kill, outcome in every if phase in (kill.phase, "all")]
        lost = sorted(kill.lost for kill, _ in mine)
        again = [kill.steps - kill.resumed for kill, _ in mine]
        table.add_row(
            phase,
            str(count),
            str(sum(outcome.identical for _, outcome in mine)),
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
        "--operations", action="store_true", help="kill before each file operation, not at random instants"
    )
    parser.add_argument("--modes", help="choose from " + ", ".join(MODES) + "; with --ranks or on cards a single mode")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the instants; what a run does then depends on the machine's speed"
    )
    parser.add_argument("--json", type=Path, help="also write each kill to this file")
    parser.add_argument("--folder", type=Path, help="folder of the runs; those that differ are kept")
    parser.add_argument("--ranks", type=int, default=1, help="kill runs of so many ranks, in one mode")
    parser.add_argument("--shard", type=int, default=1, help="with --ranks: divide the weights over so many of them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the runs run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a further key, with --ranks or on cards"
    )
    given = parser.parse_args()
    modes = (given.modes or ",".join(MODES)).split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"no mode {sorted(unknown)}")
    os.nice(10)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="fxtune-kills-"))
    if given.ranks > 1 or given.device == "cuda":
        if len(modes) > 1 and given.modes:
            parser.error("--ranks and --device cuda kill runs of one mode")
        rows: list[dict[str, Any]] = []
        mode = given.modes or ("lora" if given.shard == 1 else "full")
        bad_runs = campaign_of_ranks(given, mode, folder, rows)
        if given.json:
            given.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 1 if bad_runs else 0
    console, began = Console(width=130, highlight=False), time.monotonic()
    outcomes: dict[str, list[Outcome]] = {}
    parts = sum(SHARES[mode] for mode in modes)
    for at, mode in enumerate(modes):
        done = sum(len(outcome.kills) for those in outcomes.values() for outcome in those)
        share = given.kills - done if at == len(modes) - 1 else round(given.kills * SHARES[mode] / parts)
        outcomes[mode] = []
        try:
            campaign(mode, 0 if given.operations else share, given.seed, folder, outcomes[mode])
        except AssertionError as error:  # a run that was not killed failed or hangs
            print_now(f"  {error}")
            outcomes[mode].append(Outcome([], 1, [str(error)], False))
    print_statistics(outcomes, console)
    if given.json:
        given.json.write_text(
            "".join(
                json.dumps(_json_row(mode, outcome, kill)) + "\n"
                for mode, those in outcomes.items()
                for outcome in those
                for kill in outcome.kills
            )
        )
    bad = [outcome for those in outcomes.values() for outcome in those if not outcome.identical]
    count = sum(len(outcome.kills) for those in outcomes.values() for outcome in those)
    print(f"{count} kills in {time.monotonic() - began:.0f} s; {len(bad)} runs differ from a run that was not killed")
    if not bad and not given.folder:
        shutil.rmtree(folder)
    return 1 if bad else 0


def _json_row(mode: str, outcome: Outcome, kill: Kill) -> dict[str, Any]:
    return {"mode": mode, **dataclasses.asdict(kill), "phase": kill.phase, "identical": outcome.identical}


if __name__ == "__main__":
    sys.exit(main())
