"""Lines over sizes as SVG, both axes logarithmic."""

from __future__ import annotations

import html
import math

from xvcomm.cli.certify.contract import Plot
from xvcomm.cli.doctor import size_text

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 430, 250, 52, 30, 34
_COLOURS = ("#1f6fb2", "#d1622b", "#3a8f4d", "#8a5ab5", "#6b6b6b")


def chart(plot: Plot) -> str:
    """The plot as an SVG element; empty if it has no line."""
    points = [point for line in plot.lines.values() for point in line if point[0] > 0 and point[1] > 0]
    if not points:
        return ""
    xs, ys = [math.log2(x) for x, _ in points], [math.log10(y) for _, y in points]
    left, right = min(xs), max(max(xs), min(xs) + 1)
    low, high = math.floor(min(ys)), max(math.ceil(max(ys)), math.floor(min(ys)) + 1)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - left) / (right - left)
        up = (math.log10(y) - low) / (high - low)
        return _LEFT + across * (_WIDTH - _LEFT - 14), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<text x="8" y="14" class="title">{html.escape(plot.title)}</text>']
    for exponent in range(low, high + 1):
        x, y = at(2**left, 10.0**exponent)
        parts.append(f'<line x1="{x:.0f}" y1="{y:.1f}" x2="{_WIDTH - 14}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" class="left">{10.0**exponent:g}</text>')
    for size in sorted({point[0] for point in points}):
        x, y = at(size, 10.0**low)
        parts.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" class="below">{size_text(size)}</text>')
    for number, (name, line) in enumerate(plot.lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [at(*point) for point in line if point[0] > 0 and point[1] > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        parts.append(f'<text x="{_LEFT + 64 * number}" y="28" fill="{colour}">{html.escape(name)}</text>')
    parts.append(f'<text x="{_WIDTH - 14}" y="28" class="left">{html.escape(plot.unit)}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(parts)}</svg>'
    )
