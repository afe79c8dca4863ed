"""scripts/bench/bench_peers.py: all tools get the same tokens, a missing peer is reported, and ratios are to the best
peer.

The peers need a GPU. These tests cover the parts that do not: the shared documents, the peer's command and its clock.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
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
import image_documents  # noqa: E402
import peer_tools  # noqa: E402
from shapes import changed  # noqa: E402

sys.path.remove(str(SCRIPTS))


@pytest.fixture
def fxtune_words(monkeypatch):
    """A function that returns fxtune's command line for a case and options."""

    def words(name: str, *options: str) -> list[str]:
        passed = []
        monkeypatch.setattr(bench_peers, "write_folders", lambda *_: {})  # folders of 16 GB
        monkeypatch.setattr(
            "fxtune.diagnostics.benchmark.measure_in_process",
            lambda given, *_: passed.extend(given) or {"error": "not run"},
        )
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", "--scratch", str(Path.cwd()), "--cases", name, *options])
        bench_peers.run_fxtune(name, bench_peers.arguments(), 1.0)
        return passed

    return words


@pytest.mark.parametrize(
    ("name", "gpus"),
    [
        *((name, 1) for name, case in bench_peers.CASES.items() if not case.task),
        *((name, 2) for name, case in bench_peers.CASES.items() if case.several or case.context),
    ],
)
def test_every_case_composes_with_the_settings_of_the_peers(name, gpus, fxtune_words, cwd, monkeypatch):
    monkeypatch.setattr(bench_peers, "documents", lambda *_: cwd / "none.jsonl")
    case = bench_peers.CASES[name]
    config = load(fxtune_words(name, "--gpus", str(gpus), *(["--smoke"] if case_is_small(name) else [])))
    length = case.packed_length or case.length
    assert (config.data.sequence_length, config.train.micro_batch_size) == (length, case.rows)
    ranks = 1 if case.context else gpus
    assert config.train.global_batch_size == ranks * config.train.micro_batch_size, "one micro-batch a card and step"
    assert config.run.gpus == str(gpus)
    lora = config.techniques.lora
    given = lora.enabled, lora.r, lora.alpha, lora.dropout, lora.target_modules
    assert case.full or given == (True, 16, 32.0, 0.0, ["all-linear"])
    peers = peer_tools.adapters({"tool": "trl", "shape": bench_peers.SHAPES[case.shape]})
    assert (peers["r"], peers["lora_alpha"]) == (16, 32)
    mixture = peer_tools.is_mixture(bench_peers.SHAPES[case.shape])
    assert lora.rank_pattern == ({"gate_up_proj": 16} if mixture and not case.full else {})
    assert bool(peers.get("target_parameters")) == mixture
    optimizer = "adamw_8bit" if name.endswith("8bit") else "adamw"
    assert (config.optimizer.name.value, config.optimizer.lr, config.optimizer.weight_decay) == (optimizer, 1e-4, 0.0)
    assert config.optimizer.stochastic_rounding == (case.full and gpus == 1)
    assert (config.optimizer.moments.value == "bfloat16") == (case.full and gpus == 1 and optimizer == "adamw")
    assert config.model.dtype.value == ("bfloat16" if case.full else "auto")
    shape = bench_peers.SHAPES[case.shape]
    assert {**config.model.architecture, "max_position_embeddings": 0} == {**shape, "max_position_embeddings": 0}
    assert config.model.architecture.get("max_position_embeddings", length) >= length
    assert case.peer_case is None or bench_peers.CASES[case.peer_case].rows == case.rows
    assert lora.enabled != case.full
    quantized = config.techniques.quantize
    assert config.techniques.float8.enabled == (case.full and name.endswith("fp8"))
    assert (quantized.type.value if quantized.enabled else "full") == (
        name.rpartition("_")[2] if name.endswith(("fp8", "mxfp4", "nf4")) and not case.full else "full"
    )


