"""Charts of metrics."""

import math
from xml.etree import ElementTree

import pytest

from fxtune.reports.charts import POINTS, Line, draw, log_ticks, number, thin, ticks


def test_a_chart_is_svg_with_a_path_for_each_line():
    chart = draw(
        "Loss", "", [Line("a", {1: 2.0, 2: 1.0}, 3), Line("none", {}, 4), Line("b", {2: 5.0}, 5, dashed=True)]
    )
    root = ElementTree.fromstring(chart.svg)
    names = [node.get("class") for node in root.iter() if "series" in node.get("class", "").split()]
    assert sorted(set(names)) == ["series serie-0 color-3", "series serie-1 color-5 dashed"]
    assert [line["values"] for line in chart.values] == [[2.0, 1.0], [5.0]]
    assert root.get("aria-label") == (
        "Loss. a: 2 at step 1, 1 at step 2, lowest 1, highest 2; b: 5 at step 2, 5 at step 2, lowest 5, highest 5"
    )
    for word in ("<style", "<script", "<!--", "http://", "http:"):
        assert word not in chart.svg.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_no_chart_without_a_point():
    assert draw("Loss", "", [Line("a", {}, 0)]) is None
    assert draw("Loss", "", [Line("a", {1: math.nan}, 0)]) is None


def test_a_wide_range_has_a_logarithmic_scale():
    points = {1: 10.0, 2: 0.01}
    assert draw("Loss", "", [Line("a", points, 0)], logarithmic=True).logarithmic
    assert not draw("Loss", "", [Line("a", points, 0)]).logarithmic
    assert not draw("Loss", "", [Line("a", {**points, 3: 0.0}, 0)], logarithmic=True).logarithmic


def test_a_long_line_keeps_its_ends_and_its_extremes():
    curve = {step: float(step % 100) for step in range(10_000)} | {5_000: 1e6, 6_000: -1e6}
    kept = thin(curve)
    assert len(kept) <= POINTS
    assert kept == sorted(kept)
    assert {(0, 0.0), (9_999, 99.0), (5_000, 1e6), (6_000, -1e6)} <= set(kept)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.5, 1]),
        (0.81, 0.83, [0.81, 0.815, 0.82, 0.825, 0.83]),
        (1, 79, [0, 20, 40, 60, 80]),
        (1, 3, [1, 2, 3]),
        (5, 5, [5]),
        (2.0, 2.0, [1.8, 2.0, 2.2]),
        (0.0, 0.0, [-1, 0, 1]),
    ],
)
def test_ticks_are_round_and_span_the_values(low, high, expected):
    assert ticks(low, high, 4) == pytest.approx(expected)


def test_logarithmic_ticks_are_powers_of_ten():
    assert log_ticks(0.02, 30) == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert len(log_ticks(1e-12, 1e12)) <= 7


def test_labels():
    assert [number(value) for value in (0.0, 1e-5, 0.001, 2500.0, 12_000.0, 3e6)] == [
        "0", "1e-05", "0.001", "2,500", "12k", "3M"
    ]  # fmt: skip
