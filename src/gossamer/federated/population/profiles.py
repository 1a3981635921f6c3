"""Device profiles: speed, link and hours of devices, given, drawn from distributions, or read from a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, floor, inf, isfinite
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from gossamer.base import rng
from gossamer.base.json_text import DEEPEST_LEVELS, nesting
from gossamer.comm.network.parse import BITS_PER_SECOND, SECONDS
from gossamer.errors import GossamerError, require

DAY_SECONDS = 86_400.0
ROUNDING_SECONDS = 1e-6  # by which a moment computed from days may be early


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device. The defaults are a device that is always there, on an instant network."""

    seconds_per_step: float = 0.0  # of its optimizer
    up_bits_per_second: float = inf
    down_bits_per_second: float = inf
    round_trip_seconds: float = 0.0
    present_from: float = 0.0  # of each day, in seconds
    present_seconds: float = DAY_SECONDS  # of each day, into the next where it is past midnight; a day: always
    failure: float = 0.0  # probability that it does not finish a task that it began

    def __post_init__(self) -> None:
        require(
            isfinite(self.seconds_per_step) and self.seconds_per_step >= 0,
            f"seconds_per_step is 0 or more, not {self.seconds_per_step}",
        )
        require(min(self.up_bits_per_second, self.down_bits_per_second) > 0, "rates are above 0 bits per second")
        require(
            isfinite(self.round_trip_seconds) and self.round_trip_seconds >= 0,
            f"round_trip_seconds is 0 or more, not {self.round_trip_seconds}",
        )
        require(0 <= self.failure < 1, f"failure is a probability in [0, 1), not {self.failure}")
        require(
            0 <= self.present_from < DAY_SECONDS and 0 < self.present_seconds <= DAY_SECONDS,
            "present_from lies within a day, and present_seconds is at most one: write present_from=8 * 3600",
        )

    @property
    def is_always_present(self) -> bool:
        return self.present_seconds >= DAY_SECONDS

    def training_seconds(self, steps: int) -> float:
        return steps * self.seconds_per_step

    def up_seconds(self, nbytes: int) -> float:
        """From its first byte leaving to the server having all."""
        return self.round_trip_seconds / 2 + 8 * nbytes / self.up_bits_per_second

    def down_seconds(self, nbytes: int) -> float:
        return self.round_trip_seconds / 2 + 8 * nbytes / self.down_bits_per_second


def presence(profile: DeviceProfile, moment: float) -> tuple[float, float]:
    """The device's present or next stay: from when, at least `moment`, and until when. Time begins at a midnight."""
    if profile.is_always_present:
        return moment, inf
    day = floor((moment - profile.present_from + ROUNDING_SECONDS) / DAY_SECONDS)
    begins = profile.present_from + day * DAY_SECONDS
    if moment + ROUNDING_SECONDS < begins + profile.present_seconds:
        return max(moment, begins), begins + profile.present_seconds
    begins = profile.present_from + (day + 1) * DAY_SECONDS
    return begins, begins + profile.present_seconds


class TaskTimes(NamedTuple):
    """When a task came to its device, and when what it sends arrives: seconds of the virtual clock."""

    began: float
    arrived: float


@dataclass
class VirtualDevice:
    """A device that answers one task after another, and until when it is busy."""

    number: int
    profile: DeviceProfile
    seed: int = 0
    free_from: float = 0.0
    tasks: int = 0

    def fails_next(self) -> bool:
        """Whether the device does not finish its next task: drawn by its number and the task's."""
        self.tasks += 1
        draw = rng.address(self.seed, "failure", self.number, self.tasks) / 2**63
        return draw < self.profile.failure

    def take(self, moment: float, down_bytes: int, steps: int, up_bytes: int) -> TaskTimes:
        """The times of a task that is sent at `moment`, which occupies the device until its answer has left."""
        profile = self.profile
        came = moment + profile.down_seconds(down_bytes)
        began = presence(profile, max(came, self.free_from))[0]
        self.free_from = began + profile.seconds_per_step * steps + 8 * up_bytes / profile.up_bits_per_second
        return TaskTimes(began, self.free_from + profile.round_trip_seconds / 2)


def drawn_profiles(
    count: int,
    seed: int = 0,
    *,
    seconds_per_sample: float = 0.005,
    compute_sigma: float = 0.6,
    samples_per_step: int = 32,
    up_bits_per_second: float = 5e6,
    down_bits_per_second: float = 20e6,
    link_sigma: float = 0.8,
    round_trip_seconds: float = 0.06,
    present_seconds: float = DAY_SECONDS / 3,
    night_hour: float = 2.0,
    night_sigma_hours: float = 3.0,
    failure: float = 0.0,
) -> list[DeviceProfile]:
    """`count` devices unlike each other; device k is the same however many are drawn.

    compute     seconds_per_sample e^(compute_sigma z), z ~ N(0, 1): 5 ms and 0.6 are FedScale's own (Lai et al. 2022,
                ICML), times `samples_per_step` for a step
    links       up and down share one draw e^(link_sigma z): who has a slow line has it both ways; medians as given
    presence    a window of `present_seconds` a day, longer or shorter by up to a half, whose middle is normal around
                `night_hour`: phones take part while they charge (Bonawitz et al. 2019, MLSys). A day: always there
    failure     the same for all

    Raises ValueError for a median that is not positive, or a spread below 0.
    """
    require(type(count) is int and count >= 1, f"count is 1 or more devices, not {count!r}")
    require(type(samples_per_step) is int and samples_per_step >= 1, "samples_per_step is a batch's, 1 or more")
    require(isfinite(seconds_per_sample) and seconds_per_sample >= 0, "seconds_per_sample is 0 or more: write 0.005")
    require(min(up_bits_per_second, down_bits_per_second) > 0, "rates are above 0 bits per second: write 1e6")
    spreads = {"compute_sigma": compute_sigma, "link_sigma": link_sigma, "night_sigma_hours": night_sigma_hours}
    for name, spread in spreads.items():
        require(isfinite(spread) and spread >= 0, f"{name} is a spread, 0 or more and finite, not {spread}")
    require(0 < present_seconds <= DAY_SECONDS, f"present_seconds is above 0 and at most a day's {DAY_SECONDS:.0f}")
    always, profiles = present_seconds >= DAY_SECONDS, []
    for number in range(count):
        random = Random(rng.address(seed, "device profile", number))
        seconds_per_step = seconds_per_sample * samples_per_step * exp(compute_sigma * random.gauss(0.0, 1.0))
        line = exp(link_sigma * random.gauss(0.0, 1.0))
        middle = random.gauss(night_hour * 3600, night_sigma_hours * 3600)
        length = DAY_SECONDS if always else min(present_seconds * random.uniform(0.5, 1.5), DAY_SECONDS)
        profiles.append(
            DeviceProfile(
                seconds_per_step=seconds_per_step,
                up_bits_per_second=up_bits_per_second * line,
                down_bits_per_second=down_bits_per_second * line,
                round_trip_seconds=round_trip_seconds,
                present_from=0.0 if always else (middle - length / 2) % DAY_SECONDS,
                present_seconds=length,
                failure=failure,
            )
        )
    return profiles


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
