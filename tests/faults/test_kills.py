"""A run that was killed with SIGKILL and started again ends bit for bit as one that nobody disturbed.

scripts/faults/kill.py does this by the hundred, at random instants; here are some of each kind.
"""

from __future__ import annotations

import dataclasses

import pytest
from support.killing import Aim, Reference, disturb, prepare

PHASES = ("tokenising", "building", "proving", "asking", "training", "evaluating", "saving", "exporting")
TWICE = {"full": (8, 2), "packed": (6, 2), "bucketed": (10, 2)}
"""At which step of its own each of two attempts dies: the first when two checkpoints were begun, so that one is whole, and both
in the first epoch."""


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """The undisturbed run of a mode, once."""
    made: dict[str, Reference] = {}

    def of(mode: str) -> Reference:
        if mode not in made:
            folder = tmp_path_factory.mktemp("whole") / mode
            made[mode] = Reference.of(forks, prepare(folder, mode), folder)
        return made[mode]

    return of


@pytest.fixture
def killed(forks, tmp_path):
    """Kill a run by `aims`, let it end and compare it with the undisturbed one. Returns its kills."""

    def twin(mode: str, reference: Reference, *aims: Aim):
        prepare(tmp_path / mode, mode)
        fate = disturb(forks, reference, tmp_path / mode, list(aims))
        assert fate.code == 0, fate.differences
        assert fate.differences == []
        assert not fate.left, "a process of a killed run is still there"
        assert len(fate.kills) == len(aims)
        return fate.kills

    return twin


def test_an_undisturbed_run_learns_from_every_document_once_an_epoch(whole):
    ending = whole("bucketed").ending
    names = [name for _, micro_batches, _ in ending.steps for documents in micro_batches for name in documents]
    assert len(names) == 2 * 48
    assert len(set(names[:48])) == len(set(names[48:])) == 48
    assert names[:48] != names[48:], "each epoch has an order of its own"
    assert ending.leftovers == []


@pytest.mark.slow
def test_what_is_compared_tells_runs_apart(forks, whole, tmp_path):
    """Another seed of the same words changes all that is compared but what was held out."""
    words = prepare(tmp_path / "other", "lora")
    other = Reference.of(forks, [*words, "run.seed=1"], tmp_path / "other").ending
    differing = {line.partition(":")[0] for line in whole("lora").ending.differences(other)}
    assert differing == {"sums", "state", "lines", "result", "steps"}


def test_one_run_killed_in_eight_phases(killed, whole):
    kills = killed("lora", whole("lora"), *(Aim(phase, share=0.0) for phase in PHASES))
    hit = [kill.phase == phase for kill, phase in zip(kills, PHASES, strict=True)]
    assert sum(hit) >= 6, f"aimed at {PHASES}, hit {[kill.phases for kill in kills]}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", TWICE)
def test_two_kills_in_one_epoch(killed, whole, mode):
    reference = whole(mode)
    assert len(set(reference.ending.uses().values())) == 1
    first, second = killed(mode, reference, *(Aim("training", step, 0.5) for step in TWICE[mode]))
    assert first.resumed > 0
    assert max(first.steps, second.steps) < len(reference.ending.steps) / max(reference.ending.uses().values())


@pytest.mark.slow
def test_four_workers_whose_run_is_killed_leave_and_change_no_bit(killed, whole):
    """Compared with the run without workers. The kill leaves them behind, and the next attempt starts its own meanwhile. Those
    of the evaluation are there until the very end.
    """
    without = whole("lora")
    reference = dataclasses.replace(without, words=[*without.words, "loader.num_workers=4"])
    killed("lora", reference, Aim("training", 9, 0.5, alone=True))
