"""SVG pictures of records, written without a library: curves named at their ends, and bars of where a step's time goes.

For a page: what is written here is part of its HTML, and asks for nothing from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from gossamer.base.units import short
from gossamer.observe.panels import COMMUNICATION, TRAINING, Curve, Panel, Part, StepBars, spread_apart, ticks

FONT = 12  # pixels
LETTER = 0.6 * FONT  # the widest that a letter of a name is, on average
AXIS = "#5c6b7a"
GRID = "#e6ebf0"
DASHES = ' stroke-dasharray="1 3"'
HATCHES = {
    "": "",
    "///": '<path d="M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4" stroke="#fff" stroke-width="1.6"/>',
    "\\\\\\": '<path d="M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4" stroke="#fff" stroke-width="1.6"/>',
    "...": '<circle cx="4" cy="4" r="1.2" fill="#fff"/>',
    "xxx": '<path d="M0,0 l8,8 M0,8 l8,-8" stroke="#fff" stroke-width="1.2"/>',
}


@dataclass(frozen=True)
class _Frame:
    """Where data lie in the picture, in pixels."""

    left: float
    top: float
    right: float
    bottom: float
    x_low: float
    x_high: float
    y_low: float = 0.0
    y_high: float = 1.0

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.x_low) / ((self.x_high - self.x_low) or 1.0)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.y_low) / ((self.y_high - self.y_low) or 1.0)


def panel_svg(panel: Panel, width: int = 720, height: int = 340) -> str:
    """One panel's curves, each with its name at its end."""
    margin = 24 + LETTER * max((len(curve.name) for curve in panel.curves), default=0)
    frame = _frame(panel, width - margin, height)
    return _svg(width, height, panel.title, (*_axes(panel, frame), *_curves(panel, frame)))


def _frame(panel: Panel, right: float, height: float) -> _Frame:
    """Losses that a run begins with would press all others down: from the smallest to the largest smoothed one."""
    across = [value for curve in panel.curves for value in curve.across] or [0.0, 1.0]
    values = [value for curve in panel.curves for value in curve.smoothed] or [0.0, 1.0]
    margin = 0.05 * (max(values) - min(values)) or 0.5
    return _Frame(54, 34, right, height - 44, 0.0, max(across), min(values) - margin, max(values) + margin)


def _axes(panel: Panel, frame: _Frame) -> Iterator[str]:
    yield _text(frame.left - 40, 16, panel.title, weight="bold")
    for value in ticks(frame.x_high, frame.x_low):
        yield _line(frame.x(value), frame.top, frame.x(value), frame.bottom, GRID)
        yield _text(frame.x(value), frame.bottom + 16, _number(value), "middle", AXIS)
    for value in ticks(frame.y_high, frame.y_low):
        yield _line(frame.left, frame.y(value), frame.right, frame.y(value), GRID)
        yield _text(frame.left - 6, frame.y(value) + 4, _number(value), "end", AXIS)
    yield _line(frame.left, frame.bottom, frame.right, frame.bottom, AXIS)
    yield _text((frame.left + frame.right) / 2, frame.bottom + 36, panel.across, "middle", AXIS)
    if panel.empty:
        middle = (frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2
        yield _text(*middle, f"nothing logged: session.log({panel.up}=...)", "middle")


def _curves(panel: Panel, frame: _Frame) -> Iterator[str]:
    drawn = [curve for curve in panel.curves if curve.values]
    ends = [(frame.x(curve.across[-1]), frame.y(curve.smoothed[-1])) for curve in drawn]
    heights = spread_apart([y for _, y in ends], FONT + 3, frame.top, frame.bottom)
    for curve, (x, y), height in zip(drawn, ends, heights, strict=True):
        yield _path(curve, frame)
        yield _line(x, y, frame.right + 10, height, curve.color, dashed=True)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{curve.color}"/>'
        yield _text(frame.right + 14, height + 4, curve.name, color=curve.color)


def _path(curve: Curve, frame: _Frame) -> str:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(curve.across, curve.smoothed, strict=True))
    return f'<polyline points="{points}" fill="none" stroke="{curve.color}" stroke-width="2"/>'


# -- bars --------------------------------------------------------------------------------------------------------------


def bars_svg(bars: Sequence[StepBars], width: int = 1440) -> str:
    """Two bars a recipe, each part with its name where there is room for it, and a key with all of them."""
    row, bar, top = 54, 19, 52
    left = 16 + LETTER * max(len(each.name) for each in bars)
    height = top + row * len(bars) + 44
    longest = max(
        sum(seconds for _, seconds in parts) for each in bars for parts in (each.training, each.communication)
    )
    frame = _Frame(left, top, width - 20, height - 44, 0.0, 1000 * longest)
    return _svg(width, height, "where a step's time goes", _bars(bars, frame, row, bar))


def _bars(bars: Sequence[StepBars], frame: _Frame, row: float, bar: float) -> Iterator[str]:
    yield f"<defs>{''.join(map(_pattern, (*TRAINING, *COMMUNICATION)))}</defs>"
    yield _text(8, 16, "where a step's time goes", weight="bold")
    yield from _key(frame.left)
    for value in ticks(frame.x_high, most=11):
        yield _line(frame.x(value), frame.top, frame.x(value), frame.bottom, GRID)
        yield _text(frame.x(value), frame.bottom + 16, _number(value), "middle", AXIS)
    yield _text((frame.left + frame.right) / 2, frame.bottom + 36, "milliseconds a step", "middle", AXIS)
    for place, each in enumerate(bars):
        top = frame.top + row * place + 6
        yield _text(frame.left - 8, top + bar + 4, each.name, "end", each.color)
        yield from _bar(each.training, frame, top, bar)
        yield from _bar(each.communication, frame, top + bar + 1, bar)


def _bar(parts: Iterable[tuple[Part, float]], frame: _Frame, top: float, height: float) -> Iterator[str]:
    begin = 0.0
    for part, seconds in parts:
        x, end = frame.x(begin), frame.x(begin + 1000 * seconds)
        yield _box(x, top, end - x, height, part)
        label = f"{part.name} {short(1000 * seconds)} ms"
        if end - x > LETTER * len(label) + 8:
            yield _text((x + end) / 2, top + height - 5, label, "middle", halo=bool(part.hatch))
        begin += 1000 * seconds


def _key(left: float) -> Iterator[str]:
    for part in (*TRAINING, *COMMUNICATION):
        yield _box(left, 27, 26, 13, part)
        yield _text(left + 32, 38, part.name, color=AXIS)
        left += 60 + LETTER * len(part.name)


def _pattern(part: Part) -> str:
    """A part's filling, which tells it without its color."""
    return (
        f'<pattern id="{part.key}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{part.color}"/>{HATCHES[part.hatch]}</pattern>'
    )


def _box(x: float, y: float, width: float, height: float, part: Part) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="url(#{part.key})"/>'


# -- elements ----------------------------------------------------------------------------------------------------------


def _svg(width: float, height: float, title: str, elements: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'font-family="system-ui, sans-serif" font-size="{FONT}">{"".join(elements)}</svg>'
    )


def _line(x: float, y: float, to_x: float, to_y: float, color: str, dashed: bool = False) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{color}"{DASHES * dashed}/>'


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    color: str = "#1c2733",
    weight: str = "normal",
    halo: bool = False,
) -> str:
    behind = ' stroke="#fff" stroke-width="3" paint-order="stroke"' * halo
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}"'
    return f"<text {where}{behind}>{escape(text)}</text>"


def _number(value: float) -> str:
    return f"{value:.4g}"
