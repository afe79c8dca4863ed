"""`fxtune tune`: real trials on the small model; the search, its failures and its end with a stand-in for `fxtune bench`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fxtune.cli import tune
from fxtune.cli.main import main
from fxtune.config import compose as config
from fxtune.errors import ConfigError, StorageError
from fxtune.techniques.base import Switch
from fxtune.techniques.facts import Facts
from fxtune.tuning import recipe_writer, search, search_space, trial_process
from fxtune.tuning.point import Row
from fxtune.tuning.search_space import SearchContext
from fxtune.tuning.trial_process import Cache, Outcome, TrialResult

QUICK = "+recipe=quickstart"
TINY = [
    "model.init=random",
    "model.architecture={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1}",
    "data.sequence_length=256",
]
RECIPE = Path("recipes/quickstart_tuned.yaml")

STAND_IN = """
import json, os, subprocess, sys, time
here = os.path.dirname(__file__)
words = sys.argv[1:]
rules = json.load(open(os.path.join(here, "rules.json")))
with open(os.path.join(here, "calls"), "a") as calls:
    calls.write(json.dumps(words) + "\\n")
def last(key):
    return [w for w in words if w.startswith(key)][-1:]
speed, losses = 1000.0, [3.0, 2.9]
for word, what in rules.items():
    if word == "wait":
        continue
    if not (word in words and word in last(word.partition("=")[0] + "=")) and word != "all":
        continue
    if isinstance(what, (int, float)):
        speed *= what
    elif what == "memory":
        sys.exit("fxtune: CUDA out of memory. Tried to allocate 9 GiB") if os.write(2, b"fxtune: CUDA out of memory.") else 0
    elif what == "refuse":
        os.write(2, b"fxtune: This cannot run here as asked:\\n  techniques.x: not today"); sys.exit(2)
    elif what == "crash":
        raise RuntimeError("an illegal instruction was met")
    elif what == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open(os.path.join(here, "pids"), "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    elif what == "loss":
        losses = [3.0, 3.5]
    elif isinstance(what, list):
        speed, losses = 2 * speed, what
figures = {"tokens_per_second": speed, "memory_gib": 1.5, "losses": losses, "data_wait": rules.get("wait", 0.0)}
open(words[words.index("--json") + 1], "w").write(json.dumps(figures))
"""


class StandIn:
    """In place of `fxtune bench`. `rules`: what each word of the command line does to the speed, or to the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bench.py").write_text(STAND_IN)
        self.set({})

    def set(self, given: dict[str, Any]) -> None:
        (self.folder / "rules.json").write_text(json.dumps(given))

    def command(self, words: list[str], steps: int, file: Path) -> list[str]:
        return [sys.executable, str(self.folder / "bench.py"), *words, "--steps", str(steps), "--json", str(file)]

    @property
    def calls(self) -> list[list[str]]:
        file = self.folder / "calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def pids(self) -> list[int]:
        file = self.folder / "pids"
        wait_for(lambda: file.exists() and len(file.read_text().split()) == 2)
        return [int(word) for word in file.read_text().split()]


@pytest.fixture(scope="session")
def ground(rows_cache) -> SearchContext:
    """What the stand-in's searches stand on; the real one looks for itself."""
    made = config.load([QUICK, *TINY, f"data.cache_dir={rows_cache}"])
    return tune.survey([], made, with_data=True)


@pytest.fixture
def bench(tmp_path_factory, monkeypatch, ground) -> StandIn:
    made = StandIn(tmp_path_factory.mktemp("bench"))
    monkeypatch.setattr(trial_process, "command", made.command)
    monkeypatch.setattr(tune, "survey", lambda *_, **__: ground)
    return made


@pytest.fixture(scope="session")
def rows_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("rows")


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory, monkeypatch, rows_cache):
    """Answers of one test are not another's; rows are tokenised once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    TINY[3:] = [f"data.cache_dir={rows_cache}"]


def tuned_as(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and what was written for machines."""
    code = main(["tune", QUICK, *TINY, "--json", "found.json", *words])
    file = Path("found.json")
    found = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    return code, found