POLICIES = {name: case for name, case in bench_peers.CASES.items() if case.task and case.task.objective == "policy"}
TASKS = {name: case for name, case in bench_peers.CASES.items() if case.task and name not in POLICIES}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_gives_both_tools_as_many_tokens_a_step(name, fxtune_words, cwd, monkeypatch):
    monkeypatch.setattr(bench_peers, "documents", lambda *_: cwd / "none.jsonl")
    case, task = TASKS[name], TASKS[name].task
    config = load(fxtune_words(name, *(["--smoke"] if case_is_small(name) else [])))
    assert config.train.micro_batch_size == case.rows
    room = config.train.global_batch_size * config.data.sequence_length
    tokens = task.documents * task.mean * (2 if task.objective == "embedding" else 1)
    if task.longest:
        assert task.documents * task.longest <= room if task.repeats else tokens == pytest.approx(room, rel=0.05)
    else:
        assert tokens == room == task.step_tokens
    lora = config.techniques.lora
    assert lora.enabled == (task.objective == "classification")
    assert (lora.r, lora.alpha, lora.dropout) == (16, 32.0, 0.0)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-4, 0.0)
    tools = [tool for _, tool in bench_peers.cases_to_run([name], list(bench_peers.TOOLS))]
    assert tools == ["fxtune", task.peer]
    assert bench_peers.settings_to_try(case, task.peer, 1)


@pytest.mark.parametrize("name", TASKS)
def test_texts_of_a_task_have_the_requested_tokens(name, tmp_path):
    from transformers import AutoTokenizer

    task = replace(TASKS[name].task, documents=400, repeats=False)
    file = task.write_documents(tmp_path, 1, bench_peers.TOKENIZER)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(bench_peers.TOKENIZER)
    texts = [
        row.get("input_ids") or row[name]
        for row in rows
        for name in ("text", "anchor", "positive", "input_ids")
        if name in row
    ]
    lengths = [len(tokenizer(text)["input_ids"] if isinstance(text, str) else text) for text in texts]
    assert len(rows) == 400
    assert sum(lengths) / len(rows) == task.mean_tokens(file)
    assert statistics.mean(lengths) == pytest.approx(task.mean, rel=0.25 if task.longest else 0)
    assert max(lengths) <= (task.longest or task.mean)


