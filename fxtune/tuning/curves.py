"""Draws the held-out losses of a sweep's runs as an SVG file. No plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
CLIP = 4.0
"""Losses farther above the lowest one than this many times the median are cut off at the top."""


@dataclass(frozen=True)
class Curve:
    title: str
    points: Sequence[tuple[float, float]]
    """(share of the run, loss)."""
    best: bool = False


def svg(curves: Sequence[Curve], title: str) -> str:
    """The plot as the text of an SVG file: share of the run to the right, loss upwards. The best one is thick."""
    drawn = [curve for curve in curves if any(math.isfinite(loss) for _, loss in curve.points)]
    losses = sorted(loss for curve in drawn for _, loss in curve.points if math.isfinite(loss)) or [0.0, 1.0]
    low = losses[0]
    high = min(losses[-1], low + CLIP * max(losses[len(losses) // 2] - low, 1e-9))
    span = (high - low) or 1.0

    def at(share: float, loss: float) -> tuple[float, float]:
        x = LEFT + share * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (min(loss, high) - low) / span * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in range(5):
        loss = low + span * tick / 4
        x, y = at(tick / 4, loss)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.4g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick / 4:.0%}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">share of the run</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})">held-out loss</text>')
    for number, curve in enumerate(drawn):
        color = COLORS[number % len(COLORS)]
        where = [at(share, loss) for share, loss in curve.points if math.isfinite(loss)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        width = 3 if curve.best else 1.2
        name = f"<title>{escape(curve.title)}</title>"
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="{width}">{name}</polyline>'
        )
        x, y = where[-1]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{width + 1}" fill="{color}">{name}</circle>')
    return "\n".join([*parts, "</svg>", ""])