def verdict(found: dict[str, Any], **deltas: Any) -> str:
    wanted = {key.replace("__", "."): value for key, value in deltas.items()}
    matching = [row for row in found["rows"] if row["deltas"] == wanted]
    assert len(matching) == 1, [row["deltas"] for row in found["rows"]]
    return matching[0]["verdict"]


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- for real


@pytest.mark.slow
def test_two_real_trials_a_recipe_that_trains_and_a_cache(cwd, monkeypatch, capsys):
    monkeypatch.setattr(search, "REPEATS", 0)
    words = ["train.micro_batch_size=2", "train.global_batch_size=2", "--axes", "micro_batch", "--steps", "2"]
    code, found = tuned_as(*words)
    assert code == 0, capsys.readouterr().err
    measured = [row for row in found["rows"] if row["answers"]]
    assert [row["deltas"] for row in found["rows"]] == [{}, {"train.micro_batch_size": 1}]
    assert len(measured) == 2
    for row in measured:
        (answer,) = row["answers"]
        assert answer["outcome"] == "measured"
        assert answer["tokens_per_second"] > 0
        assert answer["peak"] > 0
        assert len(answer["losses"]) == 2 + trial_process.WARM_UP
        assert row["loss_off"] < 1e-5  # how rows are split into micro-batches is not seen in the loss
    recipe = yaml.safe_load(RECIPE.read_text())
    assert recipe["defaults"] == ["quickstart", "_self_"]
    assert set(recipe) == {"defaults", "model", "data", "train"}  # what was typed, and nothing of the defaults
    assert set(recipe["train"]) == {"micro_batch_size", "global_batch_size"}

    monkeypatch.setattr(trial_process, "measure", lambda *_: pytest.fail("it is in the cache"))
    code, again = tuned_as(*words)
    assert code == 0
    assert [[{**answer, "cached": False} for answer in row["answers"]] for row in again["rows"]] == [
        row["answers"] for row in found["rows"]
    ]
    assert Path(f"{RECIPE}.old").exists()

    assert (
        main(["+recipe=quickstart_tuned", "train.max_steps=1", "data.questions.path=null", "tracking.display=none"])
        == 0
    )
    assert json.loads(Path("runs/quickstart_tuned/result.json").read_text())["train/step"] == 1


# --- the search


def test_it_goes_on_from_the_best_of_each_axis_and_writes_what_differs(cwd, bench, ground, capsys):
    bench.set(
        {
            "techniques.attention.backend=eager": 1.3,
            "techniques.compile.enabled=true": 0.5,
            "train.micro_batch_size=2": 1.2,
            "train.micro_batch_size=1": 0.7,
        }
    )
    code, found = tuned_as("--axes", "attention,compile,micro_batch")
    assert code == 0
    assert found["winner"] == {"techniques.attention.backend": "eager", "train.micro_batch_size": 2}
    assert found["not_tried"] == []
    out = capsys.readouterr().out
    assert "1,560 tokens/s, +56.0% against the recipe as it is (1,000)" in out
    text = RECIPE.read_text()
    assert {**yaml.safe_load(text), "model": None, "data": None} == {
        "defaults": ["quickstart", "_self_"],
        "model": None,
        "data": None,
        "train": {"micro_batch_size": 2},
        "techniques": {"attention": {"backend": "eager"}},
    }
    for part in (
        "fxtune tune +recipe=quickstart",
        "python -m fxtune +recipe=quickstart_tuned",
        ground.facts.device_name,
        "1,560 tokens/s",
        "peak 1.50 GiB",
        f"torch {metadata.version('torch')}",
        "# @package _global_",
    ):
        assert part in text
    # the best was measured 1 + REPEATS times, and the compiler was tried on top of the better attention
    eager = "techniques.attention.backend=eager"
    assert sum({eager, "train.micro_batch_size=2"} <= {*call} for call in bench.calls) >= 1 + search.REPEATS
    assert any({eager, "techniques.compile.enabled=true"} <= {*call} for call in bench.calls)
    assert verdict(found, techniques__attention__backend="flash4").startswith(
        "refused: attention.backend: flash4 needs a GPU"
    )


