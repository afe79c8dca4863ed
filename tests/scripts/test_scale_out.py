"""scripts/study/scale_out.py: tokens/s over cards, measured and calculated."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts" / folder) for folder in ("bench", "study")]
import baselines  # noqa: E402
import scale_out  # noqa: E402
from baselines import Baseline, Measurement  # noqa: E402

from fxtune.distributed.parallel import Degrees  # noqa: E402

LINKS = scale_out.Links(host=8, link=200e9, network=5e9, latency=1e-5)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["scale_out.py", *words])
    scale_out.main()


def test_layers_hide_an_exchange_up_to_their_compute_time():
    exchange = scale_out.Exchange(forward=2.0, backward=4.0, alone=1.0, layers=4)
    first_and_last, alone = 1.5, 1.0
    assert exchange.exposed(compute=3.0, forward_share=1 / 3) == pytest.approx(1 + 2 + first_and_last + alone)
    assert exchange.exposed(compute=100.0, forward_share=1 / 3) == first_and_last + alone
    assert exchange.exposed(compute=0.0, forward_share=1 / 3) == exchange.total


def test_sums_between_hosts_take_the_network_and_messages():
    """The adapters of 8B have 41,943,040 numbers, its weights are 8,030,261,248."""
    _, _, adapters = scale_out.forecast("8b_4x4096", "H200", 1, ("techniques=[lora,fast]",))
    sent = 2 * 63 / 64 * 4 * 41_943_040
    alone = sent / (8 * 5e9) + scale_out.COLLECTIVE + 2 * 3 * 1e-5
    found = scale_out.exchange(replace(adapters, degrees=Degrees(64)), LINKS)
    assert (found.forward, found.backward) == (0, 0)
    assert found.alone == pytest.approx(alone)
    full = scale_out.bench_peers.CASES["8b_full_2x8192"].keys(8)
    _, _, weights = scale_out.forecast("8b_full_2x8192", "H200", 8, full)
    one, eight = (scale_out.exchange(replace(weights, degrees=Degrees(hosts, 8)), LINKS) for hosts in (1, 8))
    assert one.forward == eight.forward
    between = 2 * 7 / 8 * 4 * 8_030_261_248 / 8 / 5e9 + 32 * 2 * 3 * 1e-5
    assert eight.backward - one.backward == pytest.approx(between, rel=1e-3)


def test_a_measured_number_of_cards_replaces_the_calculated_one(cwd, monkeypatch, capsys):
    baselines.write("h200_four_cards", baselines.read("h200_four_cards"), cwd)
    row = Measurement("8b_4x4096", shape="8b", rows=4, length=4096, tokens_per_second=135_000, cards=8)
    baselines.write("h200_eight_cards", Baseline("a command", "H200", "2030-01-01", [row], cards=8), cwd)
    monkeypatch.setattr(baselines, "FOLDER", cwd)
    run(monkeypatch, "--cases", "8b_4x4096", "--json", "points.json", "--plot", "plot.svg")
    points = {point["cards"]: point for point in json.loads(Path("points.json").read_text())}
    assert points[8]["measured"] == 135_000
    assert points[64]["measured"] is None
    assert points[64]["nothing"] < points[64]["linear"]
    measured, projected = capsys.readouterr().out.split("\n\n")
    assert "| 8 H200 | 135,000 |" in measured
    assert "| 8 | | 135,000, measured | 0.96 |" in projected
    assert Path("plot.svg").read_text().startswith("<svg")


def test_the_calculation_is_near_what_was_measured_and_the_page_has_todays_tables(cwd, monkeypatch, capsys):
    run(monkeypatch, "--json", "points.json")
    page = (ROOT / "docs" / "distributed.md").read_text()
    for table in capsys.readouterr().out.split("\n\n"):
        assert table.strip() in page, "python scripts/study/scale_out.py --plot docs/scaling.svg"
    points = [point for point in json.loads(Path("points.json").read_text()) if point["measured"]]
    errors = [point["nothing"] / point["measured"] - 1 for point in points]
    assert len(errors) >= 15
    assert max(map(abs, errors)) <= 0.05
    assert all(math.isfinite(point["all"]) and point["all"] >= point["nothing"] * 0.999 for point in points)
