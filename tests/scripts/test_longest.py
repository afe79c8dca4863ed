"""scripts/bench/longest.py: forecasts without a card, a line through what was measured, and what ends the longest row."""

from __future__ import annotations

import importlib.util
import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "longest.py"
spec = importlib.util.spec_from_file_location("longest", SCRIPT)
longest = importlib.util.module_from_spec(spec)
sys.modules["longest"] = longest
spec.loader.exec_module(longest)
GIB = 1 << 30


def ask(card: float = 139.0, host: float = 128.0, **more) -> Namespace:
    return Namespace(**{"words": [], "smoke": False, "fast": False, "card": card, "host": host, "steps": 1, **more})


def call(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["longest.py", *map(str, words)])
    longest.main()


def forecast(length: int, **options):
    args = ask(**options)
    return longest.expected(length, args, longest.ground(args))


def test_half_a_million_tokens_fit_an_h200_by_the_forecast_and_the_host_decides_who_sends():
    row, facts = forecast(65536)
    assert (row.senders, row.staying) == (31, 0)
    assert facts.techniques.lora.fused == "on"
    row, _ = forecast(409600)
    assert row.forecast_gib < 100
    assert row.host_gib < 0.8 * 128
    row, _ = forecast(500000)
    assert row.staying > 0
    assert row.forecast_gib < 139
    assert row.host_gib < 0.8 * 128
    less, _ = forecast(500000, host=64.0)
    assert less.senders < row.senders
    assert less.forecast_gib > row.forecast_gib


def test_fast_uses_up_the_card_and_other_keys_are_heard():
    row, facts = forecast(409600, fast=True)
    assert 120 < row.forecast_gib < 139
    assert facts.techniques.checkpointing.policy == "mix"
    base, _ = forecast(65536)
    small, _ = forecast(65536, words=["techniques.quantize.enabled=true"])
    assert base.forecast_gib - small.forecast_gib > 9


@settings(max_examples=30, deadline=None)
@given(
    st.floats(1, 40),
    st.integers(10_000, 400_000),
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 9)), min_size=2, max_size=5, unique_by=lambda pair: pair[0]
    ),
)
def test_a_line_is_found_again(constant, a_token, points):
    _, facts = FORECAST
    hidden = 2 * 4096
    rows = []
    for thousands, staying in points:
        size = constant * GIB + thousands * 1000 * (a_token + staying * hidden)
        rows.append(longest.Row(thousands * 1000, 31 - staying, False, staying, 0.0, 0.0, peak_gib=size / GIB))
    line = longest.fitted(rows, facts)
    assert line.measured
    assert line.a_token == pytest.approx(a_token, rel=1e-3)
    assert line.constant == pytest.approx(constant * GIB, rel=1e-2, abs=2e6)
    assert (line.points, line.beside) == (len(points), pytest.approx(0, abs=1e-6))


FORECAST = forecast(65536)


def test_the_longest_row_fits_and_the_next_does_not():
    _, facts = FORECAST
    line = longest.Line(18 * GIB, 100 * 1024, True)
    tokens, staying, why = longest.longest(line, facts)
    room = 0.97 * 139 * GIB
    assert line.at(tokens, staying, 8192) <= room
    assert staying > 0
    assert "of the host" in why
    assert "int32" in why
    more = longest.Line(18 * GIB, 200 * 1024, True)
    assert longest.longest(more, facts)[0] < tokens
    # All inputs on the host: the card alone decides.
    short, none, why = longest.longest(longest.Line(18 * GIB, 1024 * 1024, True), facts)
    assert none == 0
    assert short == (room - 18 * GIB) // (1024 * 1024) // 1024 * 1024
    assert "host" not in why


@pytest.fixture
def runs(monkeypatch) -> dict[int, str]:
    """Each length that is run, with the error that it ends with; 18 GiB and 104 KiB a token where it has none."""
    found: dict[int, str] = {}

    def measure(row, args, limit):
        assert limit > 0
        row.error = found.setdefault(row.length, "")
        if not row.error:
            row.peak_gib = 18 + row.length * (104 * 1024 + row.staying * 8192) / GIB
            row.reserved_gib, row.pinned_gib, row.step_seconds, row.tokens_per_second = 1 + row.peak_gib, 1.0, 2.0, 3.0

    monkeypatch.setattr(longest, "measure", measure)
    return found


