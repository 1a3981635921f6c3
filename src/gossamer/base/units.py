"""Units: numbers, ranks and errors as text for people, and back: 1.2 MB, 34 ms, 12 %, ranks 0, 3."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import isfinite

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BITS_PER_SECOND = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
RATE_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")
BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
COUNT_UNITS = ("", "thousand", "million", "billion", "trillion")
SHOWN_CHARACTERS = 100  # of invalid input in messages
MOST_QUANTITY = 1e18  # seconds, bytes or bits per second
SECOND_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def short(value: float) -> str:
    """Three digits, no exponent where a plain number does: 0.0123, 1.20, 12.3, 123, 1230."""
    if not isfinite(value):
        return str(value)
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    place = 0
    while abs(value) >= 999.5 and place < len(units) - 1:
        value /= 1000
        place += 1
    number = f"{value:.0f}" if place == 0 or abs(value) >= 99.95 else f"{value:.1f}"
    return f"{number} {units[place]}".rstrip()


def bytes_text(count: float) -> str:
    """Decimal units, as networks count: 1.2 MB is 1,200,000 bytes."""
    return _scaled(count, BYTE_UNITS)


def rate_text(bits_per_second: float) -> str:
    """Decimal units of bits, as lines are sold: 12.3 Mbit/s."""
    return _scaled(bits_per_second, RATE_UNITS)


def parse_quantity(value: object, units: Mapping[str, float], what: str, example: str) -> float:
    """Return the quantity of a text such as "20ms": a number times the factor of its unit.

    Args:
        value: the text; upper and lower case are equal.
        units: factors by unit.
        what: in the error message, as "a time".
        example: of such a text.

    Raises:
        ValueError: another text, or a number that is out of range.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", str(value).strip().lower())
    factor = {name.lower(): each for name, each in units.items()}.get(found[2]) if found else None
    if not found or factor is None:
        raise ValueError(
            f"{shown(value)} is not {what}. Write a number and one of {', '.join(units)}, such as {example}."
        )
    quantity = float(found[1]) * factor
    if quantity > MOST_QUANTITY:
        raise ValueError(f"{shown(value)} is out of range. Write {what} such as {example}.")
    return quantity


def parse_rate(text: object) -> float:
    """Return the bits per second of a text such as "20mbit". Raises ValueError for another text."""
    return parse_quantity(text, BITS_PER_SECOND, "a rate", "20mbit")


def parse_seconds(text: object) -> float:
    """Return the seconds of a text such as "20ms". Raises ValueError for another text."""
    return parse_quantity(text, SECONDS, "a time", "20ms")


def shown(value: object) -> str:
    """A value in an error message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def count_text(count: float) -> str:
    return _scaled(count, COUNT_UNITS)


def seconds_text(seconds: float) -> str:
    """34 ms, 1.2 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    if whole >= 100:
        return f"{whole // 60} min {whole % 60} s"
    size, name = next((unit for unit in SECOND_UNITS if seconds >= unit[0]), SECOND_UNITS[-1])
    return f"{seconds / size:.3g} {name}" if seconds else "0 s"


def range_text(low_seconds: float, high_seconds: float) -> str:
    """350 to 410 ms; both with their units where these differ."""
    low, high = seconds_text(low_seconds), seconds_text(high_seconds)
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if high.partition(" ")[2] == unit else f"{low} to {high}"


def share_text(share: float) -> str:
    """A fraction as a percentage: 12 %."""
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def exact_text(value: float) -> str:
    """Text of a number that reads as the same number again: 2.2, 0.9999999."""
    short_text = f"{value:g}"
    return short_text if float(short_text) == value else repr(value).removesuffix(".0")


def counted(count: int, noun: str) -> str:
    """A number of things in a sentence: "1 worker", "3 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ranks_text(ranks: Collection[object], last: str = ", ") -> str:
    """Ranks in a sentence: "rank 3", "ranks 0, 3"; empty for no rank. last: before the last of several, as " and "."""
    *first, end = map(str, ranks) if ranks else ("",)
    return f"ranks {', '.join(first)}{last}{end}" if first else f"rank {end}" if end else ""


def first_line(failure: BaseException) -> str:
    """The first line of an error's message, or its class if it has none. Messages of torch may be long."""
    return (str(failure).splitlines() or [type(failure).__name__])[0]
