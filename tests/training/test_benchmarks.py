"""Benchmarks around a run: base and tuned side by side, in result.json, on the page and in `fxtune eval`."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support import lm_eval_standin
from support.harness import user_environment
from support.lm_eval_standin import real_lm_eval, write_task
from support.runs import same_export
from support.vllm_server import vllm_server
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from fxtune.cli import evaluate, report
from fxtune.cli.main import main
from fxtune.errors import ConfigError
from fxtune.tracking.tracker import DisplayKind
from fxtune.training import trainer
from fxtune.training.benchmarks import figures

TINY = Path(__file__).parents[2] / "fxtune" / "assets" / "tiny"
COLORS = ("red", "blue", "white", "green")
ROWS = [(f"Lamp {number}: what color? ", COLORS, number % 4) for number in range(12)]


@pytest.fixture
def benched(small, cwd, monkeypatch):
    """A config of two steps, with a task of twelve documents that lm-eval's stand-in measures."""
    lm_eval_standin.install(monkeypatch)
    write_task(cwd / "tasks", "lamps", ROWS)
    write_task(cwd / "tasks", "others", ROWS[:5])
    small.eval.tasks, small.eval.task_folder = ["lamps"], "tasks"
    small.run.dir, small.train.max_steps, small.optimizer.lr = "run", 2, 0.3
    return small


def test_a_gain_has_the_error_of_the_pairs():
    base = {"a/acc": {"value": 0.5, "documents": [1, 0, 0, 1]}, "a/f1": {"value": 0.3, "documents": []}}
    tuned = {"a/acc": {"value": 0.75, "documents": [1, 1, 0, 1]}, "a/f1": {"value": 0.4, "documents": []}}
    found = figures(base, tuned)
    assert found["benchmarks/a/acc/gain"] == 0.25
    assert found["benchmarks/a/acc/gain_error"] == pytest.approx(math.sqrt(0.25 / 4))  # differences 0, 1, 0, 0
    assert found["benchmarks/a/acc/base_error"] == pytest.approx(math.sqrt(1 / 3 / 4))
    assert found["benchmarks/a/acc/documents"] == 4
    assert found["benchmarks/a/f1/gain"] == pytest.approx(0.1)
    assert not [name for name in found if name.startswith("benchmarks/a/f1") and name.endswith("_error")]


def test_one_side_has_no_gain_and_other_documents_have_no_pairs():
    tuned = {"a/acc": {"value": 0.5, "documents": [1, 0]}}
    assert set(figures({}, tuned)) == {f"benchmarks/a/acc/{name}" for name in ("tuned", "tuned_error", "documents")}
    base = {"a/acc": {"value": 0.0, "documents": [0, 0, 0]}}
    assert "benchmarks/a/acc/gain" in figures(base, tuned)
    assert "benchmarks/a/acc/gain_error" not in figures(base, tuned)


def test_a_run_shows_base_and_tuned_and_learns_the_same(benched, cwd, capsys):
    benched.tracking.display = DisplayKind.plain
    result = trainer.run(benched)
    out = capsys.readouterr().out
    assert result["benchmarks/lamps/acc/documents"] == 12
    gain = result["benchmarks/lamps/acc/tuned"] - result["benchmarks/lamps/acc/base"]
    assert result["benchmarks/lamps/acc/gain"] == gain
    assert result == json.loads((cwd / "run" / "result.json").read_text())
    report.run("run")
    page = (cwd / "run" / "report.html").read_text()
    for side in ("base", "tuned"):
        shown = f"{result[f'benchmarks/lamps/acc/{side}']:.4f}"
        assert shown in out
        assert shown in page

    tasks, benched.eval.tasks, benched.run.dir = benched.eval.tasks, [], "without"
    trainer.run(benched)
    assert same_export("run", "without")

    benched.eval.tasks, benched.run.dir = tasks, "run"
    alone = evaluate.run(benched)
    assert alone["benchmarks/lamps/acc/tuned"] == result["benchmarks/lamps/acc/base"], "no adapter: the base itself"


