"""Profile file: reads devices of several sorts from a TOML file, such as phones that take part at night."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from gossamer.base.json_text import DEEPEST_LEVELS, nesting
from gossamer.comm.network.parse import BITS_PER_SECOND, SECONDS
from gossamer.errors import GossamerError
from gossamer.federated.population.device_profile import DeviceProfile

TIMES = SECONDS | {"min": 60.0, "h": 3600.0}
MOST_BYTES, MOST_DOTS = 2**20, 50  # of a file, and in a line of it
MOST_DEVICES = 10_000_000  # with one description
SHOWN_CHARACTERS = 100  # of what cannot be read


class DeviceProfileError(GossamerError, ValueError):
    """Device profiles that cannot be read, or of too few devices."""


def read_profiles(path: str | Path, count: int) -> list[DeviceProfile]:
    """`count` devices, as a file describes them: sorts of devices under [[devices]], in its order.

        [default]               # of every sort
        round_trip = "60ms"

        [[devices]]             # phones, at night
        share = 0.8             # of all; or count = 80 in every sort
        step = "160ms"          # of the optimizer
        up = "1mbit"
        down = "10mbit"         # or rate, for both
        present_from = "22:00"
        present = "8h"          # of each day; left out: always
        failure = "2%"          # of the tasks that it begins are never finished

    Raises DeviceProfileError, naming the file, the sort and what could not be read.
    """
    file = Path(path)
    table = _table_of(file)
    if unknown := table.keys() - {"default", "devices"}:
        raise DeviceProfileError(f"{file} has {_named(unknown)}; device profiles have [default] and [[devices]].")
    default, sorts = table.get("default", {}), table.get("devices", [])
    if not isinstance(default, dict) or not isinstance(sorts, list) or not all(isinstance(s, dict) for s in sorts):
        raise DeviceProfileError(
            f"{file}: [default] and [[devices]] are headings, the latter in two brackets, with lines such as "
            'up = "1mbit" below them'
        )
    if not sorts:
        raise DeviceProfileError(
            f'{file} has no [[devices]], so nobody is there. Write [[devices]] and up = "1mbit" below it'
        )
    base = _profile(DeviceProfile(), default, f"{file}, [default]")
    found = [
        _profile(
            base, {key: value for key, value in sort.items() if key not in ("count", "share")}, _place(file, number)
        )
        for number, sort in enumerate(sorts, 1)
    ]
    counts = _counts(sorts, count, file)
    return [profile for profile, alike in zip(found, counts, strict=True) for _ in range(alike)]


def _place(file: Path, number: int) -> str:
    return f"{file}, [[devices]] number {number}"


def _table_of(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes. Say how many devices are alike: share = 0.5")
        text = file.read_text(encoding="utf-8")
        # What a TOML parser keeps of a key grows with the square of its dots.
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()) or nesting(text) > DEEPEST_LEVELS:
            raise ValueError("a line of it has too many dots or brackets")
        return tomllib.loads(text)
    except (OSError, ValueError, MemoryError) as error:  # ValueError: of text, TOML and numbers
        what = str(error)[:SHOWN_CHARACTERS] or type(error).__name__
        raise DeviceProfileError(f"{str(file)[:SHOWN_CHARACTERS]} cannot be read as device profiles: {what}") from error


def _counts(sorts: Sequence[Mapping[str, Any]], count: int, file: Path) -> list[int]:
    """How many devices there are of each sort."""
    by_count, by_share = ["count" in sort for sort in sorts], ["share" in sort for sort in sorts]
    if any(by_count) and any(by_share):
        raise DeviceProfileError(f"{file} says count of some devices and share of others: write one of both in all")
    if any(by_count):
        return _first(sorts, count, file)
    shares = [sort.get("share", 1 / len(sorts)) for sort in sorts]
    if any(by_share) != all(by_share):
        raise DeviceProfileError(f"{file} says the share of some devices and not of others: write share in all")
    for number, share in enumerate(shares, 1):
        if not _is_number(share) or not 0 < share <= 1:
            raise DeviceProfileError(
                f"{_place(file, number)}: share is above 0 and at most 1, not {_shown(share)}: write share = 0.5"
            )
    if abs(sum(shares) - 1) > 1e-6:
        raise DeviceProfileError(f"{file}: the shares add up to {sum(shares):g}, and all devices are 1")
    exact = [share * count for share in shares]
    found = [int(each) for each in exact]
    by_rest = sorted(range(len(found)), key=lambda place: found[place] - exact[place])  # largest remainders first
    for place in by_rest[: count - sum(found)]:
        found[place] += 1
    return found


def _first(sorts: Sequence[Mapping[str, Any]], count: int, file: Path) -> list[int]:
    """The first so many devices of a file that counts them."""
    found, left = [], count
    for number, sort in enumerate(sorts, 1):
        alike = sort.get("count", 1)
        if type(alike) is not int or not 1 <= alike <= MOST_DEVICES:
            raise DeviceProfileError(
                f"{_place(file, number)}: count is how many devices are alike, 1 to {MOST_DEVICES}, not {_shown(alike)}"
            )
        found.append(min(alike, left))
        left -= found[-1]
    if left:
        raise DeviceProfileError(
            f"{file} has {count - left} devices and {count} take part: raise a count, or write share = 0.5 in place of "
            f"counts, or --clients {count - left}"
        )
    return found


def _profile(base: DeviceProfile, lines: Mapping[str, Any], where: str) -> DeviceProfile:
    fields: dict[str, float] = {}
    for key, value in lines.items():
        if key not in LINES:
            raise DeviceProfileError(f"{where} has {_shown(key)}; devices have {', '.join(LINES)}, and count or share")
        names, read = LINES[key]
        try:
            quantity = read(value)
        except ValueError as error:
            raise DeviceProfileError(f"{where}: {key} {error}") from error
        fields |= dict.fromkeys(names, quantity)
    try:
        return replace(base, **fields)
    except ValueError as error:
        raise DeviceProfileError(f"{where}: {error}") from error


def _quantity(units: Mapping[str, float], example: str) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        found = (
            re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([a-z]+)", value.strip().lower()) if _is_text(value) else None
        )
        if found is None or found[2] not in units:
            raise ValueError(f'is {_shown(value)}: write a number and one of {", ".join(units)}, such as "{example}"')
        return float(found[1]) * units[found[2]]

    return read


def _hour(value: Any) -> float:
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", value.strip()) if _is_text(value) else None
    if found is None:
        raise ValueError(f'is {_shown(value)}: write an hour of the day, such as "22:00"')
    return 3600.0 * int(found[1]) + 60.0 * int(found[2])


def _probability(value: Any) -> float:
    if _is_number(value):
        return float(value)
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,15})?)\s*%", value.strip()) if _is_text(value) else None
    if found is None:
        raise ValueError(f'is {_shown(value)}: write a share of tasks, such as "2%"')
    return float(found[1]) / 100


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _named(names: Any) -> str:
    return ", ".join(sorted(names))[:SHOWN_CHARACTERS]


def _shown(value: object) -> str:
    """A value as it was written, in part where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


TIME, RATE = _quantity(TIMES, "160ms"), _quantity(BITS_PER_SECOND, "1mbit")
LINES: dict[str, tuple[tuple[str, ...], Callable[[Any], float]]] = {  # a file's keys: the fields, and how to read them
    "step": (("seconds_per_step",), TIME),
    "rate": (("up_bits_per_second", "down_bits_per_second"), RATE),
    "up": (("up_bits_per_second",), RATE),
    "down": (("down_bits_per_second",), RATE),
    "round_trip": (("round_trip_seconds",), TIME),
    "present_from": (("present_from",), _hour),
    "present": (("present_seconds",), TIME),
    "failure": (("failure",), _probability),
}
