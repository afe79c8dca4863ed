"""The log of a run: figures go to the tracker, the display and the state, and some notes are printed once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fxtune.checkpoint.train_state import TrainState
from fxtune.config.compose import load
from fxtune.errors import StorageError
from fxtune.objectives.reward import Reward
from fxtune.techniques.compile.report import CompileReport
from fxtune.training.run.log import RunLog, next_commands


class Recorder:
    """A tracker, a display, and a start-up timer that record their calls."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.notes: list[str] = []

    def log(self, step: int, figures: dict) -> None:
        self.logged.append((step, figures))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def summary(self) -> str:
        return "start-up: 3 s"

    def read(self) -> dict[str, float]:
        return {"imports": 1.0, "first steps": 2.0}


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def made(recorder: Recorder, step: int = 0, compile=None, folder=None) -> RunLog:
    folder = folder or SimpleNamespace(path=Path("runs/mine"))
    return RunLog(
        folder, recorder, recorder, TrainState(step=step), recorder, compile or SimpleNamespace(enabled=False)
    )


def test_last_value_of_each_figure_is_kept(recorder):
    log = made(recorder, step=4)
    log.log({"train/loss": 2.0, "train/lr": 0.1})
    log.log({"train/loss": 1.0})
    assert log.state.figures == {"train/step": 4, "train/loss": 1.0, "train/lr": 0.1}
    assert recorder.logged[0] == recorder.logged[1], "the tracker's and the display's"


def test_start_up_is_reported_once(recorder):
    log = made(recorder)
    assert log.started() == {"startup/imports_seconds": 1.0, "startup/first_steps_seconds": 2.0}
    assert log.started() == {}
    assert recorder.notes == ["start-up: 3 s"]


@pytest.mark.parametrize(
    ("step", "again", "said"),
    [
        (0, True, "ended before the first step. The same command starts again."),
        (3, True, "saved after step 3 of 9 in runs/mine. The same command goes on from there."),
        (3, False, "The same command with run.resume=auto goes on from there."),
        (9, True, "all 9 steps are done and saved in runs/mine. The same command finishes the run."),
    ],
)
def test_stopped_run_says_how_far_it_got_and_how_it_goes_on(recorder, step, again, said):
    assert said in made(recorder, step).stopped(9, again)


def test_compile_report_is_logged_once_and_a_full_disk_loses_only_its_file(recorder):
    def full(name: str, values: dict) -> None:
        raise StorageError("compile.json: no space left")

    report = CompileReport("layers", "default", 2, [], [], {"1x64": 2}, 1.5, 0, 2, "cache", 0, [])
    compile = SimpleNamespace(enabled=True, report=lambda: report)
    log = made(recorder, compile=compile, folder=SimpleNamespace(path=Path("runs/mine"), write=full))
    for _ in range(2):
        log.compiled("training")
    assert recorder.notes[0] == "compile.json: no space left"
    ((_, figures),) = recorder.logged
    assert figures["compile/graphs"] == 2
    assert figures["compile/seconds"] == 1.5


def test_the_next_commands_are_those_that_the_run_can_take():
    config = load(["+recipe=quickstart"])
    asked = ["fxtune chat mine", "fxtune eval mine"]
    assert next_commands(config, Path("runs/mine")) == [*asked, "fxtune export mine --to vllm"]
    config.data.questions.path, config.techniques.lora.enabled = None, False
    assert next_commands(config, Path("elsewhere/mine")) == [
        "fxtune chat elsewhere/mine",
        "fxtune export elsewhere/mine --to vllm",
    ]
    config.data.eval_fraction, config.objective = 0.1, Reward()
    assert next_commands(config, Path("runs/mine")) == asked
