"""Page: an advice as one HTML file, light and dark, without further requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from math import inf
from pathlib import Path

from gossamer.base.units import bytes_text, seconds_text, share_text, short
from gossamer.observe.pages.charts import Axis, ChartLine, Dot, axis_around, dot_chart, line_chart
from gossamer.observe.pages.page import card, command_line, document, key, table
from gossamer.plan.advise.advice_file import Advice, CandidateRow, ContenderRow, Range

AHEAD = 4  # if the baseline is this many times ahead of all others, the axis is limited to them
COLORED = 6  # contenders with their own colors: the baseline and the best
RACE_TEXT = (
    "Virtual seconds: estimated time of these steps on this network. All have the same seed and the same batches. "
    "Curves are thinned to means of neighbors; a gray one was eliminated at its end."
)
PARETO_TEXT = (
    "Excess loss at as many steps as {baseline} has made, over the cost of a step. Lower and further left is better; "
    "the dotted line is the Pareto front. Bars: the interval of the difference, paired by step."
)


def write_advice_page(file: Path, advice: Advice) -> None:
    file.write_text(page(advice), encoding="utf-8")


def page(advice: Advice) -> str:
    """The whole file's text."""
    return document("advise", f"{advice.use} · gossamer advise", _content(advice))


def _content(advice: Advice) -> Iterator[str]:
    yield _answer(advice)
    yield from (f'<div class="remark">{escape(each)}</div>' for each in advice.remarks)
    yield '<div class="grid">'
    if advice.contenders:
        yield _race(advice)
        yield _pareto(advice, "seconds", "virtual seconds per step", seconds_text)
        yield _pareto(advice, "bytes_sent", "bytes sent per worker and step", bytes_text)
        yield card("Recipes in the race", _tried(advice), whole=True)
    if advice.confirmed:
        yield card("Real runs", _confirmed(advice), "Estimated and measured step times.", whole=True)
    if advice.would_change:
        listed = "".join(f"<li>{escape(each)}</li>" for each in advice.would_change)
        yield card(
            "Other networks",
            f'<ul class="plain">{listed}</ul>',
            "Expected best recipe on other networks, from the estimates and the steps of the race.",
        )
    if advice.gradients:
        yield card("Gradients", _gradients(advice), "Means over tensors and some successive batches.", whole=True)
    if advice.candidates:
        yield card("Estimates", _estimated(advice), whole=True)
    yield "</div>"
    yield f"<footer>gossamer {escape(advice.gossamer)}</footer>"


def _answer(advice: Advice) -> str:
    facts = {
        "workers": str(advice.workers),
        "network": advice.network,
        "speeds of the workers": ", ".join(short(each) for each in advice.speeds),
        "script": " ".join([advice.script, *advice.arguments]),
        "compute time of a step": seconds_text(advice.compute_seconds) if advice.compute_seconds else "",
        "recipes raced": str(len({each.recipe for each in advice.contenders})),
        "virtual seconds": short(advice.race_seconds),
        "target": advice.target or "",
    }
    markup = "".join(f"<div><b>{escape(text)}</b><span>{name}</span></div>" for name, text in facts.items() if text)
    return (
        f'<section class="card answer{" same" * (not advice.change)}"><h1>{escape(_capitalized(advice.use))}</h1>'
        f'<p class="fact"><b>gain</b> {escape(advice.gain)}</p><p class="fact"><b>cost</b> {escape(advice.cost)}</p>'
        f'{command_line(advice.command)}</section><div class="facts">{markup}</div>'
    )


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- pictures ----------------------------------------------------------------------------------------------------------


def _style(place: int) -> str:
    return f"s{place}" if place < COLORED else "rest"


def _race(advice: Advice) -> str:
    lines = [
        ChartLine(
            name=row.name,
            style=_style(place),
            across=[at for _, at, _ in row.curve if at > 0],
            up=[value for _, at, value in row.curve if at > 0],
        )
        for place, row in enumerate(advice.contenders)
        if len(row.curve) > 1
    ]
    across = _seconds_axis(advice.race_seconds, lines)
    picture = line_chart(lines, across, _loss_axis(advice.metric, lines), f"{advice.metric} over virtual seconds")
    others = len(lines) - COLORED
    named = [(line.style, line.name) for line in lines[:COLORED]] + [("rest", f"{others} others")] * (others > 0)
    return card("The race", picture + key(named), RACE_TEXT, whole=True)


def _seconds_axis(race_seconds: float, lines: Sequence[ChartLine]) -> Axis:
    title, last = "virtual seconds", max([race_seconds, *(max(line.across) for line in lines)])
    if last <= AHEAD * race_seconds:
        return Axis(title=title, low=0.0, high=last)
    return Axis(title=title, low=min(line.across[0] for line in lines), high=last, logarithmic=True)


