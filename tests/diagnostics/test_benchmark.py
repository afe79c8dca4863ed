"""`fxtune bench`: it takes training's own steps, counts what it says it counts, and an absent figure is never a zero."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from support.runs import losses

from fxtune.cli import bench
from fxtune.cli.main import main
from fxtune.data.batches.batch import IGNORE_INDEX
from fxtune.diagnostics import benchmark
from fxtune.training import trainer
from fxtune.training.builder import RunBuilder
from fxtune.training.step import TrainStep
from fxtune.tuning import trial
from fxtune.tuning.trial import Outcome, TrialResult

TINY = [
    "+recipe=quickstart",
    "model.init=random",
    "model.architecture={hidden_size: 32, intermediate_size: 48, "
    "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1}",
    "data.sequence_length=256",
]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """The quickstart's rows are tokenised once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_the_losses_are_those_of_a_training_run_and_nothing_is_left_behind(small, cwd):
    small.train.max_steps, small.schedule.name = 5, type(small.schedule.name).constant
    before = copy.deepcopy(small)
    found = benchmark.measure(small, steps=3, warm_up=2)
    assert small == before
    assert [path.name for path in cwd.iterdir() if path.name != "cache"] == []
    small.run.dir = str(cwd / "run")
    trainer.run(small)
    assert found.losses == pytest.approx(losses(cwd / "run"), rel=1e-6)
    assert found.loss == pytest.approx(sum(found.losses[2:]) / 3)
    assert found.skipped_steps == 0


@pytest.mark.parametrize("packing", [True, False])
def test_real_supervised_and_padded_tokens_are_those_of_the_batches(small, packing):
    small.data.packing = packing
    small.data.sequence_length = 96
    found = benchmark.measure(small, steps=4, warm_up=2)
    small.train.max_steps, small.train.epochs = 6, None
    plan = RunBuilder(small).read()[1].training
    batches = [plan.batch(step, micro) for step in range(2, 6) for micro in range(plan.micro_batches(step))]
    tokens, room = sum(batch.tokens for batch in batches), sum(batch.input_ids.numel() for batch in batches)
    supervised = sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)
    assert found.supervised_tokens_per_second / found.tokens_per_second == pytest.approx(supervised / tokens)
    assert found.padding_per_second / found.tokens_per_second == pytest.approx((room - tokens) / tokens)
    assert room > tokens
    assert found.rows == f"4 x {max(batch.input_ids.shape[1] for batch in batches)}"


def tokens_of(config, steps) -> int:
    plan = RunBuilder(benchmark.alone(config, steps.stop)).read()[1].training
    return sum(plan.tokens(step) for step in steps)


def test_times_fit_together(small, monkeypatch):
    whole_step, slow = TrainStep.__call__, iter([0.0, 0.0, 0.05, 0.05, 1.5, 0.05])

    def slower(self, plan, step, lr):
        benchmark.time.sleep(next(slow))
        return whole_step(self, plan, step, lr)

    monkeypatch.setattr(TrainStep, "__call__", slower)
    found = benchmark.measure(small, steps=4, warm_up=2, age=iter([3.0, 4.5]).__next__)
    assert (found.first_step_seconds, found.second_step_seconds) == (3.0, 4.5)
    assert found.step_seconds_p5 < found.step_seconds < 1.2 < found.step_seconds_p95, (
        "one slow step is spread, not the median"
    )
    seconds = tokens_of(small, range(2, 6)) / found.tokens_per_second
    assert seconds > 1.65, "all of the time counts, also that of the slow step"
    assert 0 <= found.data_wait < 0.5
    assert 0.05 < found.step_memory_gib <= found.memory_gib
    assert found.joules_per_token is found.watts is found.memory_reserved_gib is found.compile_seconds is None
    with pytest.raises(StopIteration):
        next(slow)


def test_a_second_measurement_in_one_process_starts_with_its_own_call(small, monkeypatch):
    monkeypatch.setattr(benchmark, "process_age", lambda: lambda: 1e6)
    monkeypatch.setattr(benchmark, "_COMMANDS", [])
    assert benchmark.measure(small, steps=1, warm_up=2).first_step_seconds == 1e6
    assert benchmark.measure(small, steps=1, warm_up=2).first_step_seconds < 60