def test_what_cannot_pay_is_not_tried(cwd, bench, capsys):
    bench.set({"train.micro_batch_size=2": 0.9, "techniques.checkpointing.policy=selective": 0.8})
    code, found = tuned_as("train.global_batch_size=8", "--axes", "checkpointing,micro_batch,workers")
    assert code == 0
    assert found["winner"] == {}
    selective = {"techniques.checkpointing.enabled": True, "techniques.checkpointing.policy": "selective"}
    # selective computes a little twice and was slower: what computes more twice is not tried; nor one row, two being slower
    assert [row["deltas"] for row in found["rows"] if row["answers"]] == [
        {},
        selective,
        {"train.micro_batch_size": 8},
        {"train.micro_batch_size": 2},
    ]
    assert "the loop waits for its data 0.0% of the time" in capsys.readouterr().out


def test_a_tie_is_the_simpler_settings(cwd, bench, capsys):
    bench.set({"techniques.attention.backend=eager": 1.0 + search.NOISE / 2})
    code, found = tuned_as("--axes", "attention")
    assert code == 0
    assert found["winner"] == {}
    assert "the recipe as it is: 1,000 tokens/s" in capsys.readouterr().out
    assert "as it was" in RECIPE.read_text().splitlines()[0]


def test_repeated_measurements_that_differ_make_a_tie(cwd, monkeypatch):
    speeds = {"eager": iter([1100.0, 900.0, 1300.0]), "": iter([1000.0, 1010.0, 990.0])}

    def measure(words, steps, limit):
        kind = "eager" if "techniques.attention.backend=eager" in words else ""
        return TrialResult(Outcome.measured, 0.1, next(speeds[kind]), 1.0, (3.0,))

    monkeypatch.setattr(trial_process, "measure", measure)
    code, found = tuned_as("--axes", "attention")
    assert code == 0
    assert found["winner"] == {}  # 10 % more once, but 36 % between three measurements
    assert "spread of repeated measurements" in found["why"]


def test_trials_that_fail_are_answers(cwd, bench, capsys):
    bench.set(
        {
            "techniques.compile.enabled=true": "crash",
            "techniques.attention.backend=eager": "refuse",
            "train.micro_batch_size=1": "memory",
            "train.micro_batch_size=2": 2.0,
        }
    )
    code, found = tuned_as("--axes", "compile,attention,micro_batch")
    assert code == 0
    assert found["winner"] == {"train.micro_batch_size": 2}
    assert "an illegal instruction was met" in verdict(found, techniques__compile__enabled=True)
    assert verdict(found, techniques__compile__enabled=True).startswith("crashed: exit code 1")
    assert verdict(found, techniques__attention__backend="eager") == (
        "refused: This cannot run here as asked: techniques.x: not today"
    )
    assert verdict(found, train__micro_batch_size=1).startswith("out of memory: CUDA out of memory")
    assert "illegal instruction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "text", "outcome", "reason"),
    [
        (4, "fxtune: CUDA out of memory.\nWhat helps: less", Outcome.memory, "CUDA out of memory. What helps: less"),
        (1, "Traceback\n  x\ntorch.OutOfMemoryError: no", Outcome.memory, "torch.OutOfMemoryError: no"),
        (-9, "", Outcome.memory, "killed, most often for the host's memory"),
        (2, "note\nfxtune: wrong key", Outcome.refused, "wrong key"),
        (4, "fxtune: no GPU", Outcome.refused, "no GPU"),
        (5, "fxtune: not finite", Outcome.crashed, "exit code 5: not finite"),
        (-11, "", Outcome.crashed, "ended by signal SIGSEGV: it said nothing"),
    ],
)
def test_what_became_of_a_process(code, text, outcome, reason):
    answer = trial_process.failed(code, text, 1.0)
    assert (answer.outcome, answer.reason) == (outcome, reason)


