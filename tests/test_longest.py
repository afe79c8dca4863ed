"""scripts/longest.py: forecasts without a card, a line through what was measured, and what ends the longest row."""

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

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "longest.py"
spec = importlib.util.spec_from_file_location("longest", SCRIPT)
longest = importlib.util.module_from_spec(spec)
sys.modules["longest"] = longest
spec.loader.exec_module(longest)
GIB = 1 << 30


def ask(card: float = 139.0, host: float = 128.0, **more) -> Namespace:
    return Namespace(**{"words": [], "smoke": False, "fast": False, "card": card, "host": host, "steps": 1, **more})


def forecast(length: int, **options):
    args = ask(**options)
    return longest.expected(length, args, longest.ground(args))


def test_half_a_million_tokens_fit_an_h200_by_the_forecast_and_the_host_decides_who_sends():
    row, facts = forecast(65536)
    assert (row.senders, row.staying) == (31, 0)
    assert facts.techniques["lora"]["fused"].value == "on"
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
    assert facts.techniques["checkpointing"]["policy"].value == "mix"
    base, _ = forecast(65536)
    small, _ = forecast(65536, words=["techniques.quantize.enabled=true"])
    assert base.forecast_gib - small.forecast_gib > 9


@settings(max_examples=30, deadline=None)
@given(st.floats(1, 40), st.integers(10_000, 400_000), st.lists(st.tuples(st.integers(1, 500), st.integers(0, 9)), min_size=2,
                                                                max_size=5, unique_by=lambda pair: pair[0]))
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


@pytest.mark.slow
def test_a_length_is_measured_in_a_process_of_its_own_and_not_again(tmp_path, capsys, monkeypatch):
    file = tmp_path / "longest.json"
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["longest.py", "--smoke", "--lengths", "128", "--json", str(file)])
        longest.main()
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
