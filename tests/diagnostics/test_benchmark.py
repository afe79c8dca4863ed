"""The benchmark takes training's own steps, and its counts are those of the batches."""

from __future__ import annotations

import copy

import pytest
import torch
from support.runs import losses
from support.tuning import TINY

from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.diagnostics import benchmark
from fxtune.system.terminal.startup import STARTUP
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder
from fxtune.training.step import TrainStep
from fxtune.training.trial import steps_only
from fxtune.tuning import trial
from fxtune.tuning.trial import Outcome, TrialResult


def test_losses_are_those_of_a_training_run_and_no_file_is_left(narrow, cwd):
    narrow.train.max_steps, narrow.schedule.name = 5, type(narrow.schedule.name).constant
    before = copy.deepcopy(narrow)
    found = benchmark.measure(narrow, steps=3, warm_up=2)
    assert narrow == before
    assert [path.name for path in cwd.iterdir() if path.name != "cache"] == []
    narrow.run.dir = str(cwd / "run")
    trainer.run(narrow)
    assert found.losses == pytest.approx(losses(cwd / "run"), rel=1e-6)
    assert found.loss == pytest.approx(sum(found.losses[2:]) / 3)
    assert found.skipped_steps == 0


@pytest.mark.parametrize("packing", [True, False])
def test_document_supervised_and_padding_tokens_are_those_of_the_batches(narrow, packing):
    narrow.data.packing = packing
    narrow.data.sequence_length = 96
    found = benchmark.measure(narrow, steps=4, warm_up=2)
    narrow.train.max_steps, narrow.train.epochs = 6, None
    plan = RunBuilder(narrow).read()[1].training
    batches = [plan.batch(step, micro) for step in range(2, 6) for micro in range(plan.micro_batches(step))]
    tokens, room = sum(batch.tokens for batch in batches), sum(batch.input_ids.numel() for batch in batches)
    supervised = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    assert found.supervised_tokens_per_second / found.tokens_per_second == pytest.approx(supervised / tokens)
    assert found.padding_per_second / found.tokens_per_second == pytest.approx((room - tokens) / tokens)
    assert room > tokens
    assert found.rows == f"4 x {max(batch.input_ids.shape[1] for batch in batches)}"


@pytest.mark.slow
def test_times_fit_together(narrow, monkeypatch):
    take_step, pauses = TrainStep.__call__, iter([0.0, 0.0, 0.05, 0.05, 1.5, 0.05])

    def slower(self, plan, step, lr):
        benchmark.time.sleep(next(pauses))
        return take_step(self, plan, step, lr)

    monkeypatch.setattr(TrainStep, "__call__", slower)
    found = benchmark.measure(narrow, steps=4, warm_up=2)
    assert 0 < found.first_step_seconds < found.second_step_seconds
    assert found.step_seconds_p5 < found.step_seconds < found.step_seconds_p95, "the slow step is not the median"
    plan = RunBuilder(steps_only(narrow, 6)).read()[1].training
    seconds = sum(plan.tokens(step) for step in range(2, 6)) / found.tokens_per_second
    assert seconds > 1.65, "the time of the slow step counts"
    assert 0 <= found.data_wait < 1
    assert 0.05 < found.step_memory_gib <= found.memory_gib
    assert found.joules_per_token is found.watts is found.memory_reserved_gib is found.compile_seconds is None
    assert next(pauses, None) is None


def test_start_up_time_of_a_second_measurement_counts_from_its_own_start(narrow):
    STARTUP.begin({"imports": 1e6})
    found = benchmark.measure(narrow, steps=1, warm_up=2)
    assert found.first_step_seconds > 1e6
    assert sum(found.startup_seconds.values()) == found.second_step_seconds
    assert found.startup_seconds["imports"] == 1e6
    assert {"checks", "data", "model", "proofs", "optimizer", "first steps"} <= set(found.startup_seconds)
    again = benchmark.measure(narrow, steps=1, warm_up=1)
    assert sum(again.startup_seconds.values()) == again.first_step_seconds < 1e6
    assert again.second_step_seconds is None, "it was measured, so nothing waited for its end"


def test_a_step_that_is_not_finite_is_counted_and_has_no_loss(narrow, monkeypatch):
    take_step = TrainStep.__call__

    def broken(self, plan, step, lr):
        metrics = take_step(self, plan, step, lr)
        bad = dict(loss=torch.tensor(float("nan")), finite=torch.tensor(False))
        return {**metrics, **bad} if step.index == 3 else metrics

    monkeypatch.setattr(TrainStep, "__call__", broken)
    found = benchmark.measure(narrow, steps=2, warm_up=2)
    assert found.losses[3] is None
    assert found.loss == found.losses[2]
    assert found.skipped_steps == 1


@pytest.mark.slow
def test_a_profile_lists_the_operators_of_a_step(narrow):
    plain = benchmark.measure(copy.deepcopy(narrow), steps=2, warm_up=2)
    found = benchmark.measure(narrow, steps=2, warm_up=2, profile=True)
    assert plain.kernels is None
    assert found.losses == plain.losses, "profiled steps are not measured ones"
    seconds = [spent for _, spent, _ in found.kernels]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 0
    calls = {name: count for name, _, count in found.kernels}
    linears = 7 * narrow.model.architecture["num_hidden_layers"] + 1 if narrow.model.architecture else 1
    assert calls["aten::mm"] >= 3 * linears, "each linear: forward, and two backward or one and two adapters"


@pytest.mark.parametrize(
    ("outcome", "reason", "error"),
    [
        (Outcome.refused, "This cannot run here", "refused: This cannot run here"),
        (Outcome.memory, "CUDA out of memory", "does not fit"),
        (Outcome.crashed, "exit code 1: KeyError: 'x'", "failed: exit code 1: KeyError: 'x'"),
    ],
)
def test_a_separate_process_gives_its_measurements_or_one_line_with_the_reason(monkeypatch, outcome, reason, error):
    found = {"tokens_per_second": 5}
    monkeypatch.setattr(trial, "bench", lambda *given: (TrialResult(Outcome.measured, 1.0), found))
    assert benchmark.measure_in_process(["+recipe=x"], steps=7, warm_up=2, limit=60.0) == found
    monkeypatch.setattr(trial, "bench", lambda *given: (TrialResult(outcome, 1.0, reason=reason), {}))
    assert benchmark.measure_in_process(TINY) == {"error": error}
    monkeypatch.setattr(trial, "bench", lambda *given: (TrialResult(Outcome.hung, 1.0), {}))
    with pytest.raises(TimeoutError):
        benchmark.measure_in_process(TINY)