def test_another_loss_never_wins(cwd, bench, capsys):
    bench.set({"techniques.attention.backend=eager": "loss", "loader.num_workers=0": 3.0})
    code, found = tuned_as("--axes", "attention")
    assert code == 0
    assert found["winner"] == {}
    assert verdict(found, techniques__attention__backend="eager") == "another loss: off by 1.0e-01, more than 0.001"


RECIPES = [3.0] * 20


@pytest.mark.parametrize(
    ("losses", "wins"),
    [
        ([*RECIPES[:-1], 3.012], True),  # 4e-3 off at last, as training amplifies rounding
        ([*RECIPES[:-1], 3.018], False),  # 6e-3, more than five times what is allowed
        ([3.006, 2.994, *RECIPES[2:]], False),  # the first step is of the same weights: 2e-3 off, whatever the mean
        ([3.0, *[3.004] * 19], False),  # all the others 1.3e-3 off, and so the mean
        ([*RECIPES, 3.0], False),
        ([*RECIPES[:-1], float("nan")], False),
    ],
    ids=["one step", "one step far", "the first step", "the mean", "more steps", "nan"],
)
def test_losses_are_held_against_the_recipes(cwd, bench, losses, wins):
    bench.set({"all": RECIPES, "techniques.attention.backend=eager": losses})
    code, found = tuned_as("--axes", "attention")
    assert code == 0
    assert found["winner"] == ({"techniques.attention.backend": "eager"} if wins else {})
    assert verdict(found, techniques__attention__backend="eager").startswith("" if wins else "another loss")
    assert "losses of the same batches are those of the recipe within 0.001" in RECIPE.read_text()


def test_a_recipe_that_does_not_run_is_replaced_by_one_that_does(cwd, bench, capsys):
    bench.set({"train.micro_batch_size=4": "memory", "train.micro_batch_size=1": 0.9})
    code, found = tuned_as("train.micro_batch_size=4", "--axes", "micro_batch")
    assert code == 0
    assert found["winner"]["train.micro_batch_size"] in (1, 2)
    assert "gives no figure (out of memory" in capsys.readouterr().out


def test_nothing_that_runs_is_said_with_the_reason(cwd, bench, capsys):
    bench.set({"all": "crash"})
    code, _ = tuned_as("--axes", "attention")
    assert code == 4
    assert "No setting of these axes (attention) runs here" in (err := capsys.readouterr().err)
    assert "illegal instruction" in err
    assert not RECIPE.exists()


# --- time, and being broken off


def test_a_hang_is_ended_with_all_that_it_started(cwd, bench, monkeypatch):
    monkeypatch.setattr(search, "LEAST_LIMIT", 5.0)
    monkeypatch.setattr(search, "TIMES", 1.0)
    bench.set({"techniques.attention.backend=eager": "hang"})
    code, found = tuned_as("--axes", "attention")
    assert code == 0
    assert found["winner"] == {}
    assert verdict(found, techniques__attention__backend="eager") == (
        "over its time limit: no figures after 5 s: it said nothing"
    )
    pids = bench.pids()
    wait_for(lambda: not any(map(alive, pids)))


def test_when_the_minutes_are_over_it_says_what_was_not_tried(cwd, bench, capsys):
    bench.set({"techniques.attention.backend=eager": "hang", "train.micro_batch_size=2": 2.0})
    code, found = tuned_as("--axes", "attention,micro_batch", "--minutes", "0.1")
    assert code == 0
    assert "attention.backend=eager" in found["not_tried"]
    assert any("micro_batch_size" in text for text in found["not_tried"])
    assert "The 0.1 minutes are over. Not tried: " in (out := capsys.readouterr().out)
    assert "more --minutes" in out
    bench.set({"train.micro_batch_size=2": 2.0})
    code, found = tuned_as("--axes", "attention,micro_batch")  # nothing that was cut short counts as an answer
    assert found["winner"] == {"train.micro_batch_size": 2}


