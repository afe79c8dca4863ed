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
    shown = [place[1] for page in baseline_tables.PAGES for place in baseline_tables.PLACE.finditer(page.read_text())]
    assert sorted(shown) == sorted(baseline_tables.TABLES)


def test_a_wrong_figure_is_replaced():
    text = "Before\n<!-- baseline peers 2026-11-29 -->\n| 17,533 |\n<!-- end -->\nafter\n"
    new = baseline_tables.updated(text)
    assert "17,532" in new
    assert "17,533" not in new
    assert new.startswith("Before\n")
    assert new.endswith("<!-- end -->\nafter\n")


def test_rows_that_are_old_on_the_day_of_the_table_have_their_date(tmp_path, monkeypatch):
    """A row without a date, a card or versions has the date, the card or the versions of its file."""
    rows = [baselines.Measurement("8b_4x4096", tool, tokens_per_second=1000.0) for tool in ("fxtune", "trl")]
    rows.append(baselines.Measurement("1b_8x4096", tokens_per_second=2.0, date="2027-01-30", card="H100"))
    rows.append(baselines.Measurement("moe_4x4096", shape="moe_heads_64", tokens_per_second=2.0))
    monkeypatch.setattr(baselines, "FOLDER", tmp_path)
    baselines.write("h200_peers", baselines.Baseline("a command", "H200", "2026-12-01", rows, versions={"torch": "2"}))
    read = baselines.read("h200_peers").measurements
    assert [(row.date, row.card) for row in read[1:3]] == [("2026-12-01", "H200"), ("2027-01-30", "H100")]
    assert read[2].versions == {"torch": "2"}
    page = "<!-- baseline peers 2027-01-30 -->\n<!-- end -->\n"
    new, newest = (baseline_tables.updated(page, day) for day in (None, "2027-02-01"))
    assert "measured" not in new
    assert "| fxtune, heads of 64 |" in new
    assert "<!-- baseline peers 2027-02-01 -->" in newest
    tools = [line.split("|")[2].strip() for line in newest.splitlines()[3:-1]]
    old = "measured on 2026-12-01"
    assert tools == [f"fxtune, {old}", f"TRL, {old}", "fxtune", f"fxtune, heads of 64, {old}"]
    assert baseline_tables.updated(newest) == newest, "a page keeps its day"
    assert baseline_tables.updated(newest, "2027-02-02") == newest


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
