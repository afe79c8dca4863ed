"""Charts of metrics on a page, and charts that stand alone as SVG files."""

import math
import re
from xml.etree import ElementTree

import pytest

from fxtune.reports.charts import POINTS, Line, Series, draw, log_ticks, number, plot, thin, ticks

SVG = "{http://www.w3.org/2000/svg}"
CURVES = [
    Series("lr=1 & <r=8>", [(0.25, 2.0), (0.5, 1.5), (1.0, 1.0)], thick=True),
    Series("diverges", [(0.25, 2.0), (0.5, 1e6)]),
    Series("never finite", [(0.25, math.nan)]),
    Series("one point", [(0.25, 3.0)]),
]


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


def drawn(series, **options):
    root = ElementTree.fromstring(plot("losses <1>", series, "share", "loss", **options))
    words = [text.strip() for text in root.itertext() if text.strip()]
    return root, words


def dots(root):
    """For each series, the (x, y) of its dots."""
    groups = [group for group in root.iter(f"{SVG}g") if "series" in group.get("class", "").split()]
    return [
        [(float(dot.get("cx")), float(dot.get("cy"))) for dot in group.iter(f"{SVG}circle")]
        for group in groups
        if any(True for _ in group.iter(f"{SVG}circle"))
    ]


def test_each_curve_is_named_in_the_legend_and_no_point_is_cut_off():
    root, words = drawn(CURVES, percent=True)
    assert {"losses <1>", "lr=1 & <r=8>", "diverges", "one point", "share", "loss", "100%"} <= set(words)
    assert "never finite" not in words
    curves = dots(root)
    assert [len(curve) for curve in curves] == [3, 2, 1]
    heights = [y for curve in curves for _, y in curve]
    assert len(set(heights)) == 5, "2.0 is drawn twice; no other number has the height of 1e6"
    falling = [y for _, y in curves[0]]
    assert falling == sorted(falling), "a falling loss goes down, and y counts from the top"
    assert min(heights) == curves[1][1][1]


def test_values_far_apart_get_a_logarithmic_scale():
    root, words = drawn([Series("rates", [(1e-6, 1.0), (1e-4, 10.0), (1e-2, 100.0)])])
    ((first, second, third),) = dots(root)
    assert abs((third[0] - second[0]) - (second[0] - first[0])) < 0.1
    assert abs((third[1] - second[1]) - (second[1] - first[1])) < 0.1
    assert {"1e-06", "1e-02", "0.01", "100"} & set(words)


def test_without_a_finite_value_the_plot_says_so():
    for series in ([], [Series("never finite", [(0.5, math.nan)])]):
        _, words = drawn(series)
        assert "no value is finite" in words


def test_the_file_reaches_no_other_place():
    text = plot("losses", CURVES, "share", "loss")
    assert "<script" not in text
    assert "href" not in text


def test_a_series_that_continues_another_is_dashed_and_has_its_colour():
    rises, goes_on, other = [(1.0, 1.0), (2.0, 2.0)], [(2.0, 2.0), (3.0, 3.0)], [(1.0, 3.0), (3.0, 1.0)]
    curves = [Series("measured", rises), Series("calculated", goes_on, continues=True), Series("other", other)]
    text = plot("speed", curves, "cards", "tokens/s")
    dashed = re.findall(r"\.serie-(\d)\{[^}]*stroke-dasharray", text)
    colours = dict(re.findall(r"\.color-(\d)[^{]*\{stroke:(#?\w+)", text))
    assert dashed == ["1"]
    assert colours["0"] == colours["1"] != colours["2"]
