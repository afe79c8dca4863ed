"""The tables of measured figures are made from benchmarks/baselines, whose files have one schema."""

from __future__ import annotations

import sys

import pytest
from support.documents import ROOT

FOLDERS = [str(ROOT / "scripts" / "make"), str(ROOT / "scripts" / "bench")]
sys.path[:0] = FOLDERS
import baseline_tables  # noqa: E402
import baselines  # noqa: E402

for folder in FOLDERS:
    sys.path.remove(folder)
NAMES = sorted(path.stem for path in baselines.FOLDER.glob("*.json"))


@pytest.mark.parametrize("page", baseline_tables.PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_files(page):
    text = page.read_text()
    assert baseline_tables.updated(text) == text, "run python scripts/make/baseline_tables.py"


def test_every_table_is_in_a_page():
    shown = [place[2] for page in baseline_tables.PAGES for place in baseline_tables.PLACE.finditer(page.read_text())]
    assert sorted(shown) == sorted(baseline_tables.TABLES)


def test_a_wrong_figure_is_replaced():
    text = "Before\n<!-- baseline peers 2026-11-29 -->\n| 17,533 |\n<!-- end -->\nafter\n"
    new = baseline_tables.updated(text)
    assert "17,532" in new
    assert "17,533" not in new
    assert new.startswith("Before\n")
    assert new.endswith("<!-- end -->\nafter\n")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_the_schema_and_no_empty_field(name, tmp_path):
    """What is written again is the file itself: no key is unknown, and a figure that was not measured is absent."""
    written = baselines.write(name, baselines.read(name), tmp_path)
    assert written.read_text() == (baselines.FOLDER / f"{name}.json").read_text()


def test_a_script_writes_card_date_command_and_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "bench" / "bench_peers.py"), "--set", "a=[b, c]"])
    baselines.save("mine", [baselines.Measurement("8b_4x4096", tokens_per_second=1000.0)], cards=2)
    found = baselines.read("mine", tmp_path)
    assert found.command == "python scripts/bench/bench_peers.py --set 'a=[b, c]'"
    assert (found.cards, found.measurements[0].tokens_per_second) == (2, 1000.0)
    assert found.card
    assert len(found.date) == 10
    assert {"torch", "transformers"} <= found.versions.keys()
