"""Trains cases in which features cross, and compares each with what must hold of every run.

    python scripts/faults/crossings.py [--jobs 4]            # 82 cases: 20 minutes on two busy cores; a table at the end
    python scripts/faults/crossings.py --list                # the cases, nothing is run
    python scripts/faults/crossings.py --only 7 31           # two of them
    python scripts/faults/crossings.py --cases 10            # the first ten
    python scripts/faults/crossings.py --oracles steps,rows  # only these oracles
    python scripts/faults/crossings.py --salt 2              # another array of as many cases
    python scripts/faults/crossings.py --set rows=kto long=drop  # a case of your own; other factors have their first value
    python scripts/faults/crossings.py --folder F --json F/found.jsonl  # keep the runs; write a line for each case

Nearly every silent fault stood where two features meet. The cases are a pairwise covering array (covertable): each two
values of two factors meet in a case, but for pairs in `CONSTRAINTS`, which no run can have. The factors and their keys
are in tests/support/crossings.py: kinds of rows, long rows, packing, shared prompts, copies, held-out rows, learned
turns, mixes and growing rows, batches, lengths, schedules, optimizers, techniques, precisions, references, exports and
ranks. The array depends on nothing but these tables and --salt: it is the same on each machine.

Each case has a tiny model and some 20 to 30 rows, with copies, near-copies and a short last step. If fxtune refuses it,
the factor that the message names is set back to its first value, and the case goes on; the table counts the factors.

The oracles: preview, plan and training agree on what is refused and on the steps; a refusal is one message with a way
out; no traceback; each row is trained, held out or counted, by the unique numbers in the rows' texts; each document
with a question has its picture; `eval RUN` = `eval RUN/step-N` = the run's figures; the code of the model card and
plain transformers load export and merged model with the checkpoint's logits; `verify --loss`; a shorter run that is
extended has the weights of the whole run; the same bits after kill -9; two ranks have the losses of one.

Exit code 1 if an oracle found something; the lines above the table have the folder of each such case, in which
command.txt is its command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from support.crossings import CHATS, FACTORS, GROUPS, IMAGES, ORACLES, PAIRS, REFERENCED, Bench, Case, Outcome

Values = dict[str, str]
CONSTRAINTS: list[tuple[tuple[str, ...], Callable[[Values], bool]]] = [
    # Of several answers a row is decided as a whole.
    (("rows", "long"), lambda case: case["rows"] not in GROUPS or case["long"] != "split"),
    # Only pairs share a prompt, in packed rows.
    (("rows", "prompts"), lambda case: case["rows"] in PAIRS or case["prompts"] == "auto"),
    (("packing", "prompts"), lambda case: case["packing"] == "packed" or case["prompts"] != "shared"),
    (("rows", "learn"), lambda case: case["rows"] in CHATS or case["learn"] == "answers"),
    # Chats with calls are all of one length, longer than the threshold and than the first, short rows.
    (("rows", "mix"), lambda case: case["rows"] != "tools" or case["mix"] not in ("long", "growing")),
    # The positions of images have three axes, which no RoPE scaling knows. (A head that is tied to the embedding cannot
    # be saved with adapters either. This refusal stays, so that there is one.)
    (("rows", "technique"), lambda case: case["rows"] not in IMAGES or case["technique"] != "yarn"),
    (("rows", "technique"), lambda case: case["rows"] != "reward" or case["technique"] != "head"),
    (("rows", "reference"), lambda case: case["rows"] in REFERENCED or case["reference"] == "auto"),
    # Full fine-tuning has no adapters to switch off; factored adapters hold a part of the base.
    (("technique", "reference"), lambda case: case["technique"] != "full" or case["reference"] in ("auto", "stored")),
    (
        ("technique", "reference"),
        lambda case: case["technique"] not in ("pissa", "olora") or case["reference"] != "base",
    ),
    (
        ("optimizer", "schedule"),
        lambda case: case["optimizer"] != "adamw_schedulefree" or case["schedule"] == "constant",
    ),
    # Without packing each answer of a group takes a row of one micro-batch.
    (
        ("rows", "packing", "batch"),
        lambda case: case["rows"] not in GROUPS or case["packing"] == "packed" or case["batch"][0] != "1",
    ),
    (("ranks", "batch"), lambda case: case["ranks"] == "1" or case["batch"] != "4 of 4"),
]
"""(factors, whether a run can have these values of them)."""


def allowed(values: Values) -> bool:
    """Whether a run can have these values, of any of the factors."""
    return all(holds(values) for factors, holds in CONSTRAINTS if values.keys() >= set(factors))


def cases(salt: str) -> list[Case]:
    """The covering array. Two ranks, which are slow to start, are in as few cases as possible."""
    from covertable import make

    found = make(
        {factor: list(values) for factor, values in FACTORS.items()},
        salt=salt,
        weights={"ranks": {0: 50}},
        constraints=[
            {"operator": "fn", "requires": list(factors), "evaluate": holds} for factors, holds in CONSTRAINTS
        ],
    )
    return varied(
        [Case(number, {factor: row[factor] for factor in FACTORS}) for number, row in enumerate(found)], salt
    )


def varied(made: list[Case], salt: str) -> list[Case]:
    """The same array, where a value that no pair needs is another value: more than two factors cross, too."""
    draw, uses = random.Random(f"crossings {salt}"), Counter(pair for case in made for pair in pairs(case))
    for number, factor in product(range(len(made)), (name for name in FACTORS if name not in ("rows", "ranks"))):
        case = made[number]
        other = case.changed(factor, draw.choice(list(FACTORS[factor])))
        lost, won = set(pairs(case)) - set(pairs(other)), set(pairs(other)) - set(pairs(case))
        if allowed(other.values) and all(uses[pair] > 1 for pair in lost):
            uses.subtract(lost)
            uses.update(won)
            made[number] = other
    return made


def pairs(case: Case) -> Iterator[tuple[tuple[str, str], ...]]:
    """Each two values of two factors that the case has."""
    yield from combinations(((factor, case.value(factor)) for factor in FACTORS), 2)


def describe(case: Case) -> str:
    """The values of a case that are not the first ones."""
    changed = [
        f"{factor}={case.value(factor)}" for factor in FACTORS if case.value(factor) != next(iter(FACTORS[factor]))
    ]
    return f"case {case.number}: {' '.join(changed)}"


def work(queue: Queue[Case], folder: Path, oracles: frozenset[str], keep: bool, done: list[Outcome]) -> None:
    """Run cases of the queue until it is empty."""
    with Bench(folder) as bench:
        while True:
            try:
                case = queue.get_nowait()
            except Empty:
                return
            began = time.monotonic()
            try:
                outcome = bench.run(case, oracles)
            except Exception as error:  # noqa: BLE001  a fault of the script or a run that hangs: the others go on
                outcome = Outcome(case, wrong=[("the script", repr(error)[:500])])
            done.append(outcome)
            print(
                f"{describe(case)}: {time.monotonic() - began:.0f} s"
                + "".join(f"; dropped {name}" for name in outcome.dropped),
                flush=True,
            )
            for oracle, line in outcome.wrong:
                print(f"  {oracle}: {line}", flush=True)
            if not outcome.wrong and not keep:
                for place in folder.glob(f"case-{case.number}*"):
                    if place.name.split("-")[1] == str(case.number):
                        shutil.rmtree(place)


def report(done: list[Outcome], asked: list[Case], console: Console) -> bool:
    """Print the table. Returns whether all is well."""
    table = Table("oracle", "cases", "right", "wrong", "cases that are wrong", title="Crossed features")
    for oracle in (*ORACLES, "the script"):
        ran = sum(oracle in outcome.ran for outcome in done)
        wrong = sorted({outcome.case.number for outcome in done for name, _ in outcome.wrong if name == oracle})
        if ran or wrong:
            table.add_row(oracle, str(ran), str(max(ran - len(wrong), 0)), str(len(wrong)), " ".join(map(str, wrong)))
    console.print(table)
    dropped = Counter(name for outcome in done for name in outcome.dropped)
    print(
        "dropped after a refusal: "
        + (", ".join(f"{name} ({count})" for name, count in sorted(dropped.items())) or "nothing")
    )
    trained = [outcome for outcome in done if outcome.trained]
    wanted = {pair for case in asked for pair in pairs(case)}
    met = {pair for outcome in trained for pair in pairs(outcome.case)}
    whole = sum(not outcome.dropped for outcome in trained)
    print(
        f"{len(trained)} of {len(done)} cases train, {whole} with all their factors; {len(wanted & met)} of {len(wanted)} "
        "pairs of values were trained"
    )
    return not any(outcome.wrong for outcome in done) and len(trained) >= 0.8 * len(done)


def json_row(outcome: Outcome) -> dict[str, Any]:
    return {
        "case": outcome.case.number,
        "values": outcome.case.values,
        "trained": outcome.trained,
        "dropped": outcome.dropped,
        "ran": dict(outcome.ran),
        "wrong": outcome.wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, help="only the first so many")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these")
    parser.add_argument("--set", nargs="+", default=[], metavar="FACTOR=VALUE", help="one case with these values")
    parser.add_argument("--oracles", help=f"some of {', '.join(ORACLES)}; preview, plan and training always run")
    parser.add_argument("--salt", default="", help="another array")
    parser.add_argument(
        "--jobs", type=int, default=2 * (os.cpu_count() or 1), help="cases at a time (two for each core)"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder of the runs, which are kept; else only runs of wrong cases are kept"
    )
    parser.add_argument("--json", type=Path, help="also write a line for each case to this file")
    parser.add_argument("--list", action="store_true", help="list the cases, run nothing")
    given = parser.parse_args()
    if given.set:
        values = dict(word.split("=", 1) for word in given.set)
        if wrong := [name for name, value in values.items() if value not in FACTORS.get(name, {})]:
            parser.error(
                f"no such factor or value: {wrong}; values: { {name: list(FACTORS[name]) for name in wrong if name in FACTORS} }"
            )
        asked = [Case(0, values)]
    else:
        asked = cases(given.salt)[: given.cases]
    asked = [case for case in asked if not given.only or case.number in given.only]
    oracles = frozenset((given.oracles or "").split(",")) - {""}
    if unknown := oracles - set(ORACLES):
        parser.error(f"no oracle {sorted(unknown)}")
    if given.list:
        for case in asked:
            print(describe(case))
        return 0
    os.nice(10)
    folder, began = given.folder or Path(tempfile.mkdtemp(prefix="fxtune-crossings-")), time.monotonic()
    queue: Queue[Case] = Queue()
    for case in asked:
        queue.put(case)
    done: list[Outcome] = []
    workers = [
        threading.Thread(target=work, args=(queue, folder, oracles, given.folder is not None, done))
        for _ in range(min(given.jobs, len(asked)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.sort(key=lambda outcome: outcome.case.number)
    right = report(done, asked, Console(width=130, highlight=False))
    if given.json:
        given.json.write_text("".join(json.dumps(json_row(outcome)) + "\n" for outcome in done))
    kept = "" if right and not given.folder else f"; the runs are in {folder}"
    print(f"{len(done)} cases in {time.monotonic() - began:.0f} s{kept}")
    if right and not given.folder:
        shutil.rmtree(folder)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