@pytest.mark.parametrize(
    ("rules", "seconds", "tried"),
    [
        ({}, 70.0, 2),  # the second is something to compare with: a third needs its 70 s and those of two repetitions
        ({"techniques.attention.backend=eager": "loss"}, 100.0, 3),  # the second may not win, and is not repeated
        ({"techniques.attention.backend=eager": 3.0}, 100.0, 3),  # which of these two is faster is known
    ],
    ids=["two speeds", "another loss", "far apart"],
)
def test_no_time_is_kept_back_for_repetitions_while_there_is_nothing_to_compare(
    cwd, bench, monkeypatch, rules, seconds, tried
):
    measure = trial_process.measure
    monkeypatch.setattr(trial_process, "measure", lambda *given: replace(measure(*given), seconds=seconds))
    bench.set(rules)
    code, found = tuned_as(
        "--axes", "attention,micro_batch", "--minutes", "3"
    )  # by the clock hardly any of it goes by
    assert code == 0
    assert len([row for row in found["rows"] if row["answers"]]) == tried
    assert found["not_tried"]


def test_what_was_given_up_is_not_said_to_want_time(cwd, bench, monkeypatch):
    measure = trial_process.measure
    monkeypatch.setattr(trial_process, "measure", lambda *given: replace(measure(*given), seconds=70.0))
    bench.set({"train.micro_batch_size=8": 0.5})
    code, found = tuned_as("train.global_batch_size=16", "--axes", "micro_batch,attention,workers", "--minutes", "3")
    assert code == 0
    # 8 rows were slower, so 16 are not tried; data is not waited for; flash4 needs a GPU, which is in its row
    assert found["not_tried"] == ["micro_batch_size=1", "attention.backend=eager"]
    assert verdict(found, techniques__attention__backend="flash4").startswith("refused")


def test_a_search_that_was_broken_off_goes_on(cwd, bench, monkeypatch, capsys):
    bench.set({"train.micro_batch_size=2": 2.0})
    real, number = trial_process.measure, [0]

    def broken_off(*given):
        number[0] += 1
        if number[0] == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(trial_process, "measure", broken_off)
    code, found = tuned_as("--axes", "attention,micro_batch")
    assert code == 130
    assert found["winner"] is None
    assert sum(row["tokens_per_second"] > 0 for row in found["rows"]) == 2
    assert "the same command goes on from them" in (out := capsys.readouterr().out)
    assert "attention.backend=eager" in out
    assert not RECIPE.exists()
    before = len(bench.calls)
    assert before == 2
    code, found = tuned_as("--axes", "attention,micro_batch")
    assert code == 0
    assert found["winner"] == {"train.micro_batch_size": 2}
    assert not any("techniques.attention.backend=eager" in call for call in bench.calls[before : before + 1])
    assert (
        sum(call[: len(TINY) + 1] == call[:-4] for call in bench.calls[: before + 1]) == 1
    )  # the recipe as it is, once


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_the_search_ends_its_trial_ends_too(tmp_path, bench, how):
    bench.set({"all": "hang"})
    script = tmp_path / "search.py"
    script.write_text(f"""
import signal, sys
from pathlib import Path
from fxtune import trials
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in a shell's background starts with it ignored
trials.command = lambda words, steps, file: [sys.executable, {str(bench.folder / "bench.py")!r}, "--json", str(file)]
with trials.ended_in_order():
    trials.measure([], 1, 60)
""")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(tune.__file__).parents[2])},
    )
    try:
        trial, child = bench.pids()
        assert alive(trial)
        process.send_signal(how)
        process.wait(20)
        wait_for(lambda: not alive(trial))
        if (
            how is not signal.SIGKILL
        ):  # then what a trial starts has to watch for its end itself, as loaders and compilers do
            wait_for(lambda: not alive(child))
    finally:
        process.kill()
        for pid in (trial, child):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


