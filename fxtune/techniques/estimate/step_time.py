"""How much longer a step takes for keeping less: FLOPs and bytes of what is computed again or sent, over the card's rates.

A layer of hidden size h, heads x head size q, key-value heads x head size k and intermediate size i takes, a token, with
documents as long as the row (length s; packed ones are shorter, and then keeping attention is worth less than told here):

    attention     2 s q FLOPs, causal                what `input` computes again and `attention` does not
    q, k, v, o    2 h (2q + 2k) FLOPs of matmuls     ... and `narrow` does not
    gate, up      4 h i FLOPs                        ... and `wide` does not
    the rest      e (4h + 2q + 2k + 3i) bytes        norms, RoPE, activations: ... and `everything` does not. Fused MLPs make
                                                     their product again at any level, so they have no 3i

The backward pass takes 2.5 times attention's forward pass and the matmuls once more (frozen weights have no gradient; trained
ones, twice more). What goes to host memory costs no time where it travels while a layer computes, and what is left over of it
elsewhere, once forward and once backward.

`fastest` looks for the least of it that fits: each pair of levels, with as many layers of the higher one as there is memory for.
Two levels are enough: of several prices in time and memory, a mix of the two next to the limit is best.

Rates are what kernels reach, not data sheets: measured on an H200, scaled by data sheets for others. Only their ratios decide
what is kept, so a card that is not known is taken for one of its generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

from fxtune.models.dims import Shape
from fxtune.techniques.checkpointing.plan import LEVELS, RecomputePlan
from fxtune.techniques.estimate.memory import Need, forecast, is_fused, kind_of, number_of, sent_bytes

if TYPE_CHECKING:
    from fxtune.techniques.facts import Facts

ROWS = 4096
"""Rows of a tile of an MLP whose matmuls run nearly as fast as those of the whole row."""
SLOWER = 0.02
"""What tiles of ROWS rows cost, as a share of the MLP's time; half of that at twice as many rows."""
WORTH = 0.005
"""What a mix of levels must save, as a share of the step's time: each level is one more graph to compile."""


@dataclass(frozen=True)
class Rates:
    """Of one card, a second."""

    matmul: float
    """FLOPs of matrix products in 16 bits."""
    fp8: float
    attention: float
    """FLOPs of causal attention, forward and backward together."""
    memory: float
    """Bytes read and written on the device."""
    link: float
    """Bytes to or from pinned host memory."""


HOPPER = Rates(matmul=690e12, fp8=1150e12, attention=600e12, memory=4.0e12, link=50e9)
RATES = {
    "H200": HOPPER,
    "GH200": Rates(690e12, 1150e12, 600e12, 3.4e12, 300e9),
    "H100": Rates(650e12, 1100e12, 570e12, 2.8e12, 50e9),
    "H100 PCIe": Rates(480e12, 800e12, 400e12, 1.7e12, 50e9),
    "B200": Rates(1500e12, 2800e12, 1100e12, 6.5e12, 50e9),
    "A100": Rates(250e12, 250e12, 150e12, 1.6e12, 24e9),
    "L40S": Rates(240e12, 420e12, 140e12, 0.75e12, 24e9),
    "RTX 4090": Rates(150e12, 290e12, 120e12, 0.9e12, 24e9),
    "RTX 3090": Rates(65e12, 65e12, 50e12, 0.8e12, 24e9),
}
"""By a part of the card's name, the longest that it holds."""
GENERATIONS = {8: RATES["A100"], 9: HOPPER, 10: RATES["B200"], 12: RATES["L40S"]}
"""By the first number of its compute capability."""
CPU = Rates(1e12, 1e12, 0.5e12, 50e9, 50e9)


@dataclass(frozen=True)
class Work:
    """Seconds of one layer's forward pass."""

    attention: float
    narrow: float
    """q, k, v and o."""
    wide: float
    """gate and up."""
    down: float
    rest: float

    @property
    def forward(self) -> float:
        return self.attention + self.narrow + self.wide + self.down + self.rest

    def backward(self, trained: bool) -> float:
        """Seconds of its backward pass. `trained`: the weights have gradients, too."""
        return 2.5 * self.attention + (1 + trained) * (self.narrow + self.wide + self.down) + self.rest

    def again(self, level: str) -> float:
        """Seconds that computing again takes what a layer of that level did not keep; down's product is never wanted."""
        dropped = [self.rest, self.wide, self.narrow, self.attention]
        return sum(dropped[: LEVELS[::-1].index(level)])


