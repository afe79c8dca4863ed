"""Tokens/s over the number of cards: what was measured (benchmarks/baselines), and a projection by arithmetic.

    python scripts/study/scale_out.py                                   # the tables of docs/distributed.md, on any machine
    python scripts/study/scale_out.py --plot docs/scaling.svg --json scaling.json
    python scripts/study/scale_out.py --network 100 --cards 16,32       # 100 Gbit/s a card between hosts

Each card has the same rows on any number of cards. A step is the time to compute and the time to exchange:

1. Compute. The measured step of one card; for the mixture, of two cards without its calculated exchange. If weights
   are divided, a rank recomputes less and updates fewer weights. So the step is scaled by the ratio of fxtune's forecasts
   (estimate/step_time.py) for both numbers of cards. The same ratio scales the step of an H200 to an H100.
2. Exchange. The bytes that a rank sends (estimate/traffic.py), over NVLink within a host and over the network
   between hosts, and COLLECTIVE seconds for each collective. Weights and experts are divided within a host; hosts are
   replicas. In a sum over all cards, the network cards of a host share the bytes that leave the host. A sum between hosts
   takes 2 log2(hosts) messages of --latency (NCCL's trees).
3. Overlap. Two limits are calculated. `nothing`: no exchange is hidden. `all`: a gather is hidden up to the compute time
   of its layer, and so are the sums of gradients in full fine-tuning, except the first gather and the last sum. In both
   limits nothing hides adapters' gradients, which are sent after the backward pass, or tokens on their way to experts.

The first table compares both limits with what was measured. No constant is fitted to these measurements. Waiting for
slow ranks, uneven numbers of tokens, and networks that other jobs use are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "scripts" / folder) for folder in ("bench", "make", "study"))]

import baselines  # noqa: E402
import bench_peers  # noqa: E402
import plan_accuracy  # noqa: E402
from baseline_tables import table  # noqa: E402

from fxtune.distributed.parallel import Degrees  # noqa: E402
from fxtune.estimate.step_time import forward_seconds, micro_batch_seconds, update_seconds  # noqa: E402
from fxtune.estimate.traffic import step_traffic  # noqa: E402
from fxtune.facts.run import Facts  # noqa: E402
from fxtune.models.dims import Shape  # noqa: E402
from fxtune.reports.charts import Series, plot  # noqa: E402

CARD = "H200"  # of the projection
COLLECTIVE = 70e-6
"""Seconds of a collective with hardly any bytes within a host (`fxtune doctor` on two H200)."""
CASES = {
    "8b_4x4096": ("8B LoRA, bf16, replicas", "h200_four_cards"),
    "8b_4x4096_fp8": ("8B LoRA, fp8, replicas", "h200_four_cards"),
    "8b_full_2x8192": ("8B full, bf16, sharded in a host", "h200_full"),
    "8b_full_2x8192_fp8": ("8B full, fp8, sharded in a host", "h200_full"),
    "70b_1x4096_fp8": ("70B LoRA, fp8, sharded in a host", "h200_70b"),
    "moe_full_4x4096": ("mixture with heads of 64, full, experts divided in a host", "h200_mixture_two_cards"),
}
"""Cases of bench_peers.py: title, and the file of benchmarks/baselines from which the calculation starts."""


@dataclass(frozen=True)
class Links:
    """The cards of a host, the bytes a second that a card sends to its host's cards (`link`) and to other hosts
    (`network`), and the seconds of a message between hosts."""

    host: int
    link: float
    network: float
    latency: float


@dataclass(frozen=True)
class Exchange:
    """Seconds of a step in which a rank exchanges: in the two passes, and without computation at the same time."""

    forward: float
    backward: float
    alone: float
    layers: int

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.alone

    def exposed(self, compute: float, forward_share: float) -> float:
        """Seconds that remain if layers hide the exchange up to their compute time. `compute`: seconds of a step;
        `forward_share`: the forward pass's share of `compute`."""
        ends = (self.forward + self.backward) / self.layers
        left = max(self.forward - forward_share * compute, 0) + max(self.backward - (1 - forward_share) * compute, 0)
        return min(left + ends, self.forward + self.backward) + self.alone


