"""scripts/bench/longest.py: forecasts without a GPU, the fitted line, and the limit of the longest row."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from argparse import Namespace
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


def arguments(card: float = 139.0, host: float = 128.0, **more) -> Namespace:
    return Namespace(**{"words": [], "smoke": False, "fast": False, "card": card, "host": host, **more})


def run_script(monkeypatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", ["longest.py", *map(str, words)])
    longest.main()


def forecast(length: int, **options):
    args = arguments(**options)
    return longest.forecast_row(length, args, longest.hardware_facts(args))


def test_forecast_fits_500k_tokens_on_an_h200_and_host_memory_limits_offload():
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


def test_fast_fills_gpu_memory_and_extra_keys_apply():
    row, facts = forecast(409600, fast=True)
    assert 120 < row.forecast_gib < 139
    assert facts.techniques.checkpointing.policy == "mix"
    base, _ = forecast(65536)
    small, _ = forecast(65536, words=["techniques.quantize.enabled=true"])
    assert base.forecast_gib - small.forecast_gib > 9


@settings(max_examples=30)
@given(
    st.floats(1, 40),
    st.integers(10_000, 400_000),
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 9)), min_size=2, max_size=5, unique_by=lambda pair: pair[0]
    ),
)
def test_fit_line_recovers_constant_and_slope(constant, bytes_per_token, points):
    _, facts = FORECAST
    hidden = 2 * 4096
    rows = []
    for thousands, staying in points:
        size = constant * GIB + thousands * 1000 * (bytes_per_token + staying * hidden)
        rows.append(longest.Row(thousands * 1000, 31 - staying, False, staying, 0.0, 0.0, peak_gib=size / GIB))
    line = longest.fit_line(rows, facts)
    assert line.measured
    assert line.bytes_per_token == pytest.approx(bytes_per_token, rel=1e-3)
    assert line.constant == pytest.approx(constant * GIB, rel=1e-2, abs=2e6)
    assert (line.points, line.max_deviation) == (len(points), pytest.approx(0, abs=1e-6))


FORECAST = forecast(65536)


def test_longest_row_fits_within_gpu_and_host_memory():
    _, facts = FORECAST
    line = longest.Line(18 * GIB, 100 * 1024, True)
    tokens, staying, why = longest.longest(line, facts)
    room = 0.97 * 139 * GIB
    assert line.device_bytes(tokens, staying, 8192) <= room
    assert staying > 0
    assert "host memory" in why
    assert "int32" in why
    more = longest.Line(18 * GIB, 200 * 1024, True)
    assert longest.longest(more, facts)[0] < tokens
    # All inputs fit into host memory, so only GPU memory limits the length.
    short, none, why = longest.longest(longest.Line(18 * GIB, 1024 * 1024, True), facts)
    assert none == 0
    assert short == (room - 18 * GIB) // (1024 * 1024) // 1024 * 1024
    assert "host" not in why


@pytest.fixture
def runs(monkeypatch) -> dict[int, str]:
    """The lengths that run, each with its error. A length without an error takes 18 GiB plus 104 KiB per token."""
    found: dict[int, str] = {}

    def measure(row, args, limit):
        assert limit > 0
        row.error = found.setdefault(row.length, "")
        if not row.error:
            row.peak_gib = 18 + row.length * (104 * 1024 + row.staying * 8192) / GIB
            row.reserved_gib, row.step_seconds, row.tokens_per_second = 1 + row.peak_gib, 2.0, 3.0

    monkeypatch.setattr(longest, "measure", measure)
    return found


CARD = ("--card", 139, "--host", 128)


def test_fit_skips_a_failed_length_and_the_next_call_runs_it_again(tmp_path, capsys, monkeypatch, runs):
    file = tmp_path / "longest.json"
    runs[409600] = "not finished after 500 s"
    run_script(monkeypatch, *CARD, "--lengths", "65536,131072,262144,409600", "--json", file)
    out = capsys.readouterr().out
    assert "| 409,600 | 31 | 60.1 | not finished after 500 s | | | | |" in out
    assert "Rows of up to 262,144 tokens were measured. Memory is 18.0 GiB plus 104.0 KiB per token, " in out
    assert "fitted to 3 lengths (measured) with a deviation of at most 0.0%" in out
    assert "The limit is 134.8 GiB of GPU memory and 102.4 GiB of host memory" in out
    longest_row = int(re.search(r"The longest row is ([\d,]+) tokens", out)[1].replace(",", ""))
    assert 600_000 < longest_row < 680_000
    runs.clear()
    run_script(monkeypatch, *CARD, "--lengths", "262144,409600", "--json", file)
    assert runs == {409600: ""}, "only the length that the time limit had stopped runs again"
    out = capsys.readouterr().out
    assert "Rows of up to 409,600 tokens were measured. Memory is 18.0 GiB plus 104.0 KiB per token" in out
    assert "fitted to 4 lengths" in out
    assert len(json.loads(file.read_text())) == 4


def test_length_that_ran_out_of_memory_caps_the_longest_row(tmp_path, capsys, monkeypatch, runs):
    file = tmp_path / "longest.json"
    runs[524288] = longest.OUT_OF_MEMORY
    for _ in range(2):
        run_script(monkeypatch, *CARD, "--lengths", "65536,131072,262144,524288", "--json", file)
    out = capsys.readouterr().out
    assert "The longest row is 262,144 tokens, with the inputs of 0 layers" in out
    assert "The limit is that 524,288 tokens ran out of memory, although the line gives " in out
    assert " tokens for 134.8 GiB of GPU memory" in out
    runs.clear()
    run_script(monkeypatch, *CARD, "--lengths", "65536,524288", "--json", file)
    assert not runs, "the file holds both lengths"


def test_rows_with_other_settings_are_separate(tmp_path, capsys, monkeypatch, runs):
    file = tmp_path / "longest.json"
    run_script(monkeypatch, *CARD, "--lengths", "65536,131072", "--json", file)
    for more in (["--fast"], ["techniques.quantize.enabled=true"]):
        runs.clear()
        run_script(monkeypatch, *CARD, "--lengths", "65536", "--json", file, *more)
        assert list(runs) == [65536]
    assert "The longest row that fits needs two lengths or more (without --fast)" in capsys.readouterr().out
    assert len(json.loads(file.read_text())) == 4


def test_zero_minutes_runs_nothing_and_lists_the_lengths(tmp_path, capsys, monkeypatch, runs):
    run_script(monkeypatch, *CARD, "--lengths", "65536", "--minutes", "0", "--json", tmp_path / "longest.json")
    assert not runs
    out = capsys.readouterr().out
    assert "Not run, the time limit (0 minutes) was reached: 65,536" in out
    assert "No length was measured" in out


def test_length_is_measured_once_in_its_own_process(tmp_path, capsys, monkeypatch):
    file = tmp_path / "longest.json"
    for _ in range(2):
        run_script(monkeypatch, "--smoke", "--lengths", "128", "--json", file)
    (row,) = json.loads(file.read_text())
    assert row["error"] == ""
    assert row["tokens_per_second"] > 0
    assert capsys.readouterr().out.count(longest.table_row(longest.Row(**row))) == 2
    monkeypatch.setattr(longest, "settings", lambda *_: ["+recipe=nothing_of_this_name"])
    broken = longest.Row(128, 0, False, 0, 0.0, 0.0)
    longest.measure(broken, arguments(smoke=True), 60.0)
    assert broken.error
    assert broken.peak_gib is None