# --- what is there before a trial


def test_a_dry_run_lists_and_runs_nothing(cwd, bench, capsys):
    assert main(["tune", QUICK, *TINY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert bench.calls == []
    assert list(cwd.iterdir()) == []
    for part in (
        "the recipe as it is",
        "attention.backend=eager",
        "checkpointing.policy=selective",
        "micro_batch_size=2",
        "GiB",
        "attention.backend=flash4",
        "refused: attention.backend:",
        "Nothing was run",
    ):
        assert part in out


def h200(words: list[str], gib: float = 139.0, free: float | None = None) -> tuple[config.Config, SearchContext]:
    """A recipe and an H200 to tune it on, neither of which is here."""
    made = config.load(words)
    packages = {"torch": "2.11.0", "liger-kernel": "0.8.5", "flash-attn-4": "4.0.0b36"}
    model = dict(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        hidden_act="silu",
    )
    facts = Facts(
        device="cuda",
        device_name="NVIDIA H200",
        capability=(9, 0),
        memory=int(gib * 2**30),
        free_memory=int((free or gib) * 2**30),
        host_memory=128 * 2**30,
        cores=16,
        packages=packages,
        model=model,
        dtype="bfloat16",
        packing=True,
        sequence_length=made.data.sequence_length,
        rows=(made.data.sequence_length,),
        micro_batch_size=made.train.micro_batch_size,
    )
    return made, SearchContext(facts, "bfloat16", "data")


def planned(made: config.Config, ground: SearchContext, *names: str) -> list[Row]:
    """What these axes, or all, have to try."""
    found = search.Search(
        made, [], ground, list(names or search_space.AXES), 60.0, 5, Cache(Path("none")), lambda _: None
    )
    return [row for _, row in found.planned()]


@pytest.fixture
def _with_compiler(monkeypatch):
    from fxtune.techniques.compile import technique as compiling

    monkeypatch.setattr(compiling, "_without_compiler", lambda facts: iter(()))
    for module in ("recomputation", "techniques.checkpointing"):
        monkeypatch.setattr(f"fxtune.{module}.layer_of", lambda config: None)
    monkeypatch.setattr(search_space, "skeleton", lambda config: None)


LLAMA = ["+recipe=llama_lora", "train.micro_batch_size=4", "train.global_batch_size=32"]


@pytest.mark.usefixtures("_with_compiler")
def test_on_a_card_all_axes_have_values_and_none_is_asked_of_the_card(monkeypatch):
    import transformers.models.llama.modeling_llama  # noqa: F401  before, since torchao, which it imports, asks for the card

    for name in ("is_available", "current_device", "get_device_properties", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the card belongs to the trials"))
    titles = [row.title for row in planned(*h200([*LLAMA, "techniques=[lora,fast]"]))]
    for part in (
        "attention.backend=sdpa",
        "compile.enabled=false",
        "compile.mode=max_autotune",
        "liger.enabled=false",
        "checkpointing.policy=selective",
        "checkpointing.policy=full",
        "micro_batch_size=8",
        "micro_batch_size=2",
        "num_workers=0",
        "num_workers=8",
    ):
        assert any(part in title for title in titles), (part, titles)
    assert len({json.dumps(row.outlook.identity, sort_keys=True, default=str) for row in planned(*h200(LLAMA))}) > 10


@pytest.mark.usefixtures("_with_compiler")
@pytest.mark.parametrize("matmul", ["auto", "cublas"])
def test_whose_matmul_is_an_axis_where_there_are_two(matmul):
    def tried(words, ground):
        return [row.title for row in planned(words, ground, "matmul") if row.title.startswith("lora.matmul")]

    made, ground = h200([*LLAMA, "techniques=[lora,fast]", f"techniques.lora.matmul={matmul}"])
    assert not tried(made, ground), "quack-kernels is not there"
    here = replace(ground, facts=replace(ground.facts, packages={**ground.facts.packages, "quack-kernels": "0.6.5"}))
    assert tried(made, here) == [f"lora.matmul={'cublas' if matmul == 'auto' else 'cute'}"], "the other one, once"
    older = replace(here, facts=replace(here.facts, capability=(8, 0)))
    made.techniques.lora.fused = Switch.off
    assert not tried(made, here)
    made.techniques.lora.fused = Switch.on
    assert not tried(made, older)


@pytest.mark.usefixtures("_with_compiler")
def test_what_the_forecast_rules_out_is_left_out_and_says_so():
    rows = planned(*h200([*LLAMA, "techniques=[lora,fast]"], gib=24.0))
    told = {row.title: row.verdict for row in rows}
    assert re.search(
        r"left out: needs some \d+\.\d GiB by the forecast, and 24.0 are free", told["micro_batch_size=32"]
    )
    everything = [*LLAMA, "techniques=[lora,fast]", "techniques.checkpointing.policy=none"]
    small, large = (planned(*h200(everything, gib=gib)) for gib in (48.0, 139.0))
    assert sum("left out" in row.verdict for row in small) > sum("left out" in row.verdict for row in large)


@pytest.mark.usefixtures("_with_compiler")
def test_what_keeps_more_memory_is_tried_with_fewer_rows():
    made, ground = h200([*LLAMA, "techniques=[lora,fast]", "techniques.checkpointing.policy=full"], gib=64.0)
    none = {"techniques.checkpointing.enabled": True, "techniques.checkpointing.policy": "none"}
    assert not search_space.outlook(search_space.applied(made, none), ground).fits
    smaller = search_space.fitting(made, none, ground)
    assert 1 <= smaller["train.micro_batch_size"] < 4
    assert search_space.outlook(search_space.applied(made, smaller), ground).fits


def test_auto_and_what_it_becomes_are_one_point(cwd, ground):
    made = config.load([QUICK, *TINY])
    same = search_space.applied(
        made,
        {
            "techniques.attention.backend": "sdpa",
            "loader.num_workers": 0,
            "techniques.checkpointing.enabled": True,
            "techniques.checkpointing.policy": "none",
        },
    )
    assert search_space.outlook(made, ground).identity == search_space.outlook(same, ground).identity
    assert (
        search_space.outlook(search_space.applied(made, {"train.micro_batch_size": 2}), ground).identity
        != search_space.outlook(made, ground).identity
    )


def test_micro_batches_divide_the_global_batch_and_grow_at_least_twofold():
    made = config.load([QUICK, "train.micro_batch_size=6", "train.global_batch_size=48"])
    ground = SearchContext(Facts(), "float32")
    sizes = [step["train.micro_batch_size"] for step in search_space.micro_batch(made, ground)]
    assert sizes == [12, 24, 48, 3, 1]


def test_the_card_is_looked_at_by_a_process_of_its_own(cwd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "_look", lambda *_: pytest.fail("in this process"))
    words = [QUICK, *TINY]
    ground = tune.survey(words, config.load(words), with_data=True)
    assert ground.facts.device == "cpu"  # there, nothing was patched
    assert ground.precision == "float32"
    assert ground.data


def test_the_cache_knows_the_card_the_model_the_rows_and_the_packages(cwd, ground):
    made = config.load([QUICK, *TINY])
    point = search_space.outlook(made, ground)

    def key(**facts: Any) -> str:
        at = replace(ground, facts=replace(ground.facts, **facts))
        found = search.Search(made, [], at, [], 1.0, 5, Cache(Path("none")), print)
        return json.dumps(found._key(Row({}, point)), default=str)

    assert key() == key(free_memory=1)
    for other in (
        dict(device_name="H200"),
        dict(memory=8 << 30),
        dict(model={"hidden_size": 8}),
        dict(sequence_length=9),
        dict(packages={"torch": "9"}),
        dict(dtype="float16"),
    ):
        assert key(**other) != key()


# --- options


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--axes", "micro_bach"], "there is no axis `micro_bach`; did you mean `micro_batch`?"),
        (["--axes", ","], "There are: attention, compile"),
        (["--minutes", "soon"], "--minutes soon: give a number above 0"),
        (["--steps", "2.5"], "--steps 2.5: give a whole number above 0"),
        (["--output", "fast.txt"], "a recipe is a file NAME.yaml"),
        (["-m", "train.micro_batch_size=1,2"], "leave -m out"),
        (["--minuts", "3"], "--minuts"),
    ],
)
def test_options_that_make_no_sense(cwd, bench, capsys, words, told):
    assert main(["tune", QUICK, *TINY, *words]) == 2
    assert told in capsys.readouterr().err
    assert bench.calls == []


def test_somebody_elses_file_is_not_touched(cwd, bench, capsys):
    RECIPE.parent.mkdir()
    RECIPE.write_text("# mine\n")
    assert main(["tune", QUICK, *TINY]) == StorageError.exit_code
    assert "fxtune tune did not write it" in capsys.readouterr().err
    assert bench.calls == []
    assert RECIPE.read_text() == "# mine\n"


def test_again_measures_what_the_cache_knows(cwd, bench):
    tuned_as("--axes", "attention")
    before = len(bench.calls)
    tuned_as("--axes", "attention")
    assert len(bench.calls) == before
    tuned_as("--axes", "attention", "--again", "--output", "other.yaml")
    assert len(bench.calls) == 2 * before
    assert Path("other.yaml").exists()


# --- the recipe


@pytest.mark.parametrize(
    "words",
    [
        [QUICK],
        [QUICK, "+optimizer=muon", "optimizer.lr=1e-3"],
        [QUICK, "techniques=[lora,low_memory]"],
        [QUICK, "data.sources.0.path=other.jsonl", "data.sources.0.weight=2"],
        [QUICK, "data.sources=[{path: 'a b.jsonl'}, {path: c}]"],
        [QUICK, "model.architecture.hidden_size=64", "model.architecture={num_hidden_layers: 3}"],
        [QUICK, "techniques.lora={r: 16, alpha: 32}", "run.name=other"],
        [QUICK, "techniques.liger.rms_norm='off'"],
        ["+recipe=[llama_lora,quickstart]", "tracking=wandb_offline"],
        ["+recipe=elsewhere/mine.yaml", "techniques=lora"],
        ["model.path=builtin:tiny", "data.sources=[{path: x.jsonl}]"],
    ],
)
def test_the_recipe_comes_to_what_was_measured(cwd, words):
    Path("elsewhere").mkdir()
    Path("elsewhere/mine.yaml").write_text(
        "# mine\n# @package _global_\ndefaults: [quickstart]\ntechniques:\n  lora: {r: 4}\n"
        "  checkpointing: {enabled: true}\n"
    )
    made = config.load(words)
    deltas = {
        "train.micro_batch_size": 2,
        "techniques.liger.enabled": True,
        "techniques.liger.fused_linear_cross_entropy": "on",
        "techniques.checkpointing.save": ["attention"],
    }
    recipe_writer.write(Path("recipes/fast.yaml"), ["fast", "", "header"], words, made, deltas)
    found = config.load(["+recipe=fast"])
    wanted = search_space.applied(made, deltas)
    found.run.name = wanted.run.name = ""
    assert found == wanted
    text = yaml.safe_load(Path("recipes/fast.yaml").read_text())
    assert "run" not in text or text["run"] == {"name": "other"}
    assert "schedule" not in text  # nothing of what is as it always is
    assert recipe_writer.place_for(words, "run", None).name.endswith("_tuned.yaml")


def test_a_recipe_of_several_values_for_a_key_is_refused(cwd):
    with pytest.raises(ConfigError, match="leave -m out"):
        tune.run(config.load([QUICK]), [QUICK, "optimizer.lr=1,2"])