@pytest.mark.parametrize("name", POLICIES)
def test_both_tools_get_the_same_answers_of_a_policy(name, fxtune_words, cwd, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv("FXTUNE_ROLLOUTS", "")
    task = POLICIES[name].task
    *words, option, plugin = fxtune_words(name, *(["--smoke"] if case_is_small(name) else []))
    assert (option, Path(plugin).name) == ("--plugin", "given_rollouts.py")
    rows = [json.loads(line) for line in Path(os.environ["FXTUNE_ROLLOUTS"]).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(bench_peers.TOKENIZER)
    assert all(tokenizer(row["prompt"])["input_ids"] == row["prompt_ids"] for row in rows)
    assert {len(row["prompt_ids"]) for row in rows} == {task.prompt}
    answers = [answer for row in rows for answer in row["answers"]]
    lengths = [len(answer["ids"]) for answer in answers]
    assert len(lengths) == task.documents
    assert statistics.mean(lengths) == pytest.approx(task.mean, rel=0.25 if task.longest else 0)
    assert max(lengths) <= (task.longest or task.mean)
    assert all(abs(sum(answer["advantage"] for answer in row["answers"])) < 1e-9 for row in rows)
    config = load(words)
    assert config.train.global_batch_size == len(rows)
    assert config.sampler.answers == len(rows[0]["answers"])
    whole = task.answers * (task.prompt + task.mean)
    shared = task.prompt + task.answers * (task.mean + 1)
    assert config.data.sequence_length >= (whole if config.data.share_prompts is False else shared)
    micro = [word for group in task.settings() for one in group for word in one if word.startswith("micro=")]
    assert all(task.documents % int(word.removeprefix("micro=")) == 0 for word in micro)


@pytest.mark.slow
def test_fxtune_and_plain_transformers_have_the_same_first_loss(cwd, monkeypatch):
    options = ["--smoke", "--cases", "smoke_classify", "--scratch", str(cwd / "scratch"), "--json", "p.json"]
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", *options])
    bench_peers.main()
    mine, peer = json.loads(Path("p.json").read_text()).values()
    assert mine["first_loss"] == pytest.approx(peer["first_loss"], rel=1e-5)
    assert mine["loss"] == pytest.approx(peer["loss"], rel=1e-2)
    assert mine["examples_per_second"] > 0


def case_is_small(name: str) -> bool:
    return name in bench_peers.SMOKE


def test_random_documents_fill_their_rows_and_supervise_every_token(fxtune_words, cwd):
    plan = RunBuilder(load(fxtune_words("smoke", "--smoke"))).read()[1].training
    summary = plan.summary()
    assert summary["padding_share"] == 0.0
    assert plan.lengths(0).tolist() == [256, 256]
    assert summary["supervised_tokens"] == summary["segments"] * 255, "the first token of a document is no target"
    assert summary["rows"] == 8, "enough for two warm-up steps and two measured steps"


@pytest.mark.parametrize("name", [name for name, case in bench_peers.CASES.items() if case.packed_length])
def test_rows_with_prompts_once_hold_the_pairs_of_a_step_and_no_more(name):
    case = bench_peers.CASES[name]
    sizes = []
    for row in bench_peers.pairs(case, 1):
        chosen, rejected = row["documents"]
        prompt = chosen["labels"].count(-100)
        assert chosen["input_ids"][:prompt] == rejected["input_ids"][:prompt]
        sizes.append(len(chosen["input_ids"]) + len(rejected["input_ids"]) - (prompt - 1))
    assert len(sizes) == case.pairs
    assert sum(sizes) <= case.packed_length < sum(sizes) + sizes[0]


def test_chats_have_the_requested_lengths_and_the_template_markup():
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


def test_chats_are_neither_split_nor_dropped(fxtune_words, cwd):
    plan = RunBuilder(load(fxtune_words("smoke_chats", "--smoke"))).read()[1].training
    file = next(cwd.glob("chats-*.jsonl"))
    summary = plan.summary()
    assert summary["segments"] == len(file.read_text().splitlines())
    assert (summary["split"], summary["truncated"], summary["dropped"]) == (0, 0, 0)
    assert summary["supervised_tokens"] == summary["tokens"] - summary["segments"]


def test_missing_peer_is_reported_and_finished_case_does_not_run_again(cwd, monkeypatch, capsys):
    def run(*words: str) -> str:
        common = ["--smoke", "--cases", "smoke", "--scratch", str(cwd / "scratch"), "--json", "p.json"]
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", *common, *words])
        bench_peers.main()
        return capsys.readouterr().out

    out = run("--tools", "fxtune,unsloth", "--steps", "1")
    rows = json.loads(Path("p.json").read_text())
    assert list(rows) == ["smoke fxtune"]
    row = rows["smoke fxtune"]
    assert row["first_loss"] == pytest.approx(math.log(1024), abs=0.3)
    assert f"| smoke | 1 | fxtune | default | {row['tokens_per_second']:,.0f} |" in out
    assert "smoke unsloth: not run, " in out
    assert "..." not in run("--tools", "fxtune", "--minutes", "0")
    assert "Not run, the time limit (0 minutes) was reached: smoke fxtune" in run(
        "--tools", "fxtune", "--minutes", "0", "--again"
    )
    assert json.loads(Path("p.json").read_text()) == rows


@pytest.mark.slow
def test_two_processes_on_a_cpu_are_compared_with_one(cwd, monkeypatch, capsys):
    common = ["--smoke", "--cases", "smoke", "--tools", "fxtune", "--steps", "2", "--json", "p.json"]
    for gpus in ("1", "2"):
        words = ["--gpus", gpus, "--profile", "--scratch", str(cwd / "scratch"), "--baseline", "mine"]
        monkeypatch.setattr(sys, "argv", ["bench_peers.py", *common, *words])
        monkeypatch.setattr(bench_peers.baselines, "FOLDER", cwd)
        bench_peers.main()
    one, two = json.loads(Path("p.json").read_text()).values()
    assert (one["slowest_behind"], one["gpus"], two["gpus"]) == (None, 1, 2)
    ratio = two["tokens_per_second"] / one["tokens_per_second"] / 2
    assert f"| {ratio:.3f} |" in capsys.readouterr().out
    found = bench_peers.baselines.read("mine", cwd)
    assert (found.cards, [row.cards for row in found.measurements]) == (2, [1, 2])


def test_peer_runs_with_its_fastest_settings_that_fit(cwd, monkeypatch):
    requests, results = [], iter([(1, "torch.OutOfMemoryError: CUDA out of memory."), (0, "")])

    def run(command, env, **_):
        assert ("torch.distributed.run" in command) == (args.gpus > 1)
        assert len(env["CUDA_VISIBLE_DEVICES"].split(",")) == args.gpus
        given = json.loads(command[-1])
        requests.append(given)
        code, stderr = next(results)
        if code == 0:
            measured = {"tokens_per_second": 7.0, "second_step_at": bench_peers.time.time() + 90}
            Path(given["out"]).write_text(json.dumps(measured))
        return SimpleNamespace(returncode=code, stdout="", stderr=stderr)

    monkeypatch.setattr(bench_peers.subprocess, "run", run)
    monkeypatch.setattr(bench_peers.baselines, "versions", dict)
    args = SimpleNamespace(steps=None, scratch=cwd, set=[], smoke=False, gpus=1, json=None)
    monkeypatch.setitem(bench_peers.CASES, "small", replace(bench_peers.CASES["8b_4x4096"], length=64))
    found = bench_peers.run_peer("small", "trl", args, 60.0)
    assert found["how"] == "checkpointing=full, liger=on"
    assert found["tried"] == ["checkpointing=none, liger=on: does not fit"]
    assert found["tokens_per_second"] == 7.0
    assert 90 <= found["second_step_seconds"] < 1e6, "from the start of the process that fitted"
    names = "checkpointing", "length", "rows", "steps", "warm_up"
    asked = [tuple(request[name] for name in names) for request in requests]
    assert asked == [("none", 64, 4, 20, 3), ("full", 64, 4, 20, 3)]

    results = iter([(1, "Traceback\nImportError: no wheel")] * 2)
    found = bench_peers.run_peer("small", "trl", args, 60.0)
    assert found["error"] == "failed: ImportError: no wheel"
    assert "ImportError" in Path(found["log"]).read_text()

    args.gpus = 2
    results = iter([(0, "")])
    assert bench_peers.run_peer("small", "trl", args, 60.0)["tokens_per_second"] == 7.0
    assert len(Path(requests[-1]["documents"]).read_text().splitlines()) == 2 * (20 + 3) * 4


def test_fastest_of_several_groups_of_settings_is_kept_and_finished_ones_do_not_run_again(cwd, monkeypatch):
    """Groups of a case with images: a group ends at the first that fits, or at an error that memory does not explain."""
    speeds = {"a=1": None, "a=2": 5.0, "b=1": 9.0, "c=1": "ImportError", "d=1": 3.0}
    ran = []

    def run(command, **_):
        given = json.loads(command[-1])
        word = next(word for word in speeds if given.get(word[0]) == word[2])
        ran.append(word)
        speed = speeds[word]
        if isinstance(speed, float):
            measured = dict(tokens_per_second=speed, second_step_at=0.0, step_seconds=1.0, memory_gib=1.0)
            Path(given["out"]).write_text(json.dumps({**measured, "first_loss": 1.0, "loss": 1.0}))
            return SimpleNamespace(returncode=0, stdout="", stderr="")
        return SimpleNamespace(returncode=1, stdout="", stderr=speed or "CUDA out of memory")

    monkeypatch.setattr(bench_peers.subprocess, "run", run)
    monkeypatch.setattr(bench_peers.baselines, "versions", dict)
    monkeypatch.setattr(bench_peers, "documents", lambda *_: cwd / "none.jsonl")
    groups = ((("a=1",), ("a=2",)), (("b=1",),), (("c=1",), ("d=1",)))
    monkeypatch.setattr(bench_peers, "settings_to_try", lambda *_: groups)
    args = SimpleNamespace(steps=None, scratch=cwd, set=[], smoke=False, gpus=1, json=cwd / "p.json", again=False)
    found = bench_peers.run_peer("vl_7b_mixed", "trl", args, 60.0)
    assert ran == ["a=1", "a=2", "b=1", "c=1"]
    assert (found["how"], found["tokens_per_second"]) == ("b=1", 9.0)
    assert found["tried"][:2] == ["a=1: does not fit", "c=1: failed: ImportError"]
    assert bench_peers.run_peer("vl_7b_mixed", "trl", args, 60.0) == found
    assert ran[4:] == ["c=1"], "only what failed runs again"


@pytest.mark.parametrize("name", ["vl_7b_1024", "vl_7b_mixed", "qwen3_vl_8b_1024", "qwen3_5_vl_9b_1024"])
def test_documents_with_images_have_the_requested_tokens_in_fxtune(name, fxtune_words, cwd, monkeypatch):
    case = replace(bench_peers.CASES[name], warm_up=0, length=16128)
    given, tiny = bench_peers.SHAPES[case.shape], bench_peers.SHAPES["qwen2_5_vl_tiny"]
    text = {key: tiny[key] for key in _SMALL if key in tiny}
    text |= dict(vocab_size=1040, max_position_embeddings=32768, head_dim=16, num_hidden_layers=4)
    vision = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64)
    if "deepstack_visual_indexes" in given["vision_config"]:
        vision["deepstack_visual_indexes"] = [0]
    if "fullatt_block_indexes" in given["vision_config"]:
        vision["fullatt_block_indexes"] = [1]
        text |= dict(rope_scaling=tiny["rope_scaling"])
    vision = given["vision_config"] | vision
    if "text_config" in given:
        parts = dict(text_config=changed(given["text_config"], **text))
    else:  # the older, flat form computes the width of a head
        parts = {key: value for key, value in text.items() if key != "head_dim"}
    monkeypatch.setitem(bench_peers.SHAPES, case.shape, given | parts | dict(vision_config=vision))
    monkeypatch.setitem(bench_peers.CASES, name, replace(case, ours=("techniques=lora", "run.device=cpu")))
    plan = RunBuilder(load(fxtune_words(name, "--steps", "1"))).read()[1].training
    summary = plan.summary()
    assert summary["dropped"] == summary["truncated"] == summary["split"] == 0
    if name.endswith("_1024"):
        assert (summary["segments"], summary["tokens"]) == (12, bench_peers.step_tokens(case)), "a step is a full row"
    else:
        assert summary["segments"] >= 12
        assert summary["tokens"] >= 2 * case.length
    assert 0.1 < summary["supervised_share"] < 0.3


def test_ratios_compare_the_same_work_and_the_best_peer():
    def row(case, tool, speed):
        figures = dict(how="so", step_seconds=1.0, memory_gib=None, first_loss=12.0, loss=11.9)
        return dict(case=case, tool=tool, tokens_per_second=speed, **figures)

    rows = {
        "8b_4x4096 fxtune": {**row("8b_4x4096", "fxtune", 300.0), "second_step_seconds": 41.2},
        "8b_4x4096 trl": row("8b_4x4096", "trl", 100.0),
        "8b_4x4096 unsloth": row("8b_4x4096", "unsloth", 200.0),
        "8b_4x4096_fp8 fxtune": row("8b_4x4096_fp8", "fxtune", 500.0),
        "1b_8x4096 fxtune": row("1b_8x4096", "fxtune", 10.0),
        "1b_8x4096 trl": {"case": "1b_8x4096", "tool": "trl", "error": "does not fit"},
        "8b_4x4096 fxtune x2": {**row("8b_4x4096", "fxtune", 588.0), "gpus": 2, "exchange_seconds": 0.005},
        "8b_4x4096 trl x2": {**row("8b_4x4096", "trl", 150.0), "gpus": 2},
    }
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in bench_peers.table(rows).splitlines()[2:]
    ]
    assert [(*cells[:3], *cells[-3:]) for cells in lines] == [
        ("8b_4x4096", "1", "fxtune", "1.50x", "", ""),
        ("8b_4x4096", "1", "trl", "3.00x", "", ""),
        ("8b_4x4096", "1", "unsloth", "1.50x", "", ""),
        ("8b_4x4096", "2", "fxtune", "3.92x", "0.980", "0.50%"),
        ("8b_4x4096", "2", "trl", "3.92x", "0.750", ""),
        ("8b_4x4096_fp8", "1", "fxtune", "2.50x", "", ""),
        ("1b_8x4096", "1", "fxtune", "", "", ""),
        ("1b_8x4096", "1", "trl", "", "", ""),
    ]
    assert lines[0][6] == "?", "memory that was not measured is not shown as zero"
    assert [lines[0][7], lines[1][7]] == ["41", ""], "the start-up time that was measured"
    assert lines[-1][3] == "does not fit"