@dataclass(frozen=True)
class Point:
    """Tokens/s of all cards: measured, calculated in both limits (`nothing`, `all`), and `linear`: the speed of a card in
    the measurement that the calculation starts from, multiplied with the number of cards. Then seconds of the exchange,
    and what is left of them in the limit `all`. network_gbit=None: one host."""

    case: str
    card: str
    cards: int
    network_gbit: int | None
    measured: float | None
    nothing: float
    all: float
    linear: float
    exchange_seconds: float
    exposed_seconds: float


def exchange(facts: Facts, links: Links) -> Exchange:
    degrees, layers = facts.degrees, Shape.of(facts.model).layers
    if degrees.ranks == 1:
        return Exchange(0, 0, 0, layers)
    sent, hosts = step_traffic(facts), math.ceil(degrees.ranks / links.host)
    messages = 2 * math.log2(hosts) * links.latency
    each_layer = layers * COLLECTIVE if degrees.shard > 1 else 0.0
    gather = sent.weights / 2 / links.link + each_layer
    tokens = sent.tokens / links.link + (4 * layers * COLLECTIVE if sent.tokens else 0)
    if facts.techniques.lora.enabled:
        ring = links.link if hosts == 1 else min(links.link, links.host * links.network)
        return Exchange(gather, gather, tokens + sent.gradients / ring + COLLECTIVE + messages, layers)
    inside = step_traffic(replace(facts, degrees=replace(degrees, replicate=1))).gradients
    between = (sent.gradients - inside) / links.network + layers * messages
    return Exchange(gather, gather + inside / links.link + each_layer + between, tokens, layers)


@functools.cache
def forecast(
    case: str, card: str, cards: int, keys: tuple[str, ...], shape: str | None = None
) -> tuple[float, float, Facts]:
    """For `cards` cards of one host: seconds that a rank computes in a step, the forward pass's share of these seconds,
    and the facts of a rank. `shape`: None: of the case."""
    of = bench_peers.CASES[case]
    row = baselines.Measurement(case, keys=[*keys], shape=shape or of.shape, rows=of.rows, length=of.length)
    _, run = plan_accuracy.forecast(card, cards, row)
    seconds = micro_batch_seconds(run.facts, run.facts.execution.recompute) + update_seconds(run.facts)
    return seconds, forward_seconds(run.facts) / seconds, run.facts


def measured(case: str) -> dict[tuple[str, int], baselines.Measurement]:
    """Measurements of a case by card and number of cards. The first is the start of the calculation; then comes the
    newest measurement for each number of cards above one."""
    start = baselines.read(CASES[case][1])
    rows = [
        (baseline.card, row.cards or baseline.cards, row)
        for baseline in (start, *sorted(baselines.read_all(), key=lambda baseline: (baseline.card, baseline.cards)))
        for row in baseline.measurements
        if row.case == case and row.tool == "fxtune" and row.tokens_per_second
    ]
    return {(card, cards): row for card, cards, row in rows if cards > 1 or row in start.measurements}


