"""The space of a sweep, as it is typed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxtune.config.compose import load
from fxtune.errors import ConfigError
from fxtune.tuning.sweep_space import parse


def only(text: str):
    (found,) = parse([f"sweep.{text}"])
    return found


def test_short_names_intervals_and_choices():
    rate = only("lr=loguniform(1e-4,1e-2)")
    assert rate.key == "optimizer.lr"
    assert rate.at(0.5) == pytest.approx(1e-3)
    assert (rate.at(0.0), rate.at(1.0)) == (pytest.approx(1e-4), pytest.approx(1e-2))
    rank = only("lora.r=loguniform(4,64)")
    assert (rank.key, rank.at(0.0), rank.at(0.9999), rank.size) == ("techniques.lora.r", 4, 64, 61)
    assert {only("r=uniform(1,3)").at(share / 30) for share in range(30)} == {1, 2, 3}
    assert only("r=8,16").choices == only("r=choice(8,16)").choices == ((8, "8"), (16, "16"))
    assert only("optimizer.name=choice(adamw,lion)").at(0.7) == "lion"
    both = parse(["sweep.lr=1e-3,2e-3", "sweep.r=8,16"])
    assert [dimension.key for dimension in both] == ["optimizer.lr", "techniques.lora.r"]


@settings(max_examples=20)
@given(st.floats(0, 1))
def test_every_value_can_be_set(share):
    words = ["lr=loguniform(1e-7,3)", "r=uniform(1,99)", "betas=choice([0.9,0.95],[0.9,0.99])", "weight_decay=0,0.1"]
    for text in words:
        found = only(text)
        value = found.at(share)
        key, _, spelled = found.override(value).partition("=")
        assert key == found.key
        assert value in (
            spelled,
            float(spelled) if spelled[0] != "[" else None,
            int(spelled) if spelled.isdigit() else None,
        )


def test_override_gives_the_value_to_the_config():
    found = only("betas=choice([0.9,0.95],[0.9,0.99])")
    assert load([found.override(found.at(0.9))]).optimizer.betas == [0.9, 0.99]
    rate = only("lr=loguniform(1e-9,1e-8)")
    assert load([rate.override(rate.at(0.3))]).optimizer.lr == rate.at(0.3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lrr=choice(1,2)", "there is no key `lrr`; did you mean `lr`?"),
        ("name=choice(a,b)", "may mean optimizer.name, schedule.name: write the whole key"),
        ("data.sequence_length=choice(1,2)", "changes the data, so the losses could not be compared"),
        ("sequence_length=choice(1,2)", "`sweep.data.sequence_length` cannot be swept: it changes the data"),
        ("model.path=choice(a,b)", "different models cannot be compared"),
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