@pytest.mark.parametrize(("high", "said"), [(1.08, ""), (1.2, " (p5 and p95 are 25% of p50 apart)")])
def test_a_row_has_the_percentiles_of_a_step_and_says_when_they_are_far_apart(high, said):
    row = dict(step_seconds=1.0, step_seconds_p5=0.95, step_seconds_p95=high)
    assert bench_peers.times(row) == f"950, 1,000, {high * 1e3:,.0f} ms{said}"
    assert bench_peers.times(dict(step_seconds=1.0)) == "1,000 ms", "a file of an earlier version"


def test_a_row_says_where_it_was_measured(tmp_path, monkeypatch):
    """`nvidia-smi` is a stand-in that prints the clocks of two cards. One card is idle."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\n[ $# = 2 ] && echo 580.65 && exit\n"
        "printf '345, 0\\n1980, 100\\n1755, 97\\n1770, 99\\n[N/A], 100\\n'; touch done; exec sleep 60\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_peers.baselines, "today", lambda: "2026-11-30")
    with bench_peers.baselines.circumstances("0,1") as made:
        while not Path("done").exists():
            time.sleep(0.01)
    row = dict(case="8b_4x4096", tool="trl", device="NVIDIA H200", tokens_per_second=1.0, **made)
    found = bench_peers.measurement(row)
    assert (found.card, found.clock_mhz, found.versions["driver"]) == ("H200", 1770, "580.65")
    assert found.versions["torch"] == torch.__version__
    assert found.date == "2026-11-30"


def test_peer_clock_counts_measured_steps_without_padding(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    now = iter(range(100))
    monkeypatch.setattr(peer_tools.time, "perf_counter", lambda: float(next(now)))
    clock = peer_tools.make_clock({"warm_up": 2, "steps": 3})
    trainer = SimpleNamespace(
        training_step=lambda model, inputs, items: "loss", get_batch_samples=lambda *_: "samples"
    )
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
    assert logged == [False, True, False, False, True], "the mean loss of the warm-up, then that of the measured steps"
    assert [int(count) for count in clock.tokens] == [16, 13, 16]
    assert len(clock.step_seconds()) == 3
    assert clock.seconds == pytest.approx(5.0), "from before the first measured step until after the last"
    assert trainer.get_batch_samples(None, 1, None) == "samples"
    assert clock.waited == 1.0
    trainer.state = SimpleNamespace(log_history=[{"loss": 7.0}, {"loss": 6.0}, {"other": 1}])
    monkeypatch.setattr(clock, "step_seconds", lambda: [1.0, 1.0, 2.0])
    found = peer_tools.results({"steps": 3, "step_tokens": 0}, trainer, clock)
    times = [found[f"step_seconds{end}"] for end in ("_p5", "", "_p95")]
    assert times == pytest.approx([1.0, 1.0, 1.9]), "percentiles as fxtune bench has them"
    assert (found["first_loss"], found["loss"], found["tokens_per_second"]) == (7.0, 6.0, 9.0)


_HALF = torch.tensor([[1] * 4 + [0] * 4])


@pytest.mark.parametrize(
    ("masks", "tokens"),
    [
        pytest.param({}, 8, id="no padding"),
        pytest.param({"attention_mask": _HALF, "completion_mask": _HALF}, 4, id="DPOTrainer marks the answers, too"),
        pytest.param({"prompt_mask": _HALF, "completion_mask": _HALF}, 8, id="GRPOTrainer has two masks"),
        pytest.param({"query_attention_mask": _HALF, "doc_attention_mask": _HALF}, 8, id="two texts"),
    ],
)
def test_a_token_of_a_peer_is_counted_once(masks, tokens):
    assert int(peer_tools.companions.unpadded({"input_ids": torch.ones(1, 8), **masks})) == tokens


_SMALL = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=1024) | dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


@pytest.mark.parametrize("name", ["8b", "1b", "moe", "gpt_oss", "qwen2_5_vl_tiny"])
def test_folder_for_unsloth_has_every_weight_and_takes_no_space(name, tmp_path):
    """transformers reads the folder as Unsloth does. Drawn weights are spread as transformers draws them."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    shape, images = bench_peers.SHAPES[name], "vision_config" in bench_peers.SHAPES[name]
    if not images:
        few = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32) if "num_experts" in shape else {}
        shape = changed(shape, **_SMALL, **few)
    tokenizer = (
        image_documents.write_processor(bench_peers.TOKENIZER, tmp_path / "p", shape)
        if images
        else bench_peers.TOKENIZER
    )
    (folder := tmp_path / "model").mkdir()
    peer_tools.write(dict(shape=shape, length=128, model=str(folder), tokenizer=str(tokenizer)))
    kind = AutoModelForImageTextToText if images else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(report.values()), report
    peer_tools.draw_weights(model)
    assert (folder / "complete").exists()
    assert (folder / "model.safetensors").stat().st_blocks * 512 < 2**17
    drawn = dict(peer_tools.random_model(shape, 128, "eager").named_parameters())
    for path, weight in model.named_parameters():
        other = drawn[path]
        assert weight.shape == other.shape
        if weight.dim() > 1 or path.endswith("weight"):
            assert weight.float().std(correction=0).item() == pytest.approx(
                other.float().std(correction=0).item(), abs=0.004
            ), path
            assert weight.float().mean().item() == pytest.approx(other.float().mean().item(), abs=0.004), path
