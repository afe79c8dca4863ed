"""Energy and cost of a run: added up over resumes and ranks, and absent where nothing can be read."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from support.runs import history

from fxtune.checkpoint.run_folder import claim
from fxtune.distributed.world import World
from fxtune.system.machine import energy
from fxtune.tracking.tracker import CostConfig
from fxtune.training import trainer as train
from fxtune.training.monitors.energy import RunEnergy, Used, sentence
from fxtune.training.monitors.rank_report import RankReport


@pytest.fixture
def counter(tmp_path, monkeypatch) -> Path:
    """A processor whose counter goes up by 1 J whenever it is read."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0")
    (zone / "max_energy_range_uj").write_text("1000000000000")
    file = zone / "energy_uj"
    file.write_text("0")
    monkeypatch.setattr(energy, "RAPL", tmp_path / "powercap")
    monkeypatch.setattr(energy, "INTERVAL", 1e6)
    read = Path.read_text

    def counting(self, *arguments, **keywords):
        text = read(self, *arguments, **keywords)
        if self == file:
            self.write_text(str(int(text) + 1_000_000))
        return text

    monkeypatch.setattr(Path, "read_text", counting)
    return file


def test_paused_and_resumed_run_adds_up(narrow, cwd, counter, said):
    narrow.run.dir, narrow.train.pause_after = "run", 3
    narrow.tracking.cost = CostConfig(card_hour=3600.0, kwh=3.6e6)  # one a second, and one a joule
    train.run(narrow)
    before = json.loads(Path("run/energy.json").read_text())["used"]
    assert before["cpu_joules"] > 3
    assert before["gpu_joules"] is None
    narrow.train.pause_after = None
    result = train.run(narrow)
    used = Used.read(Path("run"))
    assert used.cpu_joules > before["cpu_joules"] + 3
    assert used.card_seconds > before["card_seconds"]
    assert result == json.loads(Path("run/result.json").read_text())
    joules = result["energy/cpu_joules"]
    tokens = result["train/tokens"]
    assert result["energy/kwh"] == pytest.approx(joules / 3.6e6)
    assert result["energy/joules_per_token"] == pytest.approx(joules / tokens)
    assert result["cost/total"] == pytest.approx(joules + used.card_seconds)
    assert "energy/gpu_joules" not in result
    logged = [line["energy/kwh"] for line in history(Path("run")) if "energy/kwh" in line]
    assert len(logged) == 6
    assert sorted(logged) == logged
    assert any(line.startswith("Energy: ") and "J a token" in line and "cost" in line for line in said)


def test_without_anything_to_read_there_is_no_figure(narrow, cwd, monkeypatch, said):
    monkeypatch.setattr(energy, "RAPL", Path("missing"))
    narrow.run.dir, narrow.train.max_steps = "run", 1
    result = train.run(narrow)
    assert not [name for name in result if name.startswith(("energy/", "cost/"))]
    assert not [line for line in said if "nergy" in line]


def test_ranks_and_cards_are_added_up():
    one = Used(10.0, 3000.0, 50.0, 10.0, 8.0)
    both = one.plus(Used(10.0, 5000.0, None, 10.0, 10.0))
    assert both == Used(20.0, 8000.0, 50.0, 20.0, 18.0)
    figures = both.figures(1000, CostConfig(card_hour=2.0))
    assert figures["energy/gpu_watts"] == 400.0
    assert figures["energy/gpu_utilization"] == 0.9
    assert figures["energy/joules_per_token"] == 8.05
    assert figures["cost/total"] == pytest.approx(2.0 * 20 / 3600)
    assert sentence(figures).startswith("Energy: 0.00224 kWh (400 W a card, 90% of the time in use, CPU 1.39e-05 kWh)")


@pytest.mark.parametrize("text", ["", "{}", '{"used": {"card_seconds": -1}}', "[1]"])
def test_damaged_file_counts_as_nothing_used(tmp_path, text):
    (tmp_path / "energy.json").write_text(text)
    assert Used.read(tmp_path) == Used()


def test_ranks_exchange_what_they_used_and_rank_0_reports_all(tmp_path, counter):
    """A second rank on another host. Its card used 500 J in 10 s, and its utilisation is not known."""
    other = [10.0, 500.0, math.nan, 10.0, math.nan]

    class TwoRanks(World):
        def exchange(self, numbers, doing=""):
            return [numbers, [*numbers[: -len(other)], *other]]

    world = TwoRanks(torch.device("cpu"), 0, 2)
    folder = claim("run", str(tmp_path / "run"), "auto", {})
    report = RankReport(world)
    report.energy = RunEnergy(folder, world, CostConfig(card_hour=3600.0))
    try:
        assert report.agree(3) == 3
        assert len(report.figures()) > 0
        used = report.energy.used()
        assert (used.gpu_joules, used.gpu_seconds) == (500.0, 10.0)
        assert used.card_seconds > 10.0
        assert used.cpu_joules > 0
        figures = report.energy.end(100)
        assert figures["energy/gpu_watts"] == figures["energy/gpu_watts_rank_1"] == 50.0
        assert figures["cost/total"] == pytest.approx(Used.read(folder.path).card_seconds)
    finally:
        report.energy.close()
        folder.release()


def test_a_run_that_ended_is_not_written_to_again(tmp_path, counter):
    """A kill during that write would leave a half-written file in a run that nothing opens again."""
    folder = claim("run", str(tmp_path / "run"), "auto", {})
    meter = RunEnergy(folder, World(torch.device("cpu")), CostConfig())
    meter.end(100)
    used = Used.read(folder.path)
    meter.close()
    folder.release()
    assert Used.read(folder.path) == used
