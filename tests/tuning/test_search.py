"""The search of `fxtune tune`, with a stand-in for the trials: what it tries, what wins, and what it does when time is
short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tuning import LOSSES, SPEED, FakeTrials, tiny_config, tiny_context

from fxtune.errors import ConfigError
from fxtune.tuning import search as module
from fxtune.tuning import search_space, trial
from fxtune.tuning.search import Search
from fxtune.tuning.search_space import Candidate
from fxtune.tuning.trial import Outcome, TrialCache, TrialResult

EAGER = "techniques.attention.backend=eager"
COMPILED = "techniques.compile.enabled=true"


@pytest.fixture
def trials(monkeypatch) -> FakeTrials:
    fake = FakeTrials()
    monkeypatch.setattr(trial, "measure", fake.measure)
    monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def start(tmp_path):
    """Makes a search of TINY with some keys changed."""

    def make(*axes: str, minutes: float = 30.0, **keys: Any) -> Search:
        config = search_space.apply_deltas(tiny_config(), {key.replace("__", "."): keys[key] for key in keys})
        cache = TrialCache(tmp_path / "cache.json")
        search = Search(config, [], tiny_context(), list(axes), minutes * 60, 2, cache, notes.append)
        search.notes = notes
        return search

    notes: list[str] = []
    return make


@pytest.fixture
def run(start):
    def go(*axes: str, **options: Any) -> Search:
        search = start(*axes, **options)
        search.run()
        return search

    return go


def tried(search: Search) -> list[dict[str, Any]]:
    return [candidate.deltas for candidate in search.candidates if candidate.results]


def verdict(search: Search, **keys: Any) -> str:
    deltas = {key.replace("__", "."): value for key, value in keys.items()}
    (found,) = (candidate for candidate in search.candidates if candidate.deltas == deltas)
    return found.verdict


def test_each_axis_starts_from_the_best_of_those_before(trials, run):
    trials.rules = {EAGER: 1.3, COMPILED: 0.5, "train.micro_batch_size=2": 1.2, "train.micro_batch_size=1": 0.7}
    search = run("attention", "compile", "micro_batch")
    winner, why = search.winner()
    assert winner.deltas == {"techniques.attention.backend": "eager", "train.micro_batch_size": 2}
    assert winner.speed == pytest.approx(SPEED * 1.3 * 1.2)
    assert "1,560 tokens/s, +56.0% against the recipe as it is (1,000)" in why
    assert search.untried == []
    best = [call for call in trials.calls if {EAGER, "train.micro_batch_size=2"} <= {*call}]
    assert len(best) >= 1 + module.REPEATS
    assert any({EAGER, COMPILED} <= {*call} for call in trials.calls), (
        "the compiler is tried with the better attention"
    )
    assert verdict(search, techniques__attention__backend="flash4").startswith(
        "refused: attention.backend: flash4 needs a GPU"
    )


def test_no_further_step_in_a_direction_that_was_slower(trials, run):
    trials.rules = {"train.micro_batch_size=2": 0.9, "techniques.checkpointing.policy=selective": 0.8}
    search = run("checkpointing", "micro_batch", "workers", train__global_batch_size=8)
    assert search.winner()[0].deltas == {}
    selective = {"techniques.checkpointing.enabled": True, "techniques.checkpointing.policy": "selective"}
    # Recomputing a little was slower, so recomputing more is not tried; nor is one row, because two rows were slower.
    assert tried(search) == [{}, selective, {"train.micro_batch_size": 8}, {"train.micro_batch_size": 2}]
    assert any("the loop waits for data 0.0% of the time" in note for note in search.notes)


def test_in_a_tie_the_fewest_changes_win(trials, run):
    trials.rules = {EAGER: 1.0 + module.NOISE / 2}
    winner, why = run("attention").winner()
    assert winner.deltas == {}
    assert why.startswith("the recipe as it is: 1,000 tokens/s. Tied with it, within 1.0% (the assumed noise): ")
    assert "attention.backend=eager. The candidate that changes the fewest keys wins." in why


def test_speeds_within_the_spread_of_repeated_measurements_are_a_tie(monkeypatch, run):
    speeds = {"eager": iter([1100.0, 900.0, 1300.0]), "": iter([1000.0, 1010.0, 990.0])}

    def measure(overrides, steps, limit):
        return TrialResult(Outcome.measured, 0.1, next(speeds["eager" if EAGER in overrides else ""]), 1.0, (3.0,))

    monkeypatch.setattr(trial, "measure", measure)
    winner, why = run("attention").winner()
    assert winner.deltas == {}, "10 % faster once, but its measurements differ by 36 %"
    assert "the spread of repeated measurements" in why


def test_failed_trials_are_results(trials, run):
    trials.rules = {
        COMPILED: Outcome.crashed,
        EAGER: Outcome.refused,
        "train.micro_batch_size=1": Outcome.memory,
        "train.micro_batch_size=2": 2.0,
    }
    search = run("compile", "attention", "micro_batch")
    assert search.winner()[0].deltas == {"train.micro_batch_size": 2}
    assert verdict(search, techniques__compile__enabled=True) == "crashed: illegal instruction"
    assert verdict(search, techniques__attention__backend="eager") == "refused: illegal instruction"
    assert verdict(search, train__micro_batch_size=1) == "out of memory: illegal instruction"
    assert any("crashed: illegal instruction" in note for note in search.notes)


LONG = (3.0,) * 20


@pytest.mark.parametrize(
    ("losses", "wins"),
    [
        ((*LONG[:-1], 3.012), True),  # 4e-3 off in a later step, as training amplifies rounding
        ((*LONG[:-1], 3.018), False),  # 6e-3, more than five times the tolerance
        ((3.006, 2.994, *LONG[2:]), False),  # the first step has the same weights: 2e-3 off, whatever the mean
        ((3.0, *[3.004] * 19), False),  # all others are 1.3e-3 off, and so is the mean
        ((*LONG, 3.0), False),
        ((*LONG[:-1], float("nan")), False),
    ],
    ids=["one step", "one step far", "the first step", "the mean", "more steps", "nan"],
)
def test_a_candidate_with_other_losses_never_wins(trials, run, losses, wins):
    trials.rules = {"all": LONG, EAGER: losses}
    search = run("attention")
    assert search.winner()[0].deltas == ({"techniques.attention.backend": "eager"} if wins else {})
    assert verdict(search, techniques__attention__backend="eager").startswith("" if wins else "another loss")


def test_the_verdict_says_how_far_the_losses_are_off(trials, run):
    trials.rules = {EAGER: (LOSSES[0], 3.5)}
    assert verdict(run("attention"), techniques__attention__backend="eager") == (
        "another loss: off by 1.0e-01, more than 0.001"
    )


def test_if_the_recipe_does_not_run_the_search_starts_from_a_setting_that_does(trials, run, monkeypatch):
    def measure(overrides, *more):
        if any(text.startswith("train.micro_batch_size") for text in overrides):
            return trials.measure(overrides, *more)
        return TrialResult(Outcome.memory, 1.0, reason="CUDA out of memory")

    monkeypatch.setattr(trial, "measure", measure)
    trials.rules = {"train.micro_batch_size=1": 0.9}
    search = run("micro_batch", train__micro_batch_size=4)
    assert search.winner()[0].deltas["train.micro_batch_size"] in (1, 2)
    assert any("gives no measurement (out of memory: CUDA out of memory)" in note for note in search.notes)


# --- time


def test_a_trial_that_reaches_its_own_limit_is_a_result(trials, run):
    trials.rules = {EAGER: Outcome.hung}
    search = run("attention")
    assert search.winner()[0].deltas == {}
    assert verdict(search, techniques__attention__backend="eager").startswith("over its time limit")


def test_no_time_for_the_first_trial_is_an_error(trials, run):
    trials.rules = {"all": Outcome.hung}
    with pytest.raises(ConfigError, match=r"--minutes 0\.1: the time was up before the first trial ended"):
        run("attention", minutes=0.1)


@pytest.mark.parametrize(
    ("rules", "seconds", "count"),
    [
        ({}, 70.0, 2),  # a third trial would need its own 70 s and those of one more measurement of each of the two
        ({EAGER: (3.0, 3.5)}, 100.0, 3),  # the second cannot win, so it is not repeated
        ({EAGER: 3.0}, 100.0, 3),  # it is clear which of the two is faster
    ],
    ids=["close speeds", "other losses", "clear difference"],
)
def test_time_is_reserved_for_repeats_only_if_two_candidates_are_close(trials, run, rules, seconds, count):
    trials.rules, trials.seconds = rules, seconds
    search = run("attention", "micro_batch", minutes=3)
    assert len(tried(search)) == count
    assert search.untried


def test_a_direction_that_was_given_up_does_not_count_as_untried(trials, run):
    trials.rules, trials.seconds = {"train.micro_batch_size=8": 0.5}, 70.0
    search = run("micro_batch", "attention", "workers", minutes=3, train__global_batch_size=16)
    # 8 rows were slower, so 16 are given up; the loop does not wait for data; flash4 was refused.
    assert search.untried == ["micro_batch_size=1", "attention.backend=eager"]
    assert verdict(search, techniques__attention__backend="flash4").startswith("refused")


# --- the cache


def test_the_cache_key_names_everything_a_result_depends_on(start):
    search, context = start("attention"), tiny_context()

    def key(**facts: Any) -> str:
        search.context = replace(context, facts=replace(context.facts, **facts))
        return json.dumps(search._cache_key(Candidate({}, {}), 0), default=str)

    assert key() == key(free_memory=1)
    for other in (
        {"device_name": "H200"},
        {"memory": 8 << 30},
        {"model": {"hidden_size": 8}},
        {"sequence_length": 9},
        {"packages": {"torch": "9"}},
        {"dtype": "float16"},
    ):
        assert key(**other) != key()


def test_a_plan_has_a_line_for_each_candidate_and_runs_nothing(trials, start, cwd):
    planned = list(start(*search_space.AXES).planned())
    titles = [one.title for _, one in planned]
    assert titles[0] == "the recipe as it is"
    assert {"attention.backend=eager", "micro_batch_size=2"} <= {*titles}
    assert len(titles) == len({*titles})
    assert trials.calls == []
    assert list(Path.cwd().iterdir()) == []