def _loss_axis(metric: str, lines: Sequence[ChartLine]) -> Axis:
    """The range of most points: initial losses would flatten the curves."""
    late = [value for line in lines for value in line.up[len(line.up) // 20 :]]
    return axis_around(metric, late)


def _pareto(advice: Advice, amount: str, title: str, text: Callable[[float], str]) -> str:
    """Excess loss at equal steps over the cost of a step, without contenders with another learning rate."""
    dots = [
        Dot(
            label=str(place),
            name=row.name,
            style=_style(place),
            across=getattr(row, amount) / row.steps,
            up=value,
            low=bar[0],
            high=bar[1],
        )
        for place, row in enumerate(advice.contenders)
        if row.steps and row.learning_rate_factor == 1 and getattr(row, amount) > 0
        for value, *ends in [row.loss_at_equal_steps or (0.0, 0.0, 0.0)]
        if value is not None
        for bar in [_bar(value, *ends)]
        if (place == 0 or row.loss_at_equal_steps is not None)
    ]
    across = axis_around(title, [dot.across for dot in dots], logarithmic=True, text=text)
    up = axis_around(f"{advice.metric}, minus the first's", [dot.up for dot in dots], margin=0.12)
    picture = dot_chart(dots, across, up, f"cost in {advice.metric} over {title}")
    return card(f"Loss against {title}", picture, PARETO_TEXT.format(baseline=advice.contenders[0].recipe))


def _bar(value: float, low: float | None, high: float | None) -> tuple[float, float]:
    """Ends of an interval to draw: unbounded at an unknown end, and a point if both are unknown."""
    if low is None and high is None:
        return value, value
    return -inf if low is None else low, inf if high is None else high


# -- tables ------------------------------------------------------------------------------------------------------------


LEFT_COLUMNS = ("recipe", "family", "")


def _tried(advice: Advice) -> str:
    header = (
        *("no.", "recipe", "steps", "seconds per step", "bytes per step", advice.metric, "speedup"),
        *("loss at equal steps", ""),
    )
    return table(header, [_tried_row(place, row, advice) for place, row in enumerate(advice.contenders)], LEFT_COLUMNS)


def _tried_row(place: int, row: ContenderRow, advice: Advice) -> str:
    chosen = (row.recipe, row.learning_rate_factor) == (advice.recipe, advice.learning_rate_factor)
    each = [row.seconds / row.steps, row.bytes_sent / row.steps] if row.steps else [0.0, 0.0]
    cells = (
        *(str(row.steps), seconds_text(each[0]), bytes_text(each[1])),
        "" if row.loss is None else f"{row.loss:.4g}",
        _interval(row.speedup, ".2f"),
        _interval(row.loss_at_equal_steps, "+.3g"),
    )
    return (
        f'<tr{CHOSEN * chosen}><td class="{_style(place)}"><span class="mark"></span>{place}</td>'
        f'<td class="name">{escape(row.name)}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}'
        f'<td class="why">{escape(row.out or "")}</td></tr>'
    )


CHOSEN = ' class="chosen"'


def _interval(found: Range | None, form: str) -> str:
    if found is None or found[0] is None:
        return ""
    value, low, high = found
    if low is None and high is None:
        return f"{value:{form}}"
    ends = " to ".join("?" if end is None else f"{end:{form}}" for end in (low, high))
    return f"{value:{form}} <small>{ends}</small>"


def _confirmed(advice: Advice) -> str:
    rows = []
    for row in advice.confirmed:
        markup = row.estimated_step_seconds
        error = "" if markup is None else f"{100 * (markup / row.measured_step_seconds - 1):+.0f} %"
        cells = (
            "" if markup is None else seconds_text(markup),
            seconds_text(row.measured_step_seconds),
            error,
            str(row.steps),
            "" if row.loss is None else f"{row.loss:.4g}",
        )
        rows.append(
            f'<tr><td class="name">{escape(row.recipe)}</td>{"".join(f"<td>{each}</td>" for each in cells)}</tr>'
        )
    return table(("recipe", "estimated", "measured", "error", "steps", "loss at equal time"), rows, LEFT_COLUMNS)


def _gradients(advice: Advice) -> str:
    rows = [
        f'<tr><td class="name">{escape(each.family)}</td><td>{"yes" if each.works else "no"}</td>'
        f'<td class="why">{escape(each.because)}</td></tr>'
        for each in advice.findings
    ]
    markup = table(("family", "suitable", ""), rows, LEFT_COLUMNS) if rows else ""
    return (
        f"{markup}<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{text}</dd>' for name, text in _statistics(advice))}</dl>"
    )


def _statistics(advice: Advice) -> Iterator[tuple[str, str]]:
    for name, value in advice.gradients.items():
        yield name.replace("_", " "), "not known" if value is None else _share_or_number(name, value)


def _share_or_number(name: str, value: float) -> str:
    return share_text(value) if 0 <= value <= 1 and "noise scale" not in name else short(value)


def _estimated(advice: Advice) -> str:
    left = [row for row in advice.candidates if row.excluded is None]
    gone = [row for row in advice.candidates if row.excluded is not None]
    header = ("recipe", "seconds per step", "bytes per step", "state", "steps over the first's", "")
    body = table(header, [_prediction_row(row) for row in left], LEFT_COLUMNS)
    if not gone:
        return body
    rows = [_prediction_row(row) for row in gone]
    summary = f"<summary>left out: {len(gone)}</summary>"
    return f"{body}<details>{summary}{table(header, rows, LEFT_COLUMNS)}</details>"


def _prediction_row(row: CandidateRow) -> str:
    low, high = row.step_seconds_low, row.step_seconds_high
    seconds = seconds_text(row.step_seconds) if row.step_seconds else ""
    if low is not None and high is not None:
        seconds += f" <small>{seconds_text(low)} to {seconds_text(high)}</small>"
    cells = (
        seconds,
        bytes_text(row.bytes_sent) if row.step_seconds else "",
        bytes_text(row.memory_bytes) if row.step_seconds else "",
        f"{row.expected_steps:.2f}" if row.step_seconds else "",
    )
    return (
        f'<tr><td class="name">{escape(row.recipe)}</td>{"".join(f"<td>{cell}</td>" for cell in cells)}'
        f'<td class="why">{escape(row.excluded or "")}</td></tr>'
    )
