"""The lines that a run prints about its phases."""

import re
import threading

import pytest
from support.harness import wait_for

from fxtune.system.terminal import progress
from fxtune.system.terminal.progress import phase


@pytest.fixture
def log():
    """Phases are printed, as in a log."""
    progress.show("plain")
    yield
    progress.hide()


def test_a_phase_is_announced_before_its_work_starts(log, capsys):
    with phase("Tokenizing a.jsonl"):
        assert capsys.readouterr().out == "Tokenizing a.jsonl ...\n"
    with phase("Evaluating", announce=False):
        assert capsys.readouterr().out == ""


def test_after_a_while_a_log_says_how_far_the_innermost_phase_is(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    progress.show("plain")
    try:
        with phase("Training", 40, "steps", announce=False), phase("Asking", 8, "questions") as work:
            work.advance(2)
            seen = []
            wait_for(lambda: seen.append(capsys.readouterr().out) or "25%" in "".join(seen))
            assert re.search(r"^Asking: 25%, 2 of 8 questions, \d+ s$", "".join(seen), re.MULTILINE)
    finally:
        progress.hide()
    assert not any(thread.name == "fxtune-progress" and thread.is_alive() for thread in _settled())


def test_a_step_that_has_just_begun_is_not_what_a_log_says(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 0.05)
    monkeypatch.setattr(progress.Phase, "seconds", 0.0)  # however long this process does not run
    seen = []

    def step(number: int) -> bool:
        with phase(f"Step {number} of 83", announce=False):
            seen.append(capsys.readouterr().out)
        return "Training" in "".join(seen)

    progress.show("plain")
    try:
        with phase("Training", 83, "steps", announce=False) as work:
            work.advance(28)
            wait_for(lambda: step(29))
    finally:
        progress.hide()
    assert "Training: 34%, 28 of 83 steps" in "".join(seen)
    assert "Step 29" not in "".join(seen)


def _settled():
    """The threads of this process, once that of the log has ended."""
    wait_for(lambda: not any(thread.name == "fxtune-progress" for thread in threading.enumerate()))
    return threading.enumerate()


def test_counting_items_moves_the_phase():
    with phase("Step 1", 4, progress.MICRO_BATCHES) as work:
        shares = [work.share for _ in work.over("abcd")]
        assert progress.find(progress.MICRO_BATCHES) is work
    assert shares == [0, 0.25, 0.5, 0.75]
    assert work.share == 1
    assert progress.current() is None


def test_without_a_total_a_phase_shows_its_seconds():
    with phase("Building the model"):
        assert re.fullmatch(r"Building the model: \d+ s", str(progress.current()))


def test_nothing_is_printed_unless_asked_for(capsys):
    progress.show("none")
    with phase("Building the model"):
        pass
    assert capsys.readouterr().out == ""


def test_a_phase_that_fails_is_over(log):
    with pytest.raises(OSError), phase("Exporting"):
        raise OSError
    assert progress.current() is None
