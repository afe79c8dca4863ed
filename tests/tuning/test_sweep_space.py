"""The space of a sweep, as it is typed."""

from __future__ import annotations

import optuna
import pytest

from fxtune.config.compose import load
from fxtune.errors import ConfigError
from fxtune.tuning.sweep_space import combinations, listed, parse


def only(text: str):
    (found,) = parse([f"sweep.{text}"])
    return found


def drawn(dimensions, count: int = 30) -> list[dict]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [
        {dimension.key: dimension.suggest(trial) for dimension in dimensions}
        for trial in (study.ask() for _ in range(count))
    ]


def test_short_names_intervals_and_choices():
    dimensions = parse(
        [
            "sweep.lr=loguniform(1e-4,1e-2)",
            "sweep.lora.r=loguniform(4,6)",
            "sweep.weight_decay=0,0.1",
            "sweep.optimizer.name=choice(adamw,lion)",
            "sweep.betas=choice([0.9,0.95],[0.9,0.99])",
        ]
    )
    found = {key: [values[key] for values in drawn(dimensions)] for key in drawn(dimensions, 1)[0]}
    assert all(1e-4 <= rate <= 1e-2 for rate in found["optimizer.lr"])
    assert 8 < sum(rate < 1e-3 for rate in found["optimizer.lr"]) < 22, "evenly in the logarithm"
    assert {*found["techniques.lora.r"]} == {4, 5, 6}
    assert {*found["optimizer.weight_decay"]} == {0, 0.1}
    assert {*found["optimizer.name"]} == {"adamw", "lion"}
    assert only("r=8,16").choices == only("r=choice(8,16)").choices
    for values in drawn(dimensions, 3):
        config = load([dimension.override(values[dimension.key]) for dimension in dimensions])
        assert config.optimizer.lr == values["optimizer.lr"]
        assert config.techniques.lora.r == values["techniques.lora.r"]
        assert str(config.optimizer.betas).replace(" ", "") == values["optimizer.betas"]


def test_small_space_is_listed_and_a_larger_one_is_not():
    space = parse(["sweep.r=uniform(1,3)", "sweep.lora.alpha=8,16"])
    every = listed(space, 6, 0)
    assert len({tuple(values.items()) for values in every}) == combinations(space) == 6
    assert listed(space, 2, 0) == every[:2]
    assert listed(space, 6, 1) != every
    assert listed(space, 1, 0) == listed(parse(["sweep.lr=uniform(1,2)"]), 6, 0) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lrr=choice(1,2)", "there is no key `lrr`; did you mean `lr`?"),
        ("name=choice(a,b)", "may mean optimizer.name, schedule.name: write the whole key"),
        ("data.sequence_length=choice(1,2)", "changes the data, so the losses could not be compared"),
        ("sequence_length=choice(1,2)", "`sweep.data.sequence_length` cannot be swept: it changes the data"),
        ("model.path=choice(a,b)", "different models cannot be compared"),
        ("objective.temperature=choice(1,2)", "changes the loss, so the losses could not be compared"),
        ("run.seed=choice(1,2)", "the order of the data"),
        ("epochs=1,2", "the same share of a run of one length"),
        ("stop.patience=1,2", "the sweep stops the losers itself"),
        ("checkpoint.every=1,2", "does not change what is learned"),
        ("optimizer=choice(1,2)", "is a group of keys (name, lr,"),
        ("r=choice(8,abc)", "is a whole number, and 'abc' is not"),
        ("optimizer.name=choice(adamw,lionn)", "did you mean `lion`?"),
        ("r=choice()", "cannot be read"),
        ("r=choice(8)", "has one value only. Give techniques.lora.r=VALUE"),
        ("r=uniform(4.5,8)", "is a whole number, so both ends must be"),
        ("r=uniform(-2,8)", "`techniques.lora.r=-2` must be"),
        ("lr=loguniform(1,1)", "is an empty range: the first number must be below the second"),
        ("lr=loguniform(2e-3,1e-3)", "is an empty range"),
        ("lr=uniform(1,nan)", "is an empty range"),
        ("lr=loguniform(0,1)", "the logarithm of 0 does not exist"),
        ("lr=loguniform(1)", "takes two numbers"),
        ("lr=lognormal(1,2)", "there is no `lognormal(...)`; did you mean `loguniform`?"),
        ("optimizer.name=uniform(1,2)", "is no number. Name its values"),
        ("lr", "names no values"),
    ],
)
def test_mistake_is_one_message(text, told):
    with pytest.raises(ConfigError) as error:
        only(text)
    assert told in str(error.value)
    assert str(error.value).count("on the command line") == 1


def test_all_mistakes_at_once():
    with pytest.raises(ConfigError, match=r"(?s)no key `lrr`.*empty range.*given twice"):
        parse(["sweep.lrr=1,2", "sweep.lr=uniform(2,1)", "sweep.r=8,16", "sweep.techniques.lora.r=8,16"])