@pytest.mark.parametrize("failure", [ValueError("no such thing"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_late_failure_of_lm_eval_keeps_the_run(benched, cwd, capsys, monkeypatch, failure):
    benched.tracking.display = DisplayKind.plain
    evaluate_task, calls = sys.modules["lm_eval"].evaluate, []

    def fails_at_the_end(*given, **options):
        calls.append(given)
        if len(calls) == 2:
            raise failure
        return evaluate_task(*given, **options)

    monkeypatch.setattr(sys.modules["lm_eval"], "evaluate", fails_at_the_end)
    result = trainer.run(benched)
    assert len(calls) == 2
    assert str(failure) in capsys.readouterr().out
    assert "benchmarks/lamps/acc/tuned" not in result
    assert result == json.loads((cwd / "run" / "result.json").read_text())
    assert (cwd / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert "benchmarks/lamps/acc/gain" in evaluate.of_output("run", trust_remote_code=True)


@pytest.mark.parametrize("lora", [True, False])
def test_eval_of_a_run_measures_the_base_beside_it(benched, cwd, lora):
    benched.eval.tasks, benched.techniques.lora.enabled = [], lora
    if not lora:
        benched.optimizer.lr = 0.01
    trainer.run(benched)
    found = evaluate.of_output("run", "eval.task_folder=tasks", tasks="lamps,others")
    assert {name.split("/")[1] for name in found if name.startswith("benchmarks/")} == {"lamps", "others"}
    benched.eval.tasks = ["others", "lamps"]
    base = evaluate.run(benched)
    for task in ("lamps", "others"):
        assert found[f"benchmarks/{task}/acc/base"] == base[f"benchmarks/{task}/acc/tuned"]
    assert "eval/loss" not in base, "nothing is held out"


def test_a_limit_and_the_chat_template_act(benched):
    benched.eval.limit = 3
    assert evaluate.run(benched)["benchmarks/lamps/acc/documents"] == 3
    benched.eval.limit, benched.eval.chat_template = None, True
    assert evaluate.run(benched)["benchmarks/lamps/acc/documents"] == 12


def error(*words: str) -> str:
    """The message with which a command line ends."""
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        assert main(["eval", "+recipe=quickstart", *words]) == 2
    (line,) = [line for line in shown.getvalue().splitlines() if "fxtune" in line]
    return line


def test_bad_input_is_one_message_before_a_weight_is_loaded(benched, cwd, monkeypatch):
    monkeypatch.setattr("fxtune.models.load.build", lambda *_, **__: pytest.fail("a weight is loaded"))
    (cwd / "empty").mkdir()
    assert "lamps, others" in error("--tasks=nope", "eval.task_folder=tasks")
    assert "lamps" in error("--tasks=lampz", "eval.task_folder=tasks")
    assert "eval.task_folder=empty" in error("--tasks=lamps", "eval.task_folder=empty")
    assert "language-model head" in error("--tasks=lamps", "objective=reward", "data.questions.path=null")
    assert "--url" in error("--tasks=lamps", "--url=http://127.0.0.1:1")
    (cwd / "tasks" / "lamps.yaml").write_text("task: lamps\ndataset_kwargs: {data_files: {test: gone.jsonl}}\n")
    benched.eval.tasks = ["lamps"]
    with pytest.raises(ConfigError, match="lamps"):
        trainer.run(benched)


def test_without_lm_eval_the_message_says_how_to_install_it(small, monkeypatch):
    monkeypatch.setattr("fxtune.training.benchmarks.find_spec", lambda _: None)
    assert "fxtune[eval]" in error("--tasks=lamps")


def test_only_the_command_line_names_a_folder_of_tasks(benched, cwd):
    (cwd / "mine.yaml").write_text("# @package _global_\neval: {tasks: [lamps], task_folder: tasks}\n")
    assert "eval.task_folder" in error("+recipe=./mine.yaml")
    trainer.run(benched)
    with pytest.raises(ConfigError, match=r"eval\.task_folder"):
        evaluate.of_output("run")  # its config.yaml may be a stranger's
    assert "benchmarks/lamps/acc/gain" in evaluate.of_output("run", trust_remote_code=True)


REAL = """
import json, sys
import torch, lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base, adapter, folder = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
made = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(base), batch_size=1)
manager = TaskManager(include_path=folder, include_defaults=False)
asked = dict(tasks=["all"], task_manager=manager)
tuned = lm_eval.simple_evaluate(made, **asked)
with model.disable_adapter():
    print(json.dumps([lm_eval.simple_evaluate(made, **asked)["results"], tuned["results"]], default=float))
"""


@pytest.mark.slow
def test_the_real_lm_eval_says_the_same_of_the_exported_adapter(small, cwd, tmp_path):
    """Values and standard errors are lm-eval's own, also by a server, and a group's gain has an interval. The
    tokenizer adds a BOS token, as many do."""
    python = real_lm_eval()
    base = shutil.copytree(TINY, tmp_path / "with_bos")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.bos_token = "<|endoftext|>"
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save_pretrained(base)
    for name, first in (("lamps", 0), ("others", 3)):
        write_task(cwd / "tasks", name, ROWS[first:])
    group = {"group": "all", "task": ["lamps", "others"], "aggregate_metric_list": [{"metric": "acc"}]}
    (cwd / "tasks" / "all.yaml").write_text(yaml.safe_dump(group))
    rows = [{"prompt": question, "completion": COLORS[number % 3]} for number, (question, *_) in enumerate(ROWS)]
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [
        f"model.path={base}",
        "model.dtype=float32",
        "data.sources=[{path: rows.jsonl}]",
        "data.sequence_length=64",
        "run.dir=run",
    ]
    keys += ["techniques.lora.enabled=true", "train.max_steps=20", "optimizer.lr=0.02", "eval.task_folder=tasks"]
    fxtune = [str(python), "-m", "fxtune"]
    environment = user_environment()
    done = subprocess.run([*fxtune, *keys, "eval.tasks=[all]"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert "it/s" not in done.stderr, "lm-eval draws no bar"
    result = json.loads((cwd / "run" / "result.json").read_text())
    asked = [str(python), "-c", REAL, str(base), "run/adapter", "tasks"]
    told = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    for side, wanted in zip(("base", "tuned"), json.loads(told.stdout.splitlines()[-1]), strict=True):
        for task in ("all", "lamps", "others"):
            name = f"benchmarks/{task}/acc/{side}"
            assert result[name] == pytest.approx(wanted[task]["acc,none"])
            if task != "all":  # lm-eval pools the variances of the tasks of a group
                assert result[f"{name}_error"] == pytest.approx(wanted[task]["acc_stderr,none"])
    assert result["benchmarks/all/acc/documents"] == 12 + 9
    assert result["benchmarks/all/acc/gain_error"] > 0

    shutil.copytree("run/adapter", tmp_path / "on another machine")
    for served, folder in (("tuned", cwd / "run" / "adapter"), ("run", tmp_path / "on another machine")):
        with vllm_server(base) as server:
            server.load(served, str(folder))
            asked = [*fxtune, "eval", "run", "--tasks", "all", "eval.task_folder=tasks", "--url", server.url]
            told = [*asked, "--json", f"{served}.json"]
            done = subprocess.run(told, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
        figures = json.loads((cwd / f"{served}.json").read_text())["figures"]
        for name, value in result.items():
            if name.startswith("benchmarks/"):
                assert figures[name] == pytest.approx(value), name
        prompts = [each["prompt"] for each in server.asked if "prompt" in each]
        ids = [part for prompt in prompts for part in (prompt if isinstance(prompt[0], list) else [prompt])]
        assert ids
        assert all(part[0] == bos[1] != part[1] for part in ids), "one BOS token"
    Path("run").rename("my run")
    asked[asked.index("run")] = "my run"
    with vllm_server(base) as server:
        done = subprocess.run([*asked[:-1], server.url], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"'my run={cwd}/my run/adapter'" in " ".join(done.stderr.split()), "the server has no adapter"
