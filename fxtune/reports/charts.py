"""Charts as SVG, drawn by pygal, without scripts and web addresses.

draw() makes a chart of metrics for the page about runs, which has the style. A line has at most POINTS points. A
longer line is thinned to the lowest and the highest value of each section. plot() makes a file with a legend, such as
the held-out losses of a sweep. Its points are inside the frame: values that are far apart get a logarithmic scale.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree

WIDTH, HEIGHT = 460, 230
PLOT_WIDTH, PLOT_HEIGHT, LEGEND_ROW_HEIGHT = 800, 460, 18
POINTS = 400
DOTS = 40
"""A line with at most DOTS points has dots."""
LOGARITHMIC = 30
"""The scale is logarithmic if the largest value is at least LOGARITHMIC times the smallest."""


@dataclass(frozen=True)
class Line:
    name: str
    points: Mapping[int, float]
    """The value at each step."""
    color: int
    dashed: bool = False


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


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    lines: Sequence[Line]
    svg: str
    logarithmic: bool
    summary: str
    """The lines in words, for a screen reader."""
    values: list[dict[str, object]] = field(default_factory=list)
    """What the page shows under the pointer: name, color, steps and values of each line, as they are drawn."""


def draw(title: str, unit: str, lines: Sequence[Line], logarithmic: bool = False) -> Chart | None:
    """The chart; None if no line has a point. `logarithmic`: use a logarithmic scale if the values are far apart."""
    import pygal
    from pygal.style import Style

    drawn = [(line, points) for line in lines if (points := thin(line.points))]
    if not drawn:
        return None
    values = [value for _, points in drawn for _, value in points]
    steps = [step for _, points in drawn for step, _ in points]
    # pygal's logarithmic scale would apply to steps, too.
    across, (height, up) = ticks(min(steps), max(steps), 5), _axis(values, 4, logarithmic)
    # The classes of pygal's elements are styled by the page.
    chart = pygal.XY(
        width=WIDTH, height=HEIGHT, margin=4, margin_right=18, css=[], js=[], no_prefix=True, show_legend=False,
        style=Style(label_font_size=11), dots_size=2.5, truncate_label=-1,
        xrange=(min(steps), max(steps)), range=(height(up[0]), height(up[-1])),
        x_labels=[{"value": step, "label": number(step)} for step in across if min(steps) <= step <= max(steps)],
        y_labels=[{"value": height(value), "label": number(value)} for value in up],
    )  # fmt: skip
    for line, points in drawn:
        rows = [(step, height(value)) for step, value in points]
        chart.add(line.name, rows, show_dots=len(points) <= DOTS)
    root = chart.render_tree()
    summary = "; ".join(in_words(line.name, points) for line, points in drawn)
    _finish(root, [line for line, _ in drawn], f"{title}{f' ({unit})' * bool(unit)}. {summary}")
    shown = [
        {
            "name": line.name,
            "color": line.color,
            "steps": [step for step, _ in points],
            "values": [float(f"{value:.6g}") for _, value in points],
        }
        for line, points in drawn
    ]
    svg = ElementTree.tostring(root, encoding="unicode")
    return Chart(title, unit, [line for line, _ in drawn], svg, height is math.log10, summary, shown)


def plot(title: str, series: Sequence[Series], x_title: str, y_title: str, percent: bool = False) -> str:
    """The text of an SVG file. Points that are not finite, and series without a finite point, are left out.

    `percent`: whether x is a share, so that its labels are in per cent.
    """
    import pygal
    from pygal.style import Style

    finite = [(curve, [point for point in curve.points if all(map(math.isfinite, point))]) for curve in series]
    drawn = [(curve, points) for curve, points in finite if points]
    chart = pygal.XY(
        width=PLOT_WIDTH, height=PLOT_HEIGHT + LEGEND_ROW_HEIGHT * len(drawn), js=[],
        title=title, x_title=x_title, y_title=y_title,
        legend_at_bottom=True, legend_at_bottom_columns=1, legend_box_size=10, truncate_legend=-1, truncate_label=-1,
        dots_size=2.5, no_data_text="no value is finite",
        style=Style(
            background="white", plot_background="white", font_family="sans-serif", title_font_size=15,
            colors=_colors([curve for curve, _ in drawn], Style.colors),
        ),
    )  # fmt: skip
    if drawn:
        x_scale, x_labels = _axis([float(x) for _, points in drawn for x, _ in points], 5)
        chart.x_labels = [
            {"value": x_scale(value), "label": f"{value:.0%}" if percent else number(value)} for value in x_labels
        ]
        y_scale, y_labels = _axis([float(y) for _, points in drawn for _, y in points], 5)
        chart.y_labels = [{"value": y_scale(value), "label": number(value)} for value in y_labels]
    for curve, points in drawn:
        stroke = {"width": 3 if curve.thick else 1.2, **({"dasharray": "5, 4"} if curve.continues else {})}
        places = [(x_scale(x), y_scale(y)) for x, y in points]
        chart.add(curve.name, places, stroke=curve.joined and len(places) > 1, stroke_style=stroke)
    root = chart.render_tree()
    _remove(root, "script")  # pygal's script shows tooltips, and loads a file from a web address
    return ElementTree.tostring(root, encoding="unicode")


def _colors(series: Sequence[Series], palette: Sequence[str]) -> tuple[str, ...]:
    places = itertools.accumulate(not curve.continues for curve in series)
    return tuple(palette[(place - 1) % len(palette)] for place in places) or tuple(palette)


def _axis(
    values: Sequence[float], most: int, logarithmic: bool = True
) -> tuple[Callable[[float], float], list[float]]:
    """(function from a value to its place on the axis, about `most` values with a label). `logarithmic`: use a
    logarithmic scale if the values are far apart."""
    low, high = min(values), max(values)
    if logarithmic and low > 0 and high / low >= LOGARITHMIC:
        return math.log10, log_ticks(low, high)
    return float, ticks(low, high, most)


def thin(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """At most POINTS of the finite points, in order. If there are more: the first, the last, and each section's lowest
    and highest."""
    rows = sorted(item for item in points.items() if math.isfinite(item[1]))
    if len(rows) <= POINTS:
        return rows
    size = math.ceil(len(rows) / (POINTS // 2 - 1))
    kept = {rows[0], rows[-1]}
    for start in range(0, len(rows), size):
        stretch = rows[start : start + size]
        kept |= {min(stretch, key=lambda row: row[1]), max(stretch, key=lambda row: row[1])}
    return sorted(kept)


def ticks(low: float, high: float, most: int) -> list[float]:
    """About `most` round numbers that span `low` to `high`."""
    if high <= low:  # a single value gets a little room around it
        room = abs(low) / 10 or 1
        return [low] if isinstance(low, int) else [low - room, low, low + room]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    if isinstance(low, int):
        size = max(1, round(size))
    return [index * size for index in range(math.floor(low / size), math.ceil(high / size) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around `low` to `high`, every second or third if there are many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    size = max(1, math.ceil((last - first) / 5))
    return [10.0**power for power in range(first, last + size, size)]


def number(value: float) -> str:
    """A label of an axis."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.3g}" if size and (size < 1e-3) else f"{value:,.6g}"


