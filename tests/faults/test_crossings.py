"""Ten cases of crossed features, each with the oracles that its features concern; scripts/faults/crossings.py has them
all. Each case was wrong once, or has features that no other test crosses."""

from __future__ import annotations

import pytest
from support.crossings import Bench, Case

CASES = {
    "a short last step before the run is extended": (
        "rows=chat dedup=exact held=share long=split mix=two export=last",
        "rows eval longer-run",
    ),
    "factored adapters and a reference": ("rows=dpo technique=pissa held=share", "eval export"),
    "autocast and the start as reference": ("rows=dpo precision=autocast reference=start mix=two", "verify"),
    "judged answers without packing": ("rows=kto packing=padded held=share dedup=exact batch=4_of_4", "steps rows"),
    "trained tokens under autocast": ("rows=chat technique=tokens precision=autocast packing=padded", "steps export"),
    "long chats with a picture, near-copies with another": ("rows=images long=split dedup=near", "rows"),
    "long pairs with a picture": ("rows=image_pairs long=truncate prompts=shared", "rows"),
    "shared, truncated prompts and trained tokens": (
        "rows=dpo long=truncate prompts=shared technique=tokens",
        "verify",
    ),
    "growing rows, all weights": (
        "rows=text technique=full mix=growing schedule=wsd optimizer=muon length=1_epoch",
        "rows kill",
    ),
    "two ranks, of which one has nothing in the last step": (
        "rows=kto length=1_epoch ranks=2 long=drop held=files",
        "rows ranks",
    ),
}
"""What crosses: (the values of the factors, the oracles)."""
SHORT = {"longer-run": "longer run", "verify": "verify --loss", "kill": "kill -9", "ranks": "two ranks"}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with Bench(tmp_path_factory.mktemp("crossings")) as made:
        yield made


@pytest.mark.slow
@pytest.mark.vital
@pytest.mark.parametrize("name", CASES)
def test_a_crossing(bench, name):
    words, oracles = CASES[name]
    values = dict(word.replace("_of_", " of ").replace("1_epoch", "1 epoch").split("=") for word in words.split())
    asked = frozenset(SHORT.get(oracle, oracle) for oracle in oracles.split())
    outcome = bench.run(Case(list(CASES).index(name), values), asked)
    assert outcome.trained
    assert not outcome.dropped
    assert asked <= set(outcome.ran), "an oracle has nothing to compare"
    assert not outcome.wrong