CARD = ("--card", 139, "--host", 128)


def test_what_three_lengths_and_one_that_died_come_to(tmp_path, capsys, monkeypatch, runs):
    file = tmp_path / "longest.json"
    runs[409600] = "not done after 500 s"
    call(monkeypatch, *CARD, "--lengths", "65536,131072,262144,409600", "--json", file)
    out = capsys.readouterr().out
    assert "| 409,600 | 31 | 60.1 | not done after 500 s | | | | |" in out
    assert "Rows of up to 262,144 tokens were measured. 18.0 GiB and 104.0 KiB a token, " in out
    assert "a line through 3 lengths (measured), none of them more than 0.0% beside it" in out
    assert "What ends it is 134.8 GiB of the card, and 102.4 GiB of the host" in out
    found = json.loads(file.read_text())
    assert 600_000 < found["longest_tokens"] < 680_000
    runs.clear()
    call(monkeypatch, *CARD, "--lengths", "262144,409600", "--json", file)
    assert runs == {409600: ""}, "the one for which there was no time"
    out = capsys.readouterr().out
    assert (
        "Rows of up to 409,600 tokens were measured. 18.0 GiB and 104.0 KiB a token, a line through 4 lengths" in out
    )
    assert len(json.loads(file.read_text())["rows"]) == 4


def test_one_length_says_nothing_of_others(tmp_path, capsys, monkeypatch, runs):
    file = tmp_path / "longest.json"
    call(monkeypatch, *CARD, "--lengths", "65536", "--json", file)
    said = capsys.readouterr().out
    assert "Rows of up to 65,536 tokens were measured. Two lengths or more (without --fast) make a line" in said
    assert "longest_tokens" not in json.loads(file.read_text())


def test_a_length_that_ran_out_of_memory_is_beyond_the_longest_whatever_the_line_says(
    tmp_path, capsys, monkeypatch, runs
):
    file = tmp_path / "longest.json"
    runs[524288] = "out of memory: CUDA out of memory. Tried to allocate 4.00 GiB"
    for _ in range(2):
        call(monkeypatch, *CARD, "--lengths", "65536,131072,262144,524288", "--json", file)
    out = capsys.readouterr().out
    assert "The longest row is 262,144 tokens, with 0 layers' inputs" in out
    assert (
        "What ends it is that 524,288 tokens ran out of memory here, though by the line 134.8 GiB of the card" in out
    )
    runs.clear()
    call(monkeypatch, *CARD, "--lengths", "65536,524288", "--json", file)
    assert not runs, "both are known"


def test_rows_of_other_settings_are_others(tmp_path, capsys, monkeypatch, runs):
    file = tmp_path / "longest.json"
    call(monkeypatch, *CARD, "--lengths", "65536,131072", "--json", file)
    for more in (["--fast"], ["techniques.quantize.enabled=true"]):
        runs.clear()
        call(monkeypatch, *CARD, "--lengths", "65536", "--json", file, *more)
        assert list(runs) == [65536]
    assert "Two lengths or more (without --fast) make a line" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == 4


def test_without_time_nothing_is_run_and_it_says_so(tmp_path, capsys, monkeypatch, runs):
    call(monkeypatch, *CARD, "--lengths", "65536", "--minutes", "0", "--json", tmp_path / "longest.json")
    assert not runs
    out = capsys.readouterr().out
    assert "Not run, the time (0 minutes) was over: 65,536" in out
    assert "No length was measured" in out


@pytest.mark.slow
def test_a_length_is_measured_in_a_process_of_its_own_and_not_again(tmp_path, capsys, monkeypatch):
    file = tmp_path / "longest.json"
    for _ in range(2):
        call(monkeypatch, "--smoke", "--lengths", "128", "--json", file)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["error"] == ""
    assert row["tokens_per_second"] > 0
    assert row["loss"] > 1
    assert capsys.readouterr().out.count(longest.told(longest.Row(**row))) == 2
    monkeypatch.setattr(longest, "settings", lambda *_: ["+recipe=nothing_of_this_name"])
    broken = longest.Row(128, 0, False, 0, 0.0, 0.0)
    longest.measure(broken, ask(smoke=True), 60.0)
    assert broken.error
    assert asdict(broken)["peak_gib"] is None
