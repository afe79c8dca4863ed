"""Measures how often `fxtune refresh` errs: false alarms, drift that it misses, and worse adapters that it promotes.

    python scripts/study/refresh_rates.py --json refresh_rates.json --jobs 14 --minutes 9      # again: continues
    python scripts/study/refresh_rates.py --json drifted.json --groups drifted                 # only these batches
    python scripts/study/refresh_rates.py --json /tmp/rates.json --smoke                       # a short test

For each seed a run learns the quickstart's task from rows of its own, and holds 30 % of them out. Then, by the functions
that the command calls (fxtune/outputs/refresh_data.py) and with its defaults:

    undrifted   batches of other rows of the same generator: each that counts as drift is a false alarm
    drifted     batches of other rows that differ in one way (DRIFTS): each that counts as drift is seen
    worse       new adapters for drifted rows, which are worse: each that passes the gate is a wrong promotion

An adapter is worse if it is, on 300 more rows of each kind that the gate does not see, worse by refresh.bound or more
on the old kind, or not better by more than refresh.gain on the new one. There are two ways to make one that is only
just worse, so that the gate's decision is hard:

    noise       the run's own adapter with noise on its weights, which is doubled until the adapter is worse
    forgets     the run's own adapter, trained further on the new rows alone. Its change is halved as long as the
                adapter stays worse

Batches have 100 rows, of which the gate sees the held-out fifth. Every process has a core of its own and one thread
(pinned_jobs.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from pinned_jobs import ROOT, Job, add_arguments, again, done, forget, run_jobs

sys.path.insert(0, str(ROOT / "scripts" / "make"))
import make_quickstart
import shop

PARENT_ROWS, BATCH_ROWS, JUDGE_ROWS = 240, 100, 300
CHUNK = 5
"""Batches of a job."""
UNDRIFTED, DRIFTED, WORSE = "undrifted", "drifted", "worse"
GROUPS = (WORSE, UNDRIFTED, DRIFTED)
LEAST_NOISE = 0.02
"""Standard deviation of the first noise, in those of each weight matrix."""
LEAST_SHARE = 1 / 64
WORSE_KINDS = ("noise", "forgets")

Row = dict[str, Any]


def renamed(order: dict[str, Any], message: str) -> tuple[str, str]:
    """Other keys."""
    keys = ("customer", "town", "product", "paint", "count")
    return message, json.dumps(dict(zip(keys, order.values(), strict=True)))


def lines(order: dict[str, Any], message: str) -> tuple[str, str]:
    """Lines in place of JSON."""
    return message, "\n".join(f"{key}: {value}" for key, value in order.items())


def reversed_task(order: dict[str, Any], message: str) -> tuple[str, str]:
    """The order is given, and the answer is the sentence."""
    return json.dumps(order), message


def converted(order: dict[str, Any], message: str) -> tuple[str, str]:
    """The same keys, but words in capitals and the quantity as text."""
    return message, json.dumps({key: str(value).upper() for key, value in order.items()})


DRIFTS: dict[str, Callable[[dict[str, Any], str], tuple[str, str]]] = {
    "other keys": renamed,
    "lines, not JSON": lines,
    "the task reversed": reversed_task,
    "capitals": converted,
}
MIXED = "other keys in a third of the rows"
KINDS = (*DRIFTS, MIXED)


def pool(seed: int, count: int) -> list[Row]:
    """`count` different rows of the quickstart's generator, the same for the same seed."""
    draw = Random(1000 + seed)
    known = list(shop.NAMES), list(shop.CITIES)
    found: dict[str, Row] = {}
    while len(found) < count:
        order = shop.draw_order(draw, *known)
        message = order.message(draw)
        found.setdefault(message, json.loads(make_quickstart.row(order, message)))
    return list(found.values())


