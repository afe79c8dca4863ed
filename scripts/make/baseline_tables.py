"""Writes the tables of measured figures in README.md and docs/ from benchmarks/baselines/*.json.

    python scripts/make/baseline_tables.py            # rewrite the tables, and mark the rows that are old today
    python scripts/make/baseline_tables.py --check    # print the pages that differ, and end with 1 if there are some

A page has a table between two comments, `<!-- baseline NAME DAY -->` and `<!-- end -->`. NAME is a table of TABLES, DAY the day
of the table: a row that was more than 60 days old on it has the date of its measurement.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from baselines import Measurement, read, today  # noqa: E402
from bench_peers import CASES  # noqa: E402
from first_step import GOALS  # noqa: E402

PLACE = re.compile(r"<!-- baseline (\w+) ([\d-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
NAMES = {"unsloth": "Unsloth", "trl": "TRL", "liger": "Liger"}
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: range | None = None) -> str:
    """A table in Markdown. Columns of `numbers` are aligned to the right; None: all but the first."""
    right = range(1, len(head)) if numbers is None else numbers
    rule = "|" + "|".join("---:" if column in right else "---" for column in range(len(head))) + "|"
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|" for cells in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def figure(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def marked(text: str, day: str, *rows: Measurement | None) -> str:
    """`text` with what a reader must know of these rows on `day`."""
    return ", ".join([text, *dict.fromkeys(mark for row in rows if row for mark in row.marks(day))])


def peers(*names: str, day: str) -> str:
    """fxtune and its peers. x: in a row of fxtune its speed divided by the fastest peer's in the table; in a row of a
    slower peer fxtune's speed divided by that peer's."""
    rows = [row for name in names for row in read(name).measurements]

    def ratio(row: Measurement) -> str:
        case = CASES[row.case].peer_case or row.case
        rivals = [other for other in rows if other.tool != "fxtune" and other.case == case and other.tokens_per_second]
        rivals = [other for other in rivals if other.shape in (None, row.shape)]
        fastest = max(rivals, key=lambda other: other.tokens_per_second or 0.0, default=None)
        own = next((other for other in rows if other.tool == "fxtune" and other.case == row.case), None)
        ours, theirs = (row, fastest) if row.tool == "fxtune" else (own, row if row is not fastest else None)
        if not (ours and theirs and ours.tokens_per_second and theirs.tokens_per_second):
            return ""
        return figure(ours.tokens_per_second / theirs.tokens_per_second, 2)

    def time(row: Measurement) -> str:
        spread = f", {row.step_ms_p5:,.0f}-{row.step_ms_p95:,.0f}" if row.step_ms_p5 and row.step_ms_p95 else ""
        return figure(row.step_ms) + spread

    columns: dict[str, Callable[[Measurement], str]] = {
        "tokens/s": lambda row: figure(row.tokens_per_second),
        "ms per step, p5 to p95" if any(row.step_ms_p5 for row in rows) else "ms per step": time,
        "peak GiB": lambda row: figure(row.memory_gib, 1),
        "J per token": lambda row: figure(row.joules_per_token, 3),
        "x": ratio,
    }
    used = {name: cell for name, cell in columns.items() if any(map(cell, rows))}
    lines, before = [], ""
    for row in rows:
        case = f"`{row.case}`" if row.case != before else ""
        tool = ", ".join(filter(None, (NAMES.get(row.tool, row.tool), row.settings, row.error)))
        lines.append([case, marked(tool, day, row), *(cell(row) for cell in used.values())])
        before = row.case
    return table(["case", "tool", *used], lines, range(2, 2 + len(used)))


README_ROWS = (
    ("4 x 4,096 tokens", "h200_peers", "8b_4x4096"),
    ("short chats, packed *", "h200_peers_first", "8b_chats"),
    ("1 x 65,536 tokens *", "h200_peers_first", "8b_1x65536"),
    ("1 x 65,536 in 30 GiB *", "h200_peers_first", "8b_1x65536_30gib"),
    ("the 1B shape, 8 x 4,096 *", "h200_peers_slower_card", "1b_8x4096"),
    ("a quarter of Qwen3-30B-A3B, 4 x 4,096", "h200_mixtures", "moe_4x4096"),
    ("Qwen3-30B-A3B, 4 x 4,096", "h200_whole_mixtures", "30b_a3b_4x4096"),
    ("gpt-oss-20b, 4 x 4,096", "h200_mixtures", "gpt_oss_4x4096"),
    ("the 70B shape, 1 x 4,096", "h200_70b", "70b_1x4096"),
    ("1 x 409,600 (`scripts/bench/longest.py --lengths 409600 --fast`) *", "h200_longest_fast", "409,600, `--fast`"),
)
TWO_MACHINES = {"30b_a3b_4x4096"}
"""Cases in which the tools ran on two machines, so a ratio would compare the machines, too."""


def readme(day: str) -> str:
    """Speed and peak memory beside Unsloth, and over a base in fp8."""

    def cell(row: Measurement | None, said: list[str]) -> str:
        if row is None or row.error:
            return "" if row is None else row.error
        own = [mark for mark in row.marks(day) if mark not in said]
        return ", ".join([f"{row.tokens_per_second:,.0f}, {row.memory_gib:.1f} GiB", *own])

    rows = []
    for label, file, case in README_ROWS:
        found = {(row.case, row.tool): row for row in reversed(read(file).measurements)}
        cells = [found.get(key) for key in ((case, "fxtune"), (case, "unsloth"), (f"{case}_fp8", "fxtune"))]
        own, peer = (row.tokens_per_second if row else None for row in cells[:2])
        ratio = f"{own / peer:.2f}" if own and peer and case not in TWO_MACHINES else ""
        # A mark of all cells is said once, in the label.
        marks = [row.marks(day) for row in cells if row]
        said = [mark for mark in marks[0] if all(mark in others for others in marks)]
        rows.append([", ".join([label, *said]), *(cell(row, said) for row in cells), ratio])
    head = "tokens/s and peak memory by `python scripts/bench/bench_peers.py`"
    return table([head, "fxtune", "Unsloth", "fxtune, fp8 base", "fxtune / Unsloth"], rows)


def first_step(day: str) -> str:
    """Seconds to the end of the second step, on two machines, with the longest parts on the second one."""
    other = {row.case: row for row in read("h100_first_step_other_machine").measurements}
    rows = []
    for row in read("h100_first_step").measurements:
        case, _, state = row.case.partition(" ")
        parts = sorted((row.startup_seconds or {}).items(), key=lambda part: -part[1])
        rows.append(
            [
                marked(f"{case}, {'filled' if state == 'warm' else 'empty'}", day, row, other[row.case]),
                ", ".join(figure(each.seconds_to_second_step, 1) for each in (other[row.case], row)),
                str(GOALS.get((case, state), "")),
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts),
            ]
        )
    return table(["case, caches", "seconds", "goal", "where the time goes on the second machine"], rows, range(1, 3))


def longest(day: str) -> str:
    rows = [
        [
            marked(row.case, day, row),
            *(f"{figure(gib, 1)} GiB" for gib in (row.forecast_gib, row.memory_gib, row.host_gib)),
            figure((row.step_ms or 0.0) / 1e3),
        ]
        for name in ("h200_longest", "h200_longest_fast")
        for row in read(name).measurements
    ]
    return table(["tokens", "forecast of GPU peak", "GPU peak", "host memory", "seconds per step"], rows, range(5))


def ablation(shape: str, day: str) -> str:
    """The rows of ablate.py, side by side for each length; in brackets the ratio to the base of the column."""
    found = {(row.case, row.length): row for row in read(f"h200_ablation_{shape}").measurements}
    lengths, cases = list(dict.fromkeys(key[1] for key in found)), list(dict.fromkeys(key[0] for key in found))
    cases.sort(key=lambda case: not case.startswith("plain"))
    bases = {
        length: next(
            row.tokens_per_second for case in cases if (row := found.get((case, length))) and row.tokens_per_second
        )
        for length in lengths
    }
    of = {case: [row for key, row in found.items() if key[0] == case] for case in cases}
    head, rows = [shape.upper()], [[marked(case, day, *of[case])] for case in cases]
    for length in lengths:
        columns = f"{next(row.rows for row in found.values() if row.length == length)} x {length:,}"
        head += [f"{columns}: tokens/s", "GiB"]
        for case, cells in zip(cases, rows, strict=True):
            row = found.get((case, length))
            base = row and (row.base_tokens_per_second or bases[length])
            speed = (
                f"{row.tokens_per_second:,.0f} ({row.tokens_per_second / base:.2f}x)"
                if row and base and row.tokens_per_second
                else ""
            )
            cells += [speed or (row.error if row else ""), figure(row.memory_gib if row else None, 1)]
    return table(head, rows)


def scaling(name: str, day: str) -> str:
    """Rows with several numbers of cards: speed on several cards beside as many times the speed of one card."""
    rows, one = [], {row.case: row.tokens_per_second for row in read(name).measurements if row.cards == 1}
    for row in read(name).measurements:
        speed, alone = row.tokens_per_second or 0.0, one.get(row.case)
        share = "" if row.exchange_share is None else f"{row.exchange_share:.1%}"
        ratio = figure(speed / alone / row.cards, 3) if alone and row.cards else ""
        rows.append(
            [marked(f"`{row.case}`", day, row), str(row.cards), figure(speed), ratio, share, figure(row.memory_gib, 1)]
        )
    return table(["case", "cards", "tokens/s", "of N times one card", "exchange not hidden", "peak GiB a card"], rows)


def head_loss(day: str) -> str:
    """The rows of head_loss.py. Memory is in GB of 10^9 bytes, as in the published figures."""
    rows = []
    for row in read("h200_head_loss").measurements:
        memory = row.memory_gib and row.memory_gib * 2**30 / 1e9
        tool = ", ".join(filter(None, (NAMES.get(row.tool, row.tool), row.settings)))
        rows.append([row.case, marked(tool, day, row), row.error or figure(row.step_ms, 1), figure(memory, 1)])
    return table(["head", "tool", "ms", "peak GB"], rows, range(2, 4))


TABLES: dict[str, Callable[..., str]] = {
    "readme": readme,
    "first_step": first_step,
    "longest": longest,
    "ablation_8b": partial(ablation, "8b"),
    "ablation_1b": partial(ablation, "1b"),
    "fp8_bases": partial(peers, "h200_transposes", "h200_70b"),
    "mixtures": partial(peers, "h200_mixtures"),
    "whole_mixtures": partial(peers, "h200_whole_mixtures"),
    "mixture_two_cards": partial(peers, "h200_mixture_two_cards"),
    "head_loss": head_loss,
    "full": partial(peers, "h200_full"),
    "full_two_cards": partial(peers, "h200_full_two_cards"),
    "peers": partial(peers, "h200_peers"),
    "peers_busy_host": partial(peers, "h200_peers_busy_host"),
    "peers_slower_card": partial(peers, "h200_peers_slower_card"),
    "peers_first": partial(peers, "h200_peers_first"),
    "two_cards": partial(peers, "h100_two_cards"),
    "preferences": partial(peers, "h100_preferences"),
    "policy": partial(peers, "h200_policy"),
    "images": partial(peers, "h100_images"),
    "images_first": partial(peers, "h100_images_first"),
    "four_cards": partial(scaling, "h200_four_cards"),
    "context": partial(scaling, "h200_context"),
}


def updated(text: str, day: str | None = None) -> str:
    """The text of a page with the tables of today's files, as they are on `day`. None: each on its own day."""

    def place(found: re.Match[str]) -> str:
        name, own, before = found.groups()
        made = TABLES[name](day=day or own)
        return f"<!-- baseline {name} {own if made == before else day or own} -->\n{made}<!-- end -->"

    return PLACE.sub(place, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    given, different = parser.parse_args(), False
    for page in PAGES:
        old = page.read_text()
        if (new := updated(old, None if given.check else today())) != old:
            different = True
            print(page.relative_to(ROOT))
            if not given.check:
                page.write_text(new)
    sys.exit(int(different and given.check))


if __name__ == "__main__":
    main()
