"""What a user sees of `fxtune bench`: figures, --price, --profile, --ablate, --json."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from support.tuning import TINY

from fxtune.cli import bench
from fxtune.cli.main import main
from fxtune.diagnostics.benchmark import Measured


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """The quickstart's data is tokenized once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_the_command_prints_and_writes_the_figures(cwd, capsys):
    assert main(["bench", *TINY, "--steps", "2", "--warm-up", "2", "--price", "7.2", "--json", "b.json"]) == 0
    out = capsys.readouterr().out
    found = json.loads((cwd / "b.json").read_text())
    assert [path.name for path in cwd.iterdir()] == ["b.json"]
    assert found["price_per_million_tokens"] == pytest.approx(7.2 / 3600 / found["tokens_per_second"] * 1e6)
    assert f"{found['tokens_per_second']:,.0f} of documents" in out
    assert f"{found['price_per_million_tokens']:.4f} per million tokens, at 7.2 per hour" in out
    assert "not measured: NVML is for NVIDIA GPUs" in out
    assert "auto chose sdpa" in out
    assert (found["steps"], found["warm_up"], len(found["losses"])) == (2, 2, 4)
    assert found["techniques"]["attention"]["backend"] == "sdpa"


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (["--steps", "0"], "--steps 0: give a whole number, 1 or more", 2),
        (["--price", "free"], "--price free: give what this machine costs per hour", 2),
        (["--profile", "--ablate"], "--profile measures the recipe as it is", 2),
        (["--json", "nowhere/b.json"], "--json nowhere/b.json cannot be written", 6),
    ],
)
def test_a_bad_option_is_refused_before_anything_is_built(cwd, capsys, monkeypatch, words, message, code):
    monkeypatch.setattr(bench, "measure", None)
    assert main(["bench", *TINY, *words]) == code
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_each_reason_of_a_refused_run_is_an_error_and_an_older_answer_is_gone(cwd):
    Path("b.json").write_text('{"tokens_per_second": 1}')
    assert main(["bench", *TINY, "techniques.attention.backend=flash4", "--json", "b.json"]) == 2
    found = json.loads(Path("b.json").read_text())
    assert [*found] == ["error"]
    each = [found["error"], *found["error"]["also"]]
    assert {mistake["key"] for mistake in each} == {"techniques.attention.backend"}
    assert len(each) > 1
    assert all(mistake["change"] for mistake in each)


def test_each_technique_and_switch_that_is_on_is_switched_off():
    asked = {
        "attention": {"backend": "flash4"},
        "lora": {"fused": "on"},
        "liger": {"kernels": ["rms_norm", "rope"]},
        "compile": {"mode": "default"},
    }
    assert list(bench.switched_off(asked)) == [
        ("flash4 (sdpa instead)", ["techniques.attention.backend=sdpa"]),
        ("lora", ["techniques.lora.enabled=false"]),
        ("lora.fused", ["techniques.lora.fused='off'"]),
        ("liger", ["techniques.liger.enabled=false"]),
        ("liger.rms_norm", ["techniques.liger.kernels=[rope]"]),
        ("liger.rope", ["techniques.liger.kernels=[rms_norm]"]),
        ("compile", ["techniques.compile.enabled=false"]),
    ]
    assert list(bench.switched_off({"attention": {"backend": "sdpa"}})) == []


def test_ablation_has_a_line_for_each_technique_and_the_reason_of_a_failure(cwd, capsys, monkeypatch):
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

    def measure_in_process(words, steps, warm_up):
        if asked:  # earlier measurements are on the disk
            assert len(json.loads(Path("b.json").read_text())["without"]) == len(asked) - 1
        asked.append(([text for text in words if text not in TINY], steps, warm_up))
        return answers.get(words[-1], whole)

    monkeypatch.setattr(bench, "measure_in_process", measure_in_process)
    monkeypatch.setattr(bench, "measure", None)  # the GPU belongs to the other processes
    assert main(["bench", *TINY, "--ablate", "--steps", "5", "--price", "3.6", "--json", "b.json"]) == 0
    assert asked == [([], 5, 3), *(([key], 5, 3) for key in answers)]
    found = json.loads((cwd / "b.json").read_text())
    assert found["price_per_million_tokens"] == pytest.approx(3.6 / 3600 / 100 * 1e6)
    assert found["without"]["lora"]["error"] == "does not fit"
    lines = [line for line in capsys.readouterr().out.splitlines() if "without" in line and "│" in line]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["without flash4 (sdpa instead)", "50", "0.50x", "1.0", "1.00x", "2.2500", "+0.2500"],
        ["without lora", "does not fit", "", "", "", "", ""],
        ["without compile", "refused: techniques.compile", "", "", "", "", ""],
    ]


def test_ablation_of_a_recipe_that_cannot_be_measured_is_an_error(cwd, capsys, monkeypatch):
    monkeypatch.setattr(bench, "measure_in_process", lambda *_: {"error": "does not fit"})
    assert main(["bench", *TINY, "--ablate"]) == 1
    assert "does not fit" in capsys.readouterr().err


def measured() -> dict:
    """A measurement of 100 tokens a second, 1 GiB and a loss of 2."""
    numbers = {field.name: 1.0 for field in fields(Measured)}
    others = {"slowest_rank": None, "slowest_behind": None, "startup_seconds": {}, "decided": [], "techniques": {}}
    return {**numbers, "tokens_per_second": 100.0, "loss": 2.0, "energy": "the counter", **others}
