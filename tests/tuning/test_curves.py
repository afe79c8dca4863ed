"""The plot of a sweep's curves."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from fxtune.tuning.curves import HEIGHT, WIDTH, Curve, svg

NAME = "{http://www.w3.org/2000/svg}"


def test_each_curve_is_drawn_inside_the_frame_and_named():
    curves = [
        Curve("lr=1 & <r=8>", [(0.25, 2.0), (0.5, 1.5), (1.0, 1.0)], best=True),
        Curve("diverges", [(0.25, 2.0), (0.5, 1e9)]),
        Curve("never finite", [(0.25, math.nan)]),
        Curve("one point", [(0.25, 3.0)]),
    ]
    root = ElementTree.fromstring(svg(curves, "losses <1>"))
    lines = root.findall(f"{NAME}polyline")
    assert [line.find(f"{NAME}title").text for line in lines] == ["lr=1 & <r=8>", "diverges", "one point"]
    assert [line.get("stroke-width") for line in lines] == ["3", "1.2", "1.2"]
    points = [[tuple(map(float, point.split(","))) for point in line.get("points").split()] for line in lines]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for line in points for x, y in line)
    heights = [y for _, y in points[0]]
    assert heights == sorted(heights), "a falling loss goes down, and y counts from the top"


def test_plot_without_losses_has_its_frame_and_title_and_no_curve():
    for curves in ([], [Curve("never finite", [(0.5, math.nan)])]):
        root = ElementTree.fromstring(svg(curves, "nothing"))
        assert "nothing" in [text.text for text in root.findall(f"{NAME}text")]
        assert len(root.findall(f"{NAME}line")) == 5
        assert not root.findall(f"{NAME}polyline") + root.findall(f"{NAME}circle")


def test_equal_losses_are_a_level_line_inside_the_frame():
    root = ElementTree.fromstring(svg([Curve("flat", [(0.5, 3.0), (1.0, 3.0)])], "flat"))
    (line,) = root.findall(f"{NAME}polyline")
    (left, height), (right, other) = (map(float, point.split(",")) for point in line.get("points").split())
    assert left < right <= WIDTH
    assert 0 < height == other < HEIGHT
    assert "3" in [text.text for text in root.findall(f"{NAME}text")], "the scale starts at the loss"