def test_the_age_of_a_process_counts_from_before_python():
    age = benchmark.process_age()
    first = age()
    assert 0.05 < first < 86_400
    assert age() > first - 1e-6


def test_a_step_that_is_not_finite_is_told_and_is_no_loss(small, monkeypatch):
    whole_step = TrainStep.__call__

    def broken(self, plan, step, lr):
        metrics = whole_step(self, plan, step, lr)
        bad = dict(loss=torch.tensor(float("nan")), finite=torch.tensor(False))
        return {**metrics, **bad} if step.index == 3 else metrics

    monkeypatch.setattr(TrainStep, "__call__", broken)
    found = benchmark.measure(small, steps=2, warm_up=2)
    assert found.losses[3] is None
    assert found.loss == found.losses[2]
    assert found.skipped_steps == 1


def test_the_command_prints_and_writes(cwd, capsys):
    assert main(["bench", *TINY, "--steps", "2", "--warm-up", "2", "--price", "7.2", "--json", "b.json"]) == 0
    out = capsys.readouterr().out
    found = json.loads((cwd / "b.json").read_text())
    assert [path.name for path in cwd.iterdir()] == ["b.json"]
    assert found["price_per_million_tokens"] == pytest.approx(7.2 / 3600 / found["tokens_per_second"] * 1e6)
    assert f"{found['tokens_per_second']:,.0f} of real documents" in out
    assert f"{found['price_per_million_tokens']:.4f} a million tokens, at 7.2 an hour" in out
    assert "not measured: NVML is for NVIDIA GPUs" in out
    assert "auto took sdpa" in out
    assert (found["steps"], found["warm_up"], len(found["losses"])) == (2, 2, 4)
    assert found["techniques"]["attention"]["backend"] == "sdpa"


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        (["--steps", "0"], "--steps 0: give a whole number of steps, 1 or more", 2),
        (["--warm-up", "1"], "--warm-up 1: give a whole number of steps, 2 or more", 2),
        (["--steps", "many"], "--steps many", 2),
        (["--price", "free"], "--price free: give what an hour", 2),
        (["--price", "0"], "--price 0", 2),
        (["--json", "nowhere/b.json"], "--json nowhere/b.json cannot be written", 6),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_built(
    cwd, capsys, monkeypatch, words, told, code
):
    monkeypatch.setattr(bench, "measure", None)
    assert main(["bench", *TINY, *words]) == code
    assert told in capsys.readouterr().err.replace("\n", " ")


def test_a_recipe_that_fails_leaves_the_file_of_an_earlier_one_as_it_was(cwd):
    assert main(["bench", *TINY, "techniques.attention.backend=flash4", "--json", "new.json"]) == 2
    assert list(cwd.iterdir()) == []
    Path("old.json").write_text("{}")
    assert main(["bench", *TINY, "techniques.attention.backend=flash4", "--json", "old.json"]) == 2
    assert Path("old.json").read_text() == "{}"


def test_what_is_switched_off():
    asked = {
        "attention": {"backend": "flash4"},
        "liger": {"rms_norm": "on", "rope": "off", "chunk_rows": None},
        "compile": {"mode": "default"},
    }
    assert list(bench.switched_off(asked)) == [
        ("flash4 (sdpa in its place)", ["techniques.attention.backend=sdpa"]),
        ("liger", ["techniques.liger.enabled=false"]),
        ("liger.rms_norm", ["techniques.liger.rms_norm='off'"]),
        ("compile", ["techniques.compile.enabled=false"]),
    ]
    assert list(bench.switched_off({"attention": {"backend": "sdpa"}})) == []