def in_words(name: str, points: Sequence[tuple[int, float]]) -> str:
    values = [value for _, value in points]
    return (
        f"{name}: {values[0]:.4g} at step {points[0][0]}, {values[-1]:.4g} at step {points[-1][0]}, "
        f"lowest {min(values):.4g}, highest {max(values):.4g}"
    )


def _finish(root: ElementTree.Element, lines: Sequence[Line], label: str) -> None:
    """Remove styles, scripts and comments, and name colours by class."""
    for child in [child for child in root if not isinstance(child.tag, str)]:
        root.remove(child)
    _remove(root, "defs", "title", "desc")  # a browser would show a title as a tooltip in its own font
    root.attrib.pop("id", None)
    root.set("role", "img")
    root.set("aria-label", label)
    for node in root.iter():
        words = node.get("class", "").split()
        for word in [word for word in words if word.startswith("serie-")]:
            line = lines[int(word.removeprefix("serie-"))]
            others = [name for name in words if not name.startswith("color-")]
            node.set("class", " ".join([*others, f"color-{line.color}", *["dashed"] * line.dashed]))


def _remove(root: ElementTree.Element, *names: str) -> None:
    for parent in root.iter():
        for child in [child for child in parent if str(child.tag).rpartition("}")[2] in names]:
            parent.remove(child)
