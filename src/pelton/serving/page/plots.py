"""Plots as the numbers an inline SVG needs: x and width in per mille of the plot's width, height in its
viewBox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 160.0


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A rectangle; ``title`` is shown when pointed at."""

    x: float
    y: float
    width: float
    height: float
    title: str
    colour: int
    """Index into the page's series colours."""


def bars(values: Sequence[float], titles: Sequence[str], groups: Sequence[str]) -> list[Bar]:
    """One bar a value, as high as its share of the largest; a colour for each different group."""
    top = max(values, default=0.0) or 1.0
    step = WIDTH / max(1, len(values))
    colours = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    return [
        Bar(
            x=round(i * step, 3),
            y=round(HEIGHT * (1 - value / top), 3),
            width=round(step, 3),
            height=round(HEIGHT * value / top, 3),
            title=title,
            colour=colours[group] % 8,
        )
        for i, (value, title, group) in enumerate(zip(values, titles, groups, strict=True))
    ]


def spans(parts: Sequence[tuple[int, int, int, int, str]], steps: int, size: int) -> list[Bar]:
    """(first, last, offset, bytes, title): rectangles over ``steps`` along x and ``size`` bytes up y."""
    wide, high = WIDTH / max(1, steps), HEIGHT / max(1, size)
    return [
        Bar(
            x=round(first * wide, 3),
            y=round(HEIGHT - (offset + nbytes) * high, 3),
            width=round((last + 1 - first) * wide, 3),
            height=round(nbytes * high, 3),
            title=title,
            colour=i % 8,
        )
        for i, (first, last, offset, nbytes, title) in enumerate(parts)
    ]


def shares(parts: Sequence[tuple[str, int, str]]) -> list[Bar]:
    """(name, size, shown size) side by side in one line, each as wide as its share."""
    total = sum(size for _, size, _ in parts) or 1
    found, x = [], 0.0
    for i, (name, size, shown) in enumerate(parts):
        width = WIDTH * size / total
        found.append(
            Bar(x=round(x, 3), y=0, width=round(width, 3), height=30, title=f"{name} {shown}", colour=i % 8)
        )
        x += width
    return found


def legend(groups: Sequence[str]) -> list[tuple[int, str]]:
    """(colour, name) of each different group, as ``bars`` colours them."""
    return [(i % 8, group) for i, group in enumerate(dict.fromkeys(groups))]