def test_ablation_has_a_row_for_each_and_says_what_could_not_be_run(cwd, capsys, monkeypatch):
    whole = {
        **measured(),
        "decided": ["attention: auto took flash4"],
        "techniques": {"attention": {"backend": "flash4"}, "lora": {"r": 16}, "compile": {"mode": "default"}},
    }
    answers = {
        "techniques.attention.backend=sdpa": {**measured(), "tokens_per_second": 50.0, "loss": 2.25},
        "techniques.lora.enabled=false": {"error": "does not fit"},
        "techniques.compile.enabled=false": {"error": "refused: techniques.compile"},
    }
    asked = []

    def apart(words, steps, warm_up):
        if asked:  # what was measured before is on the disk
            assert len(json.loads(Path("b.json").read_text())["without"]) == len(asked) - 1
        asked.append(([text for text in words if text not in TINY], steps, warm_up))
        return answers.get(words[-1], whole)

    monkeypatch.setattr(bench, "apart", apart)
    monkeypatch.setattr(bench, "measure", None)  # this process must leave the GPU to the others
    assert main(["bench", *TINY, "--ablate", "--steps", "5", "--price", "3.6", "--json", "b.json"]) == 0
    assert asked == [([], 5, 3), *(([key], 5, 3) for key in answers)]
    found = json.loads((cwd / "b.json").read_text())
    assert found["price_per_million_tokens"] == pytest.approx(3.6 / 3600 / 100 * 1e6)
    assert found["without"]["lora"]["error"] == "does not fit"
    lines = [line for line in capsys.readouterr().out.splitlines() if "without" in line and "│" in line]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["without flash4 (sdpa in its place)", "50", "0.50x", "1.0", "1.00x", "2.2500", "+0.2500"],
        ["without lora", "does not fit", "", "", "", "", ""],
        ["without compile", "refused: techniques.compile", "", "", "", "", ""],
    ]


def test_ablation_of_a_recipe_that_cannot_be_measured_is_an_error(cwd, capsys, monkeypatch):
    monkeypatch.setattr(bench, "apart", lambda *_: {"error": "does not fit"})
    assert main(["bench", *TINY, "--ablate"]) == 1
    assert "The recipe as it stands cannot be measured: does not fit" in capsys.readouterr().err


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
    assert benchmark.apart(["+recipe=x"], steps=7, warm_up=2, limit=60.0) == found
    monkeypatch.setattr(trial, "bench", lambda *given: (TrialResult(outcome, 1.0, reason=reason), {}))
    assert benchmark.apart(TINY) == {"error": error}
    monkeypatch.setattr(trial, "bench", lambda *given: (TrialResult(Outcome.hung, 1.0), {}))
    with pytest.raises(TimeoutError):
        benchmark.apart(TINY)


def measured() -> dict:
    return {
        "tokens_per_second": 100.0,
        "supervised_tokens_per_second": 50.0,
        "padding_per_second": 1.0,
        "step_seconds": 1.0,
        "step_seconds_p5": 0.9,
        "step_seconds_p95": 1.1,
        "mfu": 0.5,
        "memory_gib": 1.0,
        "memory_reserved_gib": 2.0,
        "step_memory_gib": 1.0,
        "data_wait": 0.0,
        "joules_per_token": 0.02,
        "watts": 700.0,
        "energy": "the counter",
        "first_step_seconds": 5.0,
        "second_step_seconds": 6.0,
        "compile_seconds": 3.0,
        "loss": 2.0,
        "losses": [2.0],
        "skipped_steps": 0,
        "steps": 5,
        "warm_up": 3,
        "rows": "4 x 256",
        "decided": [],
        "techniques": {},
        "device": "H",
    }


def test_a_profile_tells_where_the_time_of_a_step_goes(small, cwd, capsys):
    plain = benchmark.measure(copy.deepcopy(small), steps=2, warm_up=2)
    found = benchmark.measure(small, steps=2, warm_up=2, profile=True)
    assert plain.kernels is None
    assert found.losses == plain.losses, "profiled steps are not measured ones"
    seconds = [spent for _, spent, _ in found.kernels]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 0
    calls = {name: count for name, _, count in found.kernels}
    linears = 7 * small.model.architecture["num_hidden_layers"] + 1 if small.model.architecture else 1
    assert calls["aten::mm"] >= 3 * linears, "each linear: forward, and two backward or one and two adapters"


def test_a_profile_is_of_the_recipe_as_it_stands(capsys):
    assert main(["bench", *TINY, "--profile", "--ablate"]) == 2
    assert "--profile: times the recipe as it stands" in capsys.readouterr().err
