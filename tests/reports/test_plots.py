"""Charts that stand alone as SVG files."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from fxtune.reports.plots import Series, plot

SVG = "{http://www.w3.org/2000/svg}"
CURVES = [
    Series("lr=1 & <r=8>", [(0.25, 2.0), (0.5, 1.5), (1.0, 1.0)], thick=True),
    Series("diverges", [(0.25, 2.0), (0.5, 1e6)]),
    Series("never finite", [(0.25, math.nan)]),
    Series("one point", [(0.25, 3.0)]),
]


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
    assert len(set(heights)) == 5, "2.0 is drawn twice; 1e6 is drawn at a height of its own"
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
