"""scripts/bench/bench_peers.py: all tools get the same tokens, a peer that is not there is said to be so, and ratios are to the best.

The peers themselves need a GPU; what they share with fxtune, and how they are called and clocked, does not.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxtune.config.compose import load
from fxtune.training.builder import RunBuilder

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"
sys.path.insert(0, str(SCRIPTS))
import bench_peers  # noqa: E402
import peer_tools  # noqa: E402

sys.path.remove(str(SCRIPTS))


@pytest.fixture
def told(monkeypatch):
    """The command line that a case of fxtune would be run with, for `case` and arguments."""

    def words(name: str, *options: str) -> list[str]:
        seen = []
        monkeypatch.setattr(
            "fxtune.diagnostics.benchmark.measure_in_process",
            lambda given, *_: seen.extend(given) or {"error": "not run"},
        )
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--scratch", str(Path.cwd()), "--cases", name, *options])
        bench_peers.ours(name, bench_peers.arguments(), 1.0)
        return seen

    return words


@pytest.mark.parametrize("name", bench_peers.CASES)
def test_every_case_composes_and_trains_as_the_peers_do(name, told, cwd, monkeypatch):
    monkeypatch.setattr(bench_peers, "documents", lambda *_: cwd / "none.jsonl")
    case, config = bench_peers.CASES[name], load(told(name, "--smoke") if case_is_small(name) else told(name))
    assert (config.data.sequence_length, config.train.micro_batch_size) == (case.length, case.rows)
    assert config.train.global_batch_size == config.train.micro_batch_size, "an optimizer step a micro-batch"
    lora = config.techniques.lora
    assert (lora.enabled, lora.r, lora.alpha, lora.dropout, lora.target_modules) == (
        True,
        16,
        32.0,
        0.0,
        ["all-linear"],
    )
    assert {peer_tools.LORA["r"], peer_tools.LORA["lora_alpha"]} == {16, 32}
    assert (config.optimizer.name.value, config.optimizer.lr, config.optimizer.weight_decay) == ("adamw", 1e-4, 0.0)
    assert config.model.architecture == bench_peers.SHAPES[case.shape]
    assert case.beside is None or bench_peers.CASES[case.beside].rows == case.rows
    assert config.techniques.quantize.enabled == name.endswith("fp8")


def case_is_small(name: str) -> bool:
    return name in bench_peers.SMOKE


def test_random_documents_fill_their_rows_and_every_token_is_learned(told, cwd):
    plan = RunBuilder(load(told("smoke", "--smoke"))).read()[1].training
    seen = plan.summary()
    assert seen["padding_share"] == 0.0
    assert plan.lengths(0).tolist() == [256, 256]
    assert seen["supervised_tokens"] == seen["segments"] * 255, "the first token of a document is nobody's target"
    assert seen["rows"] == 8, "enough for two steps to warm up and two to measure"


def test_chats_have_the_lengths_that_are_asked_for_in_the_markup_of_the_template():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench_peers.TOKENIZER)
    made = [row["text"] for row in bench_peers.chats(4096, 400_000)]
    lengths = [len(ids) for ids in tokenizer(made)["input_ids"]]
    assert max(lengths) <= 4096
    assert 400_000 <= sum(lengths) < 404_096
    assert statistics.mean(lengths) == pytest.approx(500, rel=0.15)
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(1.0, abs=0.2)
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    assert bench_peers.rendered(["a b", "c"]) + "\n" == tokenizer.apply_chat_template(messages, tokenize=False)
    assert all(text.count("<|im_start|>") % 2 == 0 and text.endswith("<|im_end|>") for text in made)


def test_chats_are_learned_whole_with_nothing_left_out(told, cwd):
    plan = RunBuilder(load(told("smoke_chats", "--smoke"))).read()[1].training
    file = next(cwd.glob("chats-*.jsonl"))
    seen = plan.summary()
    assert seen["segments"] == len(file.read_text().splitlines())
    assert (seen["split"], seen["truncated"], seen["dropped"]) == (0, 0, 0)
    assert seen["supervised_tokens"] == seen["tokens"] - seen["segments"]


def test_fxtune_runs_a_peer_that_is_not_here_is_told_and_what_was_measured_is_not_run_again(cwd, monkeypatch, capsys):
    def run(*words: str) -> str:
        monkeypatch.setattr(
            sys,
            "argv",
            [
                "bench_peers.py",
                "--smoke",
                "--cases",
                "smoke",
                "--scratch",
                str(cwd / "scratch"),
                "--json",
                "p.json",
                *words,
            ],
        )
        bench_peers.main()
        return capsys.readouterr().out

    out = run("--tools", "fxtune,unsloth", "--steps", "1")
    rows = json.loads(Path("p.json").read_text())
    assert list(rows) == ["smoke fxtune"]
    row = rows["smoke fxtune"]
    assert row["first_loss"] == pytest.approx(math.log(1024), abs=0.3)
    assert f"| smoke | fxtune | as it is | {row['tokens_per_second']:,.0f} |" in out
    assert "smoke unsloth: not run, " in out
    assert "..." not in run("--tools", "fxtune", "--minutes", "0")
    assert "Not run, the time (0 minutes) was over: smoke fxtune" in run(
        "--tools", "fxtune", "--minutes", "0", "--again"
    )
    assert json.loads(Path("p.json").read_text()) == rows


def test_what_is_absent_is_said_plainly(monkeypatch):
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda name: None)
    assert bench_peers.absent("trl", smoke=True) == "not run, trl is not installed here (pip install trl)"
    assert bench_peers.absent("fxtune", smoke=True) is None
    monkeypatch.setattr(bench_peers.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in str(bench_peers.absent("fxtune", smoke=False))
    assert "needs a GPU" in str(bench_peers.absent("unsloth", smoke=True))
    assert bench_peers.absent("trl", smoke=True) is None


def test_a_peer_runs_with_its_fastest_settings_that_fit(cwd, monkeypatch):
    asked, ends = [], iter([(1, "torch.OutOfMemoryError: CUDA out of memory."), (0, "")])

    def run(command, **_):
        given = json.loads(command[-1])
        asked.append(given)
        status, said = next(ends)
        if status == 0:
            Path(given["out"]).write_text(json.dumps({"tokens_per_second": 7.0}))
        return SimpleNamespace(returncode=status, stdout="", stderr=said)

    monkeypatch.setattr(bench_peers.subprocess, "run", run)
    monkeypatch.setattr(bench_peers.importlib.metadata, "version", lambda name: "1")
    args = SimpleNamespace(steps=None, scratch=cwd, set=[], smoke=False)
    monkeypatch.setitem(bench_peers.CASES, "small", replace(bench_peers.CASES["8b_4x4096"], length=64))
    found = bench_peers.peer("small", "trl", args, 60.0)
    assert found["how"] == "checkpointing=full, liger=on"
    assert found["tried"] == ["checkpointing=none, liger=on: does not fit"]
    assert found["tokens_per_second"] == 7.0
    assert [(one["checkpointing"], one["length"], one["rows"], one["steps"], one["warm_up"]) for one in asked] == [
        ("none", 64, 4, 8, 3),
        ("full", 64, 4, 8, 3),
    ]

    ends = iter([(1, "Traceback\nImportError: no wheel")] * 2)
    found = bench_peers.peer("small", "trl", args, 60.0)
    assert found["error"] == "failed: ImportError: no wheel"
    assert "ImportError" in Path(found["log"]).read_text()


def test_ratios_are_to_the_same_work_and_to_the_best_peer():
    def row(case, tool, speed):
        return {
            "case": case,
            "tool": tool,
            "how": "so",
            "tokens_per_second": speed,
            "step_seconds": 1.0,
            "memory_gib": None,
            "first_loss": 12.0,
            "loss": 11.9,
        }

    rows = {
        "8b_4x4096 fxtune": row("8b_4x4096", "fxtune", 300.0),
        "8b_4x4096 trl": row("8b_4x4096", "trl", 100.0),
        "8b_4x4096 unsloth": row("8b_4x4096", "unsloth", 200.0),
        "8b_4x4096_fp8 fxtune": row("8b_4x4096_fp8", "fxtune", 500.0),
        "1b_8x4096 fxtune": row("1b_8x4096", "fxtune", 10.0),
        "1b_8x4096 trl": {"case": "1b_8x4096", "tool": "trl", "error": "does not fit"},
    }
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in bench_peers.table(rows).splitlines()[2:]
    ]
    assert [(cells[0], cells[1], cells[-1]) for cells in lines] == [
        ("8b_4x4096", "fxtune", "1.50x"),
        ("8b_4x4096", "trl", "3.00x"),
        ("8b_4x4096", "unsloth", "1.50x"),
        ("8b_4x4096_fp8", "fxtune", "2.50x"),
        ("1b_8x4096", "fxtune", ""),
        ("1b_8x4096", "trl", ""),
    ]
    assert lines[0][5] == "?", "memory that was not measured is no zero"
    assert lines[-1][2] == "does not fit"


def test_each_tool_runs_once_for_the_cases_that_share_it():
    cases = ["8b_4x4096_fp8", "8b_4x4096"]
    assert list(bench_peers.wanted(cases, ["fxtune", "trl"])) == [
        ("8b_4x4096_fp8", "fxtune"),
        ("8b_4x4096", "trl"),
        ("8b_4x4096", "fxtune"),
    ]


def test_a_peers_clock_counts_the_measured_steps_alone_and_no_padding(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    now = iter(range(100))
    monkeypatch.setattr(peer_tools.time, "perf_counter", lambda: float(next(now)))
    clock = peer_tools.make_clock({"warm_up": 2, "steps": 3})
    trainer = SimpleNamespace(training_step=lambda model, inputs, items: "loss")
    peer_tools.count_tokens(trainer, clock)
    logged = []
    for step in range(5):
        clock.on_step_begin(None, SimpleNamespace(global_step=step), None)
        ids = torch.ones(2, 8)
        padded = {"attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3])} if step % 2 else {}
        given = {"input_ids": ids, **padded}
        assert trainer.training_step(None, given, 3) == "loss"
        control = SimpleNamespace(should_log=False)
        clock.on_step_end(None, SimpleNamespace(global_step=step + 1), control)
        logged.append(control.should_log)
    assert logged == [False, True, False, False, True], "the mean loss of the warm-up, then that of what is measured"
    assert [int(count) for count in clock.tokens] == [16, 13, 16]
    assert len(clock.each()) == 3
    assert clock.seconds == pytest.approx(5.0), "from before the first mark to after the last"
