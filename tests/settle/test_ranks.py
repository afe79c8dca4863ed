"""How many ranks a run has, and how they share its work: decided by facts of machines, without the machines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.architectures import enable
from support.documents import EXAMPLES
from support.forecasts import LLAMA, TECHNIQUES, card

from fxtune.config.compose import load
from fxtune.config.root import Config, RunConfig, TrainConfig
from fxtune.data.config import DataConfig
from fxtune.distributed.parallel import Degrees, ParallelConfig
from fxtune.errors import ConfigError
from fxtune.facts.run import Facts
from fxtune.objectives.base import Objective
from fxtune.objectives.needs import Needs
from fxtune.plugins import files_used
from fxtune.settle import ranks
from fxtune.settle.ranks import open_counts, ranks_of, require_possible, share

LORA = {**TECHNIQUES, "lora": {"r": 16, "target_modules": ["all-linear"]}, "checkpointing": {"policy": "auto"}}
FULL = {**LORA}
del FULL["lora"]
KEPT = {"attention": {}, "lora": {}, "checkpointing": {"policy": "full"}}
FULL_KEPT = {"attention": {}, "checkpointing": {"policy": "full"}}
LARGE = LLAMA | dict(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
)
LONG = 2**20
"""Tokens of a row that does not fit one H200."""


@pytest.fixture
def cards(monkeypatch):
    """A machine with eight cards, whose facts no process may look for."""
    import transformers.models.llama.modeling_llama  # noqa: F401  its import looks for a real card

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(ranks, "ranks_here", lambda gpus, cpu: [int(gpus)] if gpus != "auto" else [8, 6, 4, 3, 2, 1])
    monkeypatch.setattr(ranks, "_facts_of_another_process", lambda config: pytest.fail("the forecast decides nothing"))


def config(micro_batches: int, length: int, gpus: str = "auto", techniques=LORA, **parallel: str) -> Config:
    return Config(
        run=RunConfig(gpus=gpus),
        data=DataConfig(sequence_length=length),
        train=TrainConfig(micro_batch_size=1, global_batch_size=micro_batches),
        techniques=enable(**techniques),
        parallel=ParallelConfig(**parallel),
    )


@pytest.mark.parametrize(
    ("ranks", "given", "techniques", "model", "expected"),
    [
        (2, {}, KEPT, LLAMA, Degrees(replicate=2)),
        (2, {}, FULL_KEPT, LLAMA, Degrees(shard=2)),
        (4, {}, FULL_KEPT, LLAMA, Degrees(replicate=2, shard=2)),
        (4, {}, KEPT, LARGE, Degrees(shard=4)),
        (4, {}, {**KEPT, "quantize": {"type": "fp8"}}, LARGE, Degrees(replicate=2, shard=2)),
        (4, {"replicate": "4"}, FULL_KEPT, LLAMA, Degrees(replicate=4)),
        (2, {}, {**KEPT, "quantize": {}}, LARGE, Degrees(replicate=2)),  # nf4 is not divided
    ],
)
def test_what_does_not_fit_a_card_is_divided(ranks, given, techniques, model, expected):
    facts = replace(card(80, 4096, techniques=techniques, model=model), degrees=Degrees(replicate=ranks))
    chosen, line = share(config(8, 4096, techniques=techniques, **given), facts, [ranks])
    assert chosen == expected
    assert line.startswith(f"{expected} (")


def test_degrees_that_the_recipe_refuses_are_not_chosen():
    facts = card(80, 4096, techniques=FULL_KEPT)
    given = config(8, 4096, techniques=FULL_KEPT)
    assert share(given, facts, [2])[0] == Degrees(shard=2)
    assert share(given, replace(facts, adds_tokens=True), [2])[0].shard == 1  # divided weights cannot grow


@dataclass
class OfDocuments(Objective):
    needs = Needs(whole_documents=True)


def test_rows_are_not_cut_for_an_objective_of_whole_documents():
    given = replace(config(1, LONG), objective=OfDocuments())
    degrees, _ = share(given, card(139, LONG, techniques=LORA), [8, 4, 2, 1])
    assert degrees.context == 1


@pytest.mark.slow
def test_other_process_that_looks_for_facts_finds_the_objective_of_a_plugin(cwd, monkeypatch):
    monkeypatch.setattr(ranks, "ranks_here", lambda gpus, cpu: [2, 1])
    for name in ("ranked.py", "listwise.py"):
        Path(name).write_text(EXAMPLES[name])
    with files_used(["ranked.py", "listwise.py"]):
        assert ranks_of(load(["objective=listwise", "train.global_batch_size=1", "data.sequence_length=16384"])) in (
            1,
            2,
        )


@pytest.mark.vital
@pytest.mark.usefixtures("cards")
def test_one_row_beyond_a_card_is_cut_and_one_that_fits_is_not():
    long, short = card(139, LONG, techniques=LORA), card(139, 16384, techniques=LORA)
    degrees, why = share(config(1, LONG), long, [8, 4, 2, 1])
    assert degrees == Degrees(context=8)
    assert why.startswith("context 8 (")
    assert "GiB a card by the forecast" in why
    assert open_counts(config(1, LONG)) == [8, 6, 4, 3, 2, 1]
    assert share(config(1, LONG, gpus="2"), long, [2])[0] == Degrees(context=2)
    four = share(config(4, LONG), long, open_counts(config(4, LONG)))[0]
    assert four.ranks == 8
    assert four.context > 1
    assert four.data_ranks in (1, 2, 4)
    assert share(config(1, 16384), short, open_counts(config(1, 16384)))[0].ranks == 1
    with pytest.raises(ConfigError, match=r"run\.gpus=2 needs"):
        require_possible(config(1, 16384, gpus="2"), 2, cuda=False, subject="run.gpus=2")


@pytest.mark.usefixtures("cards")
def test_facts_are_looked_for_only_where_they_decide():
    assert ranks_of(config(8, LONG)) == 8
    assert ranks_of(config(1, 4096)) == 1
    assert ranks_of(config(3, LONG, context="2")) == 6
    assert ranks_of(config(1, LONG, gpus="2")) == 2  # the ranks decide
    with pytest.raises(pytest.fail.Exception, match="the forecast decides nothing"):
        ranks_of(config(1, LONG))


@pytest.mark.usefixtures("cards")
def test_what_the_config_says_is_not_decided():
    long = card(139, LONG, techniques=LORA)
    assert share(config(8, LONG, shard="2"), long, [4])[0] == Degrees(shard=2, context=2)
    assert share(config(8, LONG, context="1"), long, [4])[0].context == 1
    assert share(config(2, 4096, shard="2"), card(139, 4096, techniques=LORA), [2])[0] == Degrees(shard=2)


def test_without_cards_nothing_is_cut_that_is_not_asked_for():
    facts = Facts(memory=1, free_memory=1)
    assert share(config(4, LONG), facts, [2])[0] == Degrees(replicate=2)
    with pytest.raises(ConfigError, match=r"a number that 2 divides"):
        require_possible(config(1, LONG), 2, cuda=False)
    require_possible(config(1, LONG), 2, cuda=True)