def points(case: str, places: Iterable[tuple[str, int]], links: Links) -> Iterator[Point]:
    """The points of a case. `places`: the card and the number of cards of each point."""
    known, shape = measured(case), bench_peers.CASES[case]
    (start_card, start_cards), start = next(iter(known.items()))
    assert start.tokens_per_second
    alone, tokens = start.tokens_per_second / start_cards, shape.rows * shape.length

    def calculated(card: str, cards: int) -> tuple[float, float, Exchange]:
        inside, row = min(cards, links.host), known.get((card, cards))
        seconds, forward, facts = forecast(
            case, card, inside, tuple((row and row.keys) or shape.keys(inside)), start.shape
        )
        shard = facts.degrees.shard
        return seconds, forward, exchange(replace(facts, degrees=Degrees(cards // shard, shard)), links)

    seconds, forward, sent = calculated(start_card, start_cards)
    step = tokens / alone
    ratios = (step - sent.total) / seconds, (step - sent.exposed(step, forward)) / seconds
    for card, cards in places:
        seconds, forward, sent = calculated(card, cards)
        nothing, hiding = (ratio * seconds for ratio in ratios)
        exposed, row = sent.exposed(hiding, forward), known.get((card, cards))
        limits = tokens * cards / (nothing + sent.total), tokens * cards / (hiding + exposed)
        network = round(links.network * 8 / 1e9) if cards > links.host else None
        yield Point(
            case, card, cards, network, row and row.tokens_per_second, *limits, alone * cards, sent.total, exposed
        )


def measured_table(found: Iterable[Point]) -> str:
    """Measured speeds beside calculated ones. An error is calculated / measured - 1."""
    rows = []
    for point in found:
        assert point.measured
        rows.append([CASES[point.case][0], f"{point.cards} {point.card}", f"{point.measured:,.0f}"])
        for speed in (point.nothing, point.all):
            start = point.measured == point.linear
            rows[-1] += ["", ""] if start else [cell(speed), f"{speed / point.measured - 1:+.1%}"]
    return table(["case", "cards", "measured", "nothing hidden", "off by", "all hidden", "off by"], rows)


def projected_table(found: Iterable[Point]) -> str:
    rows = []
    for point in found:
        rows.append([CASES[point.case][0], f"{point.cards}", f"{point.network_gbit or ''}"])
        if point.measured:
            rows[-1] += [f"{point.measured:,.0f}, measured", f"{point.measured / point.linear:.2f}", "", "", "", ""]
            continue
        for speed, seconds in ((point.nothing, point.exchange_seconds), (point.all, point.exposed_seconds)):
            rows[-1] += [cell(speed), f"{speed / point.linear:.2f}", f"{seconds:.3f}"]
    head = "case, cards, Gbit/s, nothing hidden, of linear, s exchange, all hidden, of linear, s left"
    return table(head.split(", "), rows)


def cell(speed: float) -> str:
    """A calculated speed has three digits."""
    return f"{float(f'{speed:.3g}'):,.0f}"


def draw(found: Sequence[Point], gbit: int) -> str:
    """The SVG of measured speeds and of the limit in which nothing hides an exchange, both as shares of linear, for a network
    of `gbit` Gbit/s."""
    series = []
    for case in dict.fromkeys(point.case for point in found):
        here = [point for point in found if (point.case, point.card) == (case, CARD)]
        line = {point.cards: point.measured / point.linear for point in here if point.measured}
        series.append(Series(f"{CASES[case][0]}: measured", sorted(line.items()), thick=True))
        more = [point for point in here if point.cards > max(line) and point.network_gbit in (None, gbit)]
        ends = [(max(line), line[max(line)]), *((point.cards, point.nothing / point.linear) for point in more)]
        series.append(Series("the same, calculated, nothing hidden", ends, continues=True))
    return plot("Tokens/s over H200 cards, as a share of linear", series, "cards", "share of linear")


def counts(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--cards", type=counts, default=[8, 64, 512], help="numbers of cards to project to (8,64,512)")
    parser.add_argument("--host", type=int, default=8, help="cards of a host (8)")
    parser.add_argument("--link", type=float, default=271, help="GB/s of a card within a host (271)")
    parser.add_argument("--network", type=counts, default=[400, 50], help="Gbit/s of a card between hosts (400,50)")
    parser.add_argument("--latency", type=float, default=20, help="microseconds of a message between hosts (20)")
    parser.add_argument("--json", type=Path, help="write all points to this file")
    parser.add_argument("--plot", type=Path, help="an .svg file")
    given = parser.parse_args()
    networks = [Links(given.host, given.link * 1e9, rate * 1e9 / 8, given.latency / 1e6) for rate in given.network]
    known, projected = list[Point](), list[Point]()
    for case in given.cases:
        known += points(case, measured(case), networks[0])
        for cards in given.cards:
            for links in networks if cards > given.host else networks[:1]:
                projected += points(case, [(CARD, cards)], links)
    print(f"{measured_table(known)}\n{projected_table(projected)}", end="")
    if given.json:
        given.json.write_text(json.dumps([asdict(point) for point in (*known, *projected)], indent=1) + "\n")
    if given.plot:
        given.plot.write_text(draw([*known, *projected], given.network[0]))


if __name__ == "__main__":
    main()
