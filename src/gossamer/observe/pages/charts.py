"""Charts: curves, points with error bars, and stacked bars, as SVG with the colors of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, inf, log10

from gossamer.observe.panels import spread_apart, ticks

LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 12.0, 40.0  # margins, in pixels
LABEL_GAP = 13.0
LABELED_RIGHT = 30.0  # a margin with room for the labels of curves
BAR, BAR_NAME, BAR_GAP, BAR_LEFT = 19.0, 18.0, 12.0, 12.0  # heights of bars and names, gap, left margin
LETTER = 7.2  # pixels of a letter, an upper bound on average
ANCHOR_END = ' text-anchor="end"'
Size = tuple[float, float]
NARROW = 340.0, 290.0  # width and height of a chart on a phone
HALF, WHOLE = (640.0, 330.0), (1320.0, 380.0)  # for half and for the whole width of a page


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """A curve. style: its CSS class; label: a few letters at its end."""

    name: str
    style: str
    across: Sequence[float]
    up: Sequence[float]
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point with the interval of its height. label: text next to it."""

    label: str
    name: str
    style: str
    across: float
    up: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a bar. style: its CSS class; hatch: a name in HATCHES, to identify it without color."""

    name: str
    style: str
    hatch: str
    length: float


@dataclass(frozen=True, kw_only=True)
class BarGroup:
    """Bars below one name, each of consecutive parts."""

    name: str
    style: str
    bars: Sequence[Sequence[BarPart]]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis from its low to its high end."""

    title: str
    low: float
    high: float
    logarithmic: bool = False
    text: Callable[[float], str] = "{:.4g}".format  # label of a tick

    def share(self, value: float) -> float:
        """Position of a value on the axis: 0 to 1 between its ends."""
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
    """Plot area of a picture."""

    across: Axis
    up: Axis
    width: float
    height: float
    left: float = LEFT
    right: float = RIGHT

    def x(self, value: float) -> float:
        return self.left + (self.width - self.left - self.right) * self.across.share(value)

    def y(self, value: float) -> float:
        clipped = min(1.0, max(0.0, self.up.share(value)))
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * clipped


def line_chart(lines: Sequence[ChartLine], across: Axis, up: Axis, title: str, whole: bool = True) -> str:
    """Curves, the first on top. whole: as wide as the page, else half."""
    right = LABELED_RIGHT if any(line.label for line in lines) else RIGHT

    def draw(kind: str, width: float, height: float) -> Iterator[str]:
        plane = Plane(across=across, up=up, width=width, height=height, right=right)
        yield from (*_grid(plane), *_lines(lines, plane), *_line_labels(lines, plane))

    return _each_width(draw, title, WHOLE if whole else HALF, NARROW)


def dot_chart(dots: Sequence[Dot], across: Axis, up: Axis, title: str) -> str:
    """Points with error bars and labels, and their Pareto front."""

    def draw(kind: str, width: float, height: float) -> Iterator[str]:
        plane = Plane(across=across, up=up, width=width, height=height)
        yield from (*_grid(plane), *_dots(dots, plane))

    return _each_width(draw, title, HALF, NARROW)


def bar_chart(groups: Sequence[BarGroup], across_title: str, title: str, unit: str) -> str:
    """Groups of bars, one below the other, with the name and length of each part if it fits."""
    every = [bar for group in groups for bar in group.bars]
    across = Axis(title=across_title, low=0.0, high=max(sum(part.length for part in bar) for bar in every))
    height = TOP + sum(_group_height(group) for group in groups) + BOTTOM

    def draw(kind: str, width: float, height: float) -> Iterator[str]:
        plane = Plane(across=across, up=across, width=width, height=height, left=BAR_LEFT)
        hatches = {part.style: part.hatch for bar in every for part in bar}
        yield f"<defs>{''.join(_hatched(kind, *each) for each in hatches.items())}</defs>"
        yield from (*_across_grid(plane), *_groups(groups, plane, kind, unit))

    return _each_width(draw, title, (WHOLE[0], height), (NARROW[0], height))


def axis_around(
    title: str,
    values: Iterable[float],
    *,
    logarithmic: bool = False,
    margin: float = 0.06,
    text: Callable[[float], str] = "{:.4g}".format,
) -> Axis:
    """An axis that contains all values, with a margin at both ends."""
    found = [value for value in values if -inf < value < inf and (value > 0 or not logarithmic)] or [1.0]
    low, high = min(found), max(found)
    if logarithmic:
        factor = (high / low) ** margin if high > low else 2.0
        return Axis(title=title, low=low / factor, high=high * factor, logarithmic=True, text=text)
    room = (high - low) * margin or abs(high) * margin or 1.0
    return Axis(title=title, low=low - room, high=high + room, text=text)


def front(dots: Sequence[Dot]) -> list[Dot]:
    """The Pareto front: points without another point below and to the left, from left to right."""
    found: list[Dot] = []
    for dot in sorted(dots, key=lambda each: (each.across, each.up)):
        if not found or dot.up < found[-1].up:
            found.append(dot)
    return found