def drifted(rows: list[Row], kind: str) -> list[Row]:
    """The rows as `kind` changes them."""
    changed = []
    for index, row in enumerate(rows):
        system, user, assistant = row["messages"]
        if kind == MIXED and index % 3:
            changed.append(row)
            continue
        change = DRIFTS["other keys" if kind == MIXED else kind]
        asked, answer = change(json.loads(assistant["content"]), user["content"])
        turns = [system, {"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        changed.append({"messages": turns})
    return changed


class Seed:
    """The rows and folders of a seed. Rows are used once: by the parent, by one batch, or to judge by."""

    def __init__(self, out: Path, seed: int, batches: int) -> None:
        self.seed, self.folder = seed, out / f"seed-{seed}"
        self.rows = pool(seed, PARENT_ROWS + JUDGE_ROWS + 3 * batches * BATCH_ROWS)
        self.batches = batches
        self.parent = self.folder / "parent"

    def write(self, name: str, rows: list[Row]) -> Path:
        file = self.folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def judging(self) -> list[Row]:
        return self.rows[PARENT_ROWS : PARENT_ROWS + JUDGE_ROWS]

    def batch(self, group: str, index: int) -> list[Row]:
        at = PARENT_ROWS + JUDGE_ROWS
        at += ((UNDRIFTED, DRIFTED, WORSE).index(group) * self.batches + index) * BATCH_ROWS
        return self.rows[at : at + BATCH_ROWS]

    def words(self, source: Path, run: Path, *words: str) -> list[str]:
        """The command line of a run."""
        return [
            "+recipe=quickstart",
            f"data.sources=[{{path: {source}}}]",
            "data.questions.path=null",
            "data.sequence_length=256",
            "data.workers=1",
            f"data.cache_dir={run}-cache",
            "train.epochs=3",
            f"run.seed={self.seed}",
            f"run.dir={run}",
            "checkpoint.every=0",
            "tracking.display=none",
            "run.report=false",
            *words,
        ]


def train_parent(seed: Seed) -> dict[str, Any]:
    from fxtune.config import compose
    from fxtune.training import trainer

    shutil.rmtree(seed.parent, ignore_errors=True)
    source = seed.write("old", seed.rows[:PARENT_ROWS])
    return {"loss": trainer.run(compose.load(seed.words(source, seed.parent, "data.eval_fraction=0.3")))["eval/loss"]}


def refresh_data(seed: Seed, file: Path) -> Any:
    """What `fxtune refresh PARENT data.sources=[FILE]` compares."""
    from fxtune.config import compose
    from fxtune.outputs.refresh_data import RefreshData

    before = compose.of_run(seed.parent, False)
    words = [f"data.sources=[{{path: {file}}}]", f"data.cache_dir={file.with_suffix('')}-cache"]
    config = compose.of_run(seed.parent, False, words)
    data = RefreshData(seed.parent, before.data, config, config.model)
    data.require_enough(seed.parent)
    return data


def try_drift(seed: Seed, group: str, index: int) -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    rows = seed.batch(group, index)
    rows = drifted(rows, kind) if group == DRIFTED else rows
    found = refresh_data(seed, seed.write(f"{group}-{index}", rows)).drift(seed.parent / "adapter")
    return {"kind": kind if group == DRIFTED else "", **asdict(found)}


def try_gate(seed: Seed, index: int) -> dict[str, Any]:
    """Make an adapter that is worse, and ask the gate."""
    from fxtune.config import compose
    from fxtune.outputs.document_losses import measure
    from fxtune.training import trainer

    kind, how = KINDS[index % len(KINDS)], WORSE_KINDS[index % 2]
    file = seed.write(f"worse-{index}", drifted(seed.batch(WORSE, index), kind))
    data = refresh_data(seed, file)
    before = end = seed.parent / "adapter"
    if how == "forgets":
        run = seed.folder / f"worse-{index}"
        shutil.rmtree(run, ignore_errors=True)
        trainer.run(compose.load(seed.words(file, run, f"model.adapter={before}", "train.epochs=2")))
        end = run / "adapter"
    groups = []
    for name, rows in (("old", seed.judging()), ("new", drifted(seed.judging(), kind))):
        source = type(data.config.data.sources[0])(path=str(seed.write(f"judge-{index}-{name}", rows)))
        table = data._tokenize(source)
        groups.append(data._sample([table], table.digests))
    after = seed.folder / f"adapter-{index}"

    def losses(weights: Path) -> list[float]:
        return [float(one.means.mean()) for one in measure(data.config, weights, groups, data.pad_id)]

    def compared(share: float, noise: float) -> tuple[bool, dict[str, float]]:
        """Whether the adapter is worse, if it goes `share` of the way to `end` and has `noise`."""
        blend(before, end, share, noise, after, 1000 * seed.seed + index)
        new = losses(after)
        kept, gained = new[0] - old[0], old[1] - new[1]
        worse = kept >= data.settings.bound or gained <= data.settings.gain
        return worse, {"share": share, "noise": noise, "worse_on_old": kept, "better_on_new": gained}

    old, share, noise = losses(before), 1.0, 0.0
    if how == "noise" or not compared(share, noise)[0]:
        noise = LEAST_NOISE
        while not compared(share, noise)[0]:
            noise *= 2
    else:
        while share > LEAST_SHARE and compared(share / 2, noise)[0]:
            share /= 2
    figures = compared(share, noise)[1]
    gate = data.gate(before, after)
    return {"kind": kind, "how": how, **figures, **asdict(gate)}


def blend(source: Path, end: Path, share: float, noise: float, target: Path, seed: int) -> None:
    """Write to `target` the adapter that is `share` of the way from `source` to `end`, with noise on its weights."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    name, draw = "adapter_model.safetensors", torch.Generator().manual_seed(seed)
    ends, weights = load_file(end / name), {}
    for key, weight in load_file(source / name).items():
        moved = weight.float() + share * (ends[key].float() - weight.float())
        moved += torch.randn(weight.shape, generator=draw) * (noise * moved.std())
        weights[key] = moved.to(weight.dtype)
    save_file(weights, target / name, metadata={"format": "pt"})


def work(out: Path, number: int, batches: int, group: str, first: int) -> dict[str, Any]:
    """A job: the parent, or CHUNK batches of a group."""
    import torch

    torch.set_num_threads(1)
    seed = Seed(out, number, batches)
    if group == "parent":
        return train_parent(seed)
    indices = range(first, min(first + CHUNK, batches))
    if group == WORSE:
        return {"batches": [try_gate(seed, index) for index in indices]}
    return {"batches": [try_drift(seed, group, index) for index in indices]}


def results(found: dict[str, Any], keys: list[str]) -> list[dict[str, Any]]:
    return [one for key in keys if (entry := done(found, key)) for one in entry["batches"]]


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        out, number, batches, group, first = sys.argv[2:]
        print(json.dumps(work(Path(out), int(number), int(batches), group, int(first))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="a parent each")
    parser.add_argument("--batches", type=int, default=10, help="batches of each group and seed (%(default)s)")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="what to test (default: all)")
    parser.add_argument("--out", type=Path, default=Path("build/refresh_rates"), help="folder of runs (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="one seed and two batches")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.batches = [0], 2
    out = options.out.resolve()

    def job(group: str, seed: int, first: int = 0) -> Job:
        key = f"{group} | {seed} | batches {first} to {first + CHUNK} of {options.batches}"
        return Job(key, again(__file__, str(out), str(seed), str(options.batches), group, str(first)))

    parents = [job("parent", seed) for seed in options.seeds]
    for seed, parent in zip(options.seeds, parents, strict=True):
        if not (Seed(out, seed, 0).parent / "result.json").exists():
            forget(options.json, parent.key)  # the JSON file is from another machine: train the parent again
    trained = run_jobs(parents, options, lambda one: f"held-out loss {one['loss']:.4f}, {one['wall_seconds']:.0f} s")
    seeds = [seed for seed, one in zip(options.seeds, parents, strict=True) if done(trained, one.key)]
    tests = {
        group: [job(group, seed, first) for seed in seeds for first in range(0, options.batches, CHUNK)]
        for group in GROUPS
        if group in options.groups
    }
    found = run_jobs(
        [one for jobs in tests.values() for one in jobs], options, lambda one: f"{one['wall_seconds']:.0f} s"
    )
    keys = {group: [one.key for one in jobs] for group, jobs in tests.items()}
    print(f"{len(seeds)} parents")
    print(table({group: results(found, of_group) for group, of_group in keys.items()}))
    for seed in seeds:
        of_seed = {group: [key for key in keys[group] if f" | {seed} | " in key] for group in keys}
        print(f"parent {seed}: " + "; ".join(rates({group: results(found, of_seed[group]) for group in keys})))


def rates(tested: dict[str, list[dict[str, Any]]]) -> list[str]:
    """How often each error happened."""
    told = {
        UNDRIFTED: ("found", "false alarms: {} of {} undrifted batches"),
        DRIFTED: ("found", "drift seen: {} of {} drifted batches"),
        WORSE: ("passed", "wrong promotions: {} of {} worse adapters"),
    }
    return [
        line.format(sum(one[key] for one in tested[group]), len(tested[group]))
        for group, (key, line) in told.items()
        if group in tested
    ]


def table(tested: dict[str, list[dict[str, Any]]]) -> str:
    """The rates, and the figures of each kind."""
    same, other, worse = (tested.get(group, []) for group in (UNDRIFTED, DRIFTED, WORSE))
    lines = [
        *rates(tested),
        "",
        "| drift | batches | seen | loss on old rows | loss on new rows | largest p |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ("", *KINDS):
        rows = [one for one in (*same, *other) if one["kind"] == kind]
        if rows:
            losses = [statistics.mean(one[name] for one in rows) for name in ("old_loss", "new_loss")]
            seen = sum(one["found"] for one in rows)
            p = max(one["p"] for one in rows)
            lines.append(f"| {kind or 'none'} | {len(rows)} | {seen} | {losses[0]:.4f} | {losses[1]:.4f} | {p:.2g} |")
    lines += [
        "",
        "| worse adapter | tried | promoted | worse on old rows by | better on new rows by |",
        "|---|---|---|---|---|",
    ]
    for how in WORSE_KINDS:
        rows = [one for one in worse if one["how"] == how]
        if rows:
            kept, gained = (
                f"{statistics.median(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})"
                for values in ([one[name] for one in rows] for name in ("worse_on_old", "better_on_new"))
            )
            lines.append(f"| {how} | {len(rows)} | {sum(one['passed'] for one in rows)} | {kept} | {gained} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
