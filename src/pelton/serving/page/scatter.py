"""A scatter plot as an SVG file of its own: named points, axes with round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 760, 440, 70, 50, 16
_COLOURS = ("#1b6ca8", "#c1440e", "#2e8b57", "#8e44ad", "#b8860b", "#444444")


def scatter(
    points: Sequence[tuple[float, float, str, str]], *, x: str, y: str, line: tuple[float, str] | None = None
) -> str:
    """``points``: (x, y, name, group), a colour for each group. ``line``: a height to mark, and its name."""
    ys = [point[1] for point in points] + ([line[0]] if line else [])
    x_ticks, y_ticks = ticks([point[0] for point in points]), ticks(ys)

    def at_x(value: float) -> float:
        share = (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        return round(_LEFT + share * (_WIDTH - _LEFT - _EDGE), 1)

    def at_y(value: float) -> float:
        share = (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _EDGE), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for tick in x_ticks:
        parts.append(_line(at_x(tick), _EDGE, at_x(tick), _HEIGHT - _BOTTOM, "#eeeeee"))
        parts.append(_text(at_x(tick), _HEIGHT - _BOTTOM + 16, f"{tick:g}", "middle"))
    for tick in y_ticks:
        parts.append(_line(_LEFT, at_y(tick), _WIDTH - _EDGE, at_y(tick), "#eeeeee"))
        parts.append(_text(_LEFT - 8, at_y(tick) + 4, f"{tick:g}", "end"))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 12, x, "middle"))
    parts.append(_text(_LEFT, _EDGE - 4, y, "middle"))
    if line:
        parts.append(_line(_LEFT, at_y(line[0]), _WIDTH - _EDGE, at_y(line[0]), "#888888"))
        parts.append(_text(_WIDTH - _EDGE, at_y(line[0]) - 4, line[1], "end"))
    groups = list(dict.fromkeys(point[3] for point in points))
    for px, py, name, group in points:
        colour = _COLOURS[groups.index(group) % len(_COLOURS)]
        parts.append(f'<circle cx="{at_x(px)}" cy="{at_y(py)}" r="4" fill="{colour}"/>')
        parts.append(_text(at_x(px) + 7, at_y(py) + 4, name, "start", colour))
    return "\n".join([*parts, "</svg>\n"])


def ticks(values: Sequence[float], count: int = 6) -> list[float]:
    """Round numbers, evenly apart, from below the smallest of ``values`` to above the largest."""
    low, high = min(values), max(values)
    wide = (high - low) or abs(high) or 1.0
    rough = wide / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#222222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