def _each_width(
    draw: Callable[[str, float, float], Iterator[str]],
    title: str,
    broad: tuple[float, float],
    narrow: tuple[float, float],
) -> str:
    """Two pictures, of which CSS shows the one for the page's width: scaling one picture would shrink its letters."""
    pictures = []
    for kind, (width, height) in {"broad": broad, "narrow": narrow}.items():
        inner = "".join(draw(kind, width, height))
        pictures.append(
            f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}">'
            f"{inner}</svg>"
        )
    return "".join(pictures)


def _grid(plane: Plane) -> Iterator[str]:
    bottom, right = plane.height - BOTTOM, plane.width - plane.right
    yield from _across_grid(plane)
    for value in plane.up.ticks(7):
        y = plane.y(value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
        yield f"{escape(plane.up.text(value))}</text>"
    height = (TOP + bottom) / 2
    yield f'<text class="title" transform="translate(11 {height:.1f}) rotate(-90)" text-anchor="middle">'
    yield f"{escape(plane.up.title)}</text>"


def _across_grid(plane: Plane) -> Iterator[str]:
    bottom, right = plane.height - BOTTOM, plane.width - plane.right
    for value in plane.across.ticks(9 if plane.width > 400 else 5):
        x = plane.x(value)
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">'
        yield f"{escape(plane.across.text(value))}</text>"
    middle = (plane.left + right) / 2
    yield f'<text class="title" x="{middle:.1f}" y="{plane.height - 6:.1f}" text-anchor="middle">'
    yield f"{escape(plane.across.title)}</text>"


def _lines(lines: Sequence[ChartLine], plane: Plane) -> Iterator[str]:
    for line in reversed(lines):
        points = " ".join(f"{plane.x(x):.1f},{plane.y(y):.1f}" for x, y in zip(line.across, line.up, strict=True))
        yield f'<polyline class="line {line.style}" points="{points}"><title>{escape(line.name)}</title></polyline>'


def _line_labels(lines: Sequence[ChartLine], plane: Plane) -> Iterator[str]:
    named = [line for line in lines if line.label and line.up]
    ends = [plane.y(line.up[-1]) for line in named]
    heights = spread_apart(ends, LABEL_GAP, TOP, plane.height - BOTTOM)
    edge = plane.width - plane.right
    for line, end, height in zip(named, ends, heights, strict=True):
        x = plane.x(line.across[-1])
        yield f'<g class="{line.style}"><circle class="end" cx="{x:.1f}" cy="{end:.1f}" r="2.5"/>'
        yield f'<line class="lead" x1="{x:.1f}" y1="{end:.1f}" x2="{edge + 8:.1f}" y2="{height:.1f}"/>'
        yield f'<text x="{edge + 12:.1f}" y="{height + 4:.1f}">{escape(line.label)}</text></g>'


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


# -- bars --------------------------------------------------------------------------------------------------------------

HATCHES = {
    "": "",
    "///": '<path class="hatch" d="M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4"/>',
    "\\\\\\": '<path class="hatch" d="M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4"/>',
    "...": '<circle class="hatch" cx="4" cy="4" r=".6"/>',
    "xxx": '<path class="hatch" d="M0,0 l8,8 M0,8 l8,-8"/>',
}


def part_key(parts: Sequence[BarPart]) -> str:
    """A legend of parts with their colors and hatches."""
    boxes = [
        f'<li><svg viewBox="0 0 26 13"><defs>{_hatched("key", part.style, part.hatch)}</defs>'
        f'<rect width="26" height="13" fill="url(#key-{part.style})"/></svg>{escape(part.name)}</li>'
        for part in parts
    ]
    return f'<ul class="key parts">{"".join(boxes)}</ul>'


def _group_height(group: BarGroup) -> float:
    return BAR_NAME + (BAR + 1) * len(group.bars) + BAR_GAP


def _groups(groups: Sequence[BarGroup], plane: Plane, kind: str, unit: str) -> Iterator[str]:
    top = TOP
    for group in groups:
        yield f'<text class="name {group.style}" x="{plane.left}" y="{top + 12:.1f}">{escape(group.name)}</text>'
        for number, bar in enumerate(group.bars):
            yield from _bar(bar, plane, top + BAR_NAME + (BAR + 1) * number, kind, unit)
        top += _group_height(group)


def _bar(parts: Sequence[BarPart], plane: Plane, top: float, kind: str, unit: str) -> Iterator[str]:
    begin = 0.0
    for part in parts:
        x, end = plane.x(begin), plane.x(begin + part.length)
        yield f'<rect x="{x:.1f}" y="{top:.1f}" width="{end - x:.1f}" height="{BAR}" fill="url(#{kind}-{part.style})"/>'
        label = f"{part.name} {part.length:.3g} {unit}"
        if end - x > LETTER * len(label) + 8:
            yield f'<text class="part" x="{(x + end) / 2:.1f}" y="{top + BAR - 5:.1f}" text-anchor="middle">'
            yield f"{escape(label)}</text>"
        begin += part.length


def _hatched(kind: str, style: str, hatch: str) -> str:
    """A filling. Each picture has its own: fillings of a picture that is not shown draw nothing."""
    return (
        f'<pattern id="{kind}-{style}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect class="{style}" width="8" height="8"/>{HATCHES[hatch]}</pattern>'
    )
