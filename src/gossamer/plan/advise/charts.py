"""Charts: curves, and points with their error bars, as SVG that takes its colors from the page around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, inf, log10

from gossamer.observe.panels import spread_apart, ticks

LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 12.0, 40.0  # margins, in pixels
LABEL_GAP = 13.0
ANCHOR_END = ' text-anchor="end"'
NARROW = 340.0, 290.0  # width and height of any chart on a telephone
HALF, WHOLE = (640.0, 330.0), (1320.0, 380.0)  # on a page, half and all of its width


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A curve. style: the class by which the page colors it."""

    name: str
    style: str
    across: Sequence[float]
    up: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point with the interval of its height. label: what stands beside it."""

    label: str
    name: str
    style: str
    across: float
    up: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Axis:
    """What an axis shows, from its low to its high end."""

    title: str
    low: float
    high: float
    logarithmic: bool = False
    text: Callable[[float], str] = "{:.4g}".format  # what stands beside a tick

    def share(self, value: float) -> float:
        """How far along a value lies, 0 to 1 within the ends."""
        low, high, at = (log10(each) if self.logarithmic else each for each in (self.low, self.high, value))
        return (at - low) / ((high - low) or 1.0)

    def ticks(self, most: int) -> list[float]:
        if not self.logarithmic:
            return ticks(self.high, self.low, most)
        first, last = floor(log10(self.low)), ceil(log10(self.high))
        marks = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
        found = [mark * 10.0**power for power in range(first, last + 1) for mark in marks]
        return [value for value in found if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]


@dataclass(frozen=True, kw_only=True)
class Plane:
    """Where data lie in a picture."""

    across: Axis
    up: Axis
    width: float
    height: float

    def x(self, value: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * self.across.share(value)

    def y(self, value: float) -> float:
        clipped = min(1.0, max(0.0, self.up.share(value)))
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * clipped


def line_chart(lines: Sequence[ChartLine], across: Axis, up: Axis, title: str) -> str:
    """Curves, the first on top, as wide as the page."""
    return _each_width(lambda plane: _lines(lines, plane), across, up, title, WHOLE)


def dot_chart(dots: Sequence[Dot], across: Axis, up: Axis, title: str) -> str:
    """Points with error bars and their labels, and the front of those that no other beats in both."""
    return _each_width(lambda plane: _dots(dots, plane), across, up, title, HALF)


def axis_around(
    title: str,
    values: Iterable[float],
    *,
    logarithmic: bool = False,
    margin: float = 0.06,
    text: Callable[[float], str] = "{:.4g}".format,
) -> Axis:
    """An axis on which all values lie, with some room at both ends."""
    found = [value for value in values if -inf < value < inf and (value > 0 or not logarithmic)] or [1.0]
    low, high = min(found), max(found)
    if logarithmic:
        factor = (high / low) ** margin if high > low else 2.0
        return Axis(title=title, low=low / factor, high=high * factor, logarithmic=True, text=text)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return Axis(title=title, low=low - room, high=high + room, text=text)


def front(dots: Sequence[Dot]) -> list[Dot]:
    """Those that none lies below and to the left of, from left to right (Pareto)."""
    found: list[Dot] = []
    for dot in sorted(dots, key=lambda each: (each.across, each.up)):
        if not found or dot.up < found[-1].up:
            found.append(dot)
    return found


def _each_width(
    draw: Callable[[Plane], Iterator[str]], across: Axis, up: Axis, title: str, broad: tuple[float, float]
) -> str:
    """Two pictures, of which the page shows the one for its width: letters would shrink with a picture."""
    pictures = []
    for kind, (width, height) in {"broad": broad, "narrow": NARROW}.items():
        plane = Plane(across=across, up=up, width=width, height=height)
        inner = "".join((*_grid(plane), *draw(plane)))
        pictures.append(
            f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
            f"{inner}</svg>"
        )
    return "".join(pictures)


def _grid(plane: Plane) -> Iterator[str]:
    bottom, right = plane.height - BOTTOM, plane.width - RIGHT
    for value in plane.across.ticks(9 if plane.width > 400 else 5):
        x = plane.x(value)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">'
        yield f"{escape(plane.across.text(value))}</text>"
    for value in plane.up.ticks(7):
        y = plane.y(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
        yield f"{escape(plane.up.text(value))}</text>"
    middle, height = (LEFT + right) / 2, (TOP + bottom) / 2
    yield f'<text class="title" x="{middle:.1f}" y="{plane.height - 6:.1f}" text-anchor="middle">'
    yield f"{escape(plane.across.title)}</text>"
    yield f'<text class="title" transform="translate(11 {height:.1f}) rotate(-90)" text-anchor="middle">'
    yield f"{escape(plane.up.title)}</text>"


def _lines(lines: Sequence[ChartLine], plane: Plane) -> Iterator[str]:
    for line in reversed(lines):
        points = " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in zip(line.across, line.up, strict=True))
        yield f'<polyline class="line {line.style}" points="{points}"><title>{escape(line.name)}</title></polyline>'


def _dots(dots: Sequence[Dot], plane: Plane) -> Iterator[str]:
    best = front(dots)
    points = " ".join(f"{plane.x(dot.across):.1f},{plane.y(dot.up):.1f}" for dot in best)
    yield f'<polyline class="front" points="{points}"/>'
    heights = spread_apart([plane.y(dot.up) for dot in dots], LABEL_GAP / 3, TOP, plane.height - BOTTOM)
    for dot, height in zip(dots, heights, strict=True):
        x, y, end = plane.x(dot.across), plane.y(dot.up), plane.width - RIGHT
        low, high = plane.y(max(dot.low, plane.up.low)), plane.y(min(dot.high, plane.up.high))
        before = x > end - 24
        yield f'<g class="dot {dot.style}"><title>{escape(dot.name)}</title>'
        yield f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}"/>'
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
        yield f'<text x="{x - 8 if before else x + 8:.1f}" y="{height + 4:.1f}"{ANCHOR_END * before}>'
        yield f"{escape(dot.label)}</text></g>"
