"""The race of a sweep as a function of losses: who runs next, how far, and who is stopped."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxtune.tuning.race import Bracket, Entrant, EntrantState, Race, halving, hyperband, limited


def final(number: int) -> float:
    return [0.5, 0.3, 0.9, 0.1, 0.8, 0.2, 0.7, 0.6][number % 8]


def play(race: Race, losses=lambda number, rung: final(number), workers: int = 1, restart=lambda: False) -> list:
    """Play a race with `workers` jobs at a time. Returns (number, from, to) of each job in the order they end."""
    done, running = [], []
    while not race.over:
        while len(running) < workers and (following := race.next()) is not None:
            if isinstance(following, int):
                race.add(Entrant(following, race.bracket_of(following)))
                continue
            following[0].state = EntrantState.running
            running.append((following, following[0].reached))
        (entrant, rung), since = running.pop(0)
        done.append((entrant.number, since, rung))
        race.report(entrant, rung, losses(entrant.number, rung))
        if restart() and not running:
            again = Race(race.brackets, race.eta)
            for entrant in race.entrants:
                again.add(Entrant(entrant.number, entrant.bracket, entrant.state, dict(entrant.losses)))
            assert not again.judge_all(), "all verdicts were known"
            race = again
    return done


def test_halving_of_eight_costs_two_and_a_half_runs_and_finds_the_best():
    race = Race(halving(8, 2, 8), 2)
    jobs = play(race)
    assert sum(to - since for _, since, to in jobs) / 8 == 2.5
    assert [number for number, _, to in jobs if to == 8] == [3]
    assert race.winner().number == 3
    assert [entrant.number for entrant in race.ranking()][:4] == [3, 5, 1, 0]
    assert race.entrants[5].reached == 4
    assert race.entrants[5].state is EntrantState.stopped


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_verdicts_do_not_depend_on_how_many_run_at_a_time(workers):
    race = Race(halving(8, 2, 8), 2)
    assert sorted(play(race, workers=workers)) == sorted(play(Race(halving(8, 2, 8), 2)))


def test_hyperband_has_the_brackets_of_the_paper():
    assert hyperband(3, 81) == [
        Bracket(81, (1, 3, 9, 27, 81)),
        Bracket(34, (3, 9, 27, 81)),
        Bracket(15, (9, 27, 81)),
        Bracket(8, (27, 81)),
        Bracket(5, (81,)),
    ]
    assert limited(hyperband(2, 4), 6) == [Bracket(4, (1, 2, 4)), Bracket(2, (2, 4))]
    race = Race(hyperband(2, 4), 2)
    play(race, lambda number, rung: float(number))
    assert race.winner().number == 0
    assert sum(entrant.state is EntrantState.done for entrant in race.entrants) == 1 + 1 + 3


def test_failed_and_broken_configurations_do_not_hold_up_the_others():
    race = Race(halving(4, 2, 4), 2)
    for number in range(4):
        race.add(Entrant(number, 0, EntrantState.running))
    for number, loss in enumerate((math.nan, 0.5, 0.4)):
        assert race.report(race.entrants[number], 1, loss) == []
    assert race.fail(race.entrants[3], "out of memory") == [race.entrants[0]]
    assert race.next() == (race.entrants[1], 2)
    race.fail(race.entrants[1], "not finite")
    race.fail(race.entrants[2], "not finite")
    assert race.over
    assert race.winner() is None


def test_pruner_judges_each_configuration_when_it_arrives():
    race = Race(halving(3, 2, 4), 2, prunes=lambda one: one.number == 1)
    jobs = play(race)
    assert jobs == [(0, 0, 1), (0, 1, 2), (0, 2, 4), (1, 0, 1), (2, 0, 1), (2, 1, 2), (2, 2, 4)]


@given(st.integers(1, 12), st.integers(2, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_any_race_ends_and_a_restart_changes_nothing(count, eta, rungs, workers, seed):
    draw = random.Random(seed)
    table = [[draw.random() for _ in range(eta**rungs + 1)] for _ in range(count)]
    brackets = halving(count, eta, eta**rungs)
    jobs = play(Race(brackets, eta), lambda number, rung: table[number][rung], workers)
    restarted = random.Random(seed)
    again = play(Race(brackets, eta), lambda number, rung: table[number][rung], 1, lambda: restarted.random() < 0.5)
    assert sorted(jobs) == sorted(again)
    begun = [number for number, since, _ in jobs if since == 0]
    assert sorted(begun) == list(range(count))
