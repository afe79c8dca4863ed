"""Draws one chart as an SVG file, such as the held-out losses of a sweep or the curve of a range test.

pygal draws the chart with a legend. The file has no scripts and loads nothing from the web. All points are inside the
frame: values that are far apart get a logarithmic scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from fxtune.reports.charts import LOGARITHMIC, log_ticks, number, ticks

WIDTH, HEIGHT = 800, 460
LEGEND_ROW_HEIGHT = 18


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]
    """(x, y) of each point."""
    thick: bool = False
    joined: bool = True
    """Whether a line joins the points; without it they are dots."""
    continues: bool = False
    """Whether the series continues the series before it. Then it is dashed and has the same colour."""


def plot(title: str, series: Sequence[Series], x_title: str, y_title: str, percent: bool = False) -> str:
    """The text of an SVG file. Points that are not finite, and series without a finite point, are left out.

    `percent`: whether x is a share, so that its labels are in per cent.
    """
    import pygal
    from pygal.style import Style

    finite = [(curve, [point for point in curve.points if all(map(math.isfinite, point))]) for curve in series]
    drawn = [(curve, points) for curve, points in finite if points]
    chart = pygal.XY(
        width=WIDTH, height=HEIGHT + LEGEND_ROW_HEIGHT * len(drawn), js=[],
        title=title, x_title=x_title, y_title=y_title,
        legend_at_bottom=True, legend_at_bottom_columns=1, legend_box_size=10, truncate_legend=-1, truncate_label=-1,
        dots_size=2.5, no_data_text="no value is finite",
        style=Style(
            background="white", plot_background="white", font_family="sans-serif", title_font_size=15,
            colors=_colors([curve for curve, _ in drawn], Style.colors),
        ),
    )  # fmt: skip
    if drawn:
        x_scale, x_labels = _axis([x for _, points in drawn for x, _ in points])
        chart.x_labels = [
            {"value": x_scale(value), "label": f"{value:.0%}" if percent else number(value)} for value in x_labels
        ]
        y_scale, y_labels = _axis([y for _, points in drawn for _, y in points])
        chart.y_labels = [{"value": y_scale(value), "label": number(value)} for value in y_labels]
    for curve, points in drawn:
        stroke = {"width": 3 if curve.thick else 1.2, **({"dasharray": "5, 4"} if curve.continues else {})}
        places = [(x_scale(x), y_scale(y)) for x, y in points]
        chart.add(curve.name, places, stroke=curve.joined and len(places) > 1, stroke_style=stroke)
    root = chart.render_tree()
    for parent in root.iter():  # pygal's script shows tooltips, and loads a file from a web address
        for child in [child for child in parent if str(child.tag).endswith("script")]:
            parent.remove(child)
    return ElementTree.tostring(root, encoding="unicode")


def _colors(series: Sequence[Series], palette: Sequence[str]) -> tuple[str, ...]:
    """The colour of each series."""
    places = itertools.accumulate(not curve.continues for curve in series)
    return tuple(palette[(place - 1) % len(palette)] for place in places) or tuple(palette)


def _axis(values: Sequence[float]) -> tuple[Callable[[float], float], list[float]]:
    """(function from a value to its place on the axis, values with a label)."""
    low, high = min(values), max(values)
    if low > 0 and high / low >= LOGARITHMIC:
        return math.log10, log_ticks(low, high)
    return float, ticks(float(low), float(high), 5)