@dataclass(frozen=True)
class Choice:
    keeping: RecomputePlan
    need: Need
    added: float
    """Seconds a micro-batch."""
    step: float
    """Seconds that the layers of a micro-batch take if everything is kept."""


def rates(facts: Facts) -> Rates:
    """What the card of `facts` does a second."""
    if facts.device != "cuda":
        return CPU
    named = sorted((name for name in RATES if name in facts.device_name), key=len)
    return RATES[named[-1]] if named else GENERATIONS.get((facts.capability or (9, 0))[0], HOPPER)


def work(facts: Facts) -> Work:
    """What one layer's forward pass of a micro-batch of `facts` takes."""
    shape, card, tokens = Shape.of(facts.text), rates(facts), facts.tokens
    h, q, k, i = shape.hidden, shape.q, shape.k, shape.inner
    product = tokens * 2 / (card.fp8 if kind_of(facts) == "fp8" else card.matmul)
    attended = tokens * 2 * (tokens // max(facts.micro_batch_size, 1)) * q / card.attention
    moved = number_of(facts) * tokens * (4 * h + 2 * q + 2 * k + (0 if is_fused(facts) else 3 * i)) / card.memory
    return Work(attended, product * h * (2 * q + 2 * k), product * 2 * h * i, product * h * i, moved)


def added(facts: Facts, keeping: RecomputePlan) -> float:
    """Seconds that a micro-batch takes longer under `keeping` than if everything were kept and nothing sent."""
    shape, card, each, tokens = Shape.of(facts.text), rates(facts), work(facts), facts.tokens
    backward, total = each.backward(_trained(facts)), 0.0
    for level, sends in zip(keeping.levels(shape.layers), keeping.sending(shape.layers), strict=True):
        again = each.again("wide" if level == "budget" else level)
        if keeping.tiles > 1:
            again = max(again, each.again("narrow")) + SLOWER * ROWS * keeping.tiles / tokens * (each.wide + each.down)
        total += again
        if sends:
            size = sent_bytes(facts, keeping, level) * tokens
            travels = size / card.link
            # Copies read and write the device's memory, too, so that they are never quite free.
            total += max(travels - each.forward, 0) + max(travels - backward - again, 0) + 2 * size / card.memory
    return total


def fastest(facts: Facts, ways: Iterable[tuple[RecomputePlan, tuple[str, ...]]], host: float) -> Choice | None:
    """The choice that adds least time and fits `facts.free_memory` and `host` bytes of pinned memory; None: nothing fits.

    `ways`: what besides levels is to be tried (sent, tiles), each with the levels that go with it.
    """
    shape, each = Shape.of(facts.text), work(facts)
    step = shape.layers * (each.forward + each.backward(_trained(facts)))
    found: list[tuple[float, int, Choice]] = []
    for way, levels in ways:
        for low, high in combinations_with_replacement(sorted(levels, key=LEVELS.index), 2):
            choice = _most(facts, way, low, high, shape.layers, host, step)
            if choice is not None:
                price = choice.added + (WORTH * step if choice.keeping.mix else 0.0)
                found.append((price, choice.need.host, choice))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


def within(facts: Facts, keeping: RecomputePlan, host: float) -> tuple[RecomputePlan, Need]:
    """`keeping`, with fewer layers that send where `host` bytes of pinned memory would not hold what all of them do."""
    need = forecast(facts, keeping)
    if need.host > host:
        sending = keeping.sending(Shape.of(facts.text).layers)
        keeping = replace(keeping, senders=int(host * sum(sending) // need.host))
        need = forecast(facts, keeping)
    return keeping, need


def _most(
    facts: Facts, way: RecomputePlan, low: str, high: str, layers: int, host: float, step: float
) -> Choice | None:
    """As many layers of level `high` as fit, the others of level `low`; None where all of level `low` does not fit."""

    def made(count: int) -> Choice | None:
        level = low if count == 0 else high if count == layers else ""
        keeping, need = within(
            facts,
            replace(way, level=level) if level else replace(way, mix=((low, layers - count), (high, count))),
            host,
        )
        fits = need.device <= facts.free_memory and need.host <= host
        return Choice(keeping, need, added(facts, keeping), step) if fits else None

    least, most, best = 0, layers, made(0)
    while best is not None and low != high and least < most:
        middle = (least + most + 1) // 2
        choice = made(middle)
        if choice is None:
            most = middle - 1
        else:
            least, best = middle, choice
    return best


def _trained(facts: Facts) -> bool:
    return not facts.techniques.lora.enabled
