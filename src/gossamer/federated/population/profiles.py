"""Device profiles: speed, link and availability of devices, drawn from distributions or read from a TOML file."""

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
from gossamer.base.units import SHOWN_CHARACTERS, parse_rate, parse_seconds, shown
from gossamer.errors import GossamerError, require

DAY_SECONDS = 86_400.0
ROUNDING_SECONDS = 1e-6  # tolerance for a time computed from days


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """Speed, link and availability of one simulated device. Default: always available, without any delay.

    Args:
        seconds_per_step: duration of an optimizer step, 0 or more.
        up_bits_per_second: upload rate, above 0.
        down_bits_per_second: download rate, above 0.
        round_trip_seconds: network latency, 0 or more.
        present_from: start of the daily availability, in seconds after midnight.
        present_seconds: length of the daily availability, possibly past midnight; a day (86400): always available.
        failure: probability in [0, 1) that the device does not finish a task.

    Raises:
        ValueError: a value is out of range.

    Example:
        >>> phone = gossamer.federated.population.DeviceProfile(seconds_per_step=0.1, up_bits_per_second=1e6)
        >>> phone.training_seconds(10), phone.up_seconds(125_000)
        (1.0, 1.0)
    """

    seconds_per_step: float = 0.0
    up_bits_per_second: float = inf
    down_bits_per_second: float = inf
    round_trip_seconds: float = 0.0
    present_from: float = 0.0
    present_seconds: float = DAY_SECONDS
    failure: float = 0.0

    def __post_init__(self) -> None:
        require(
            isfinite(self.seconds_per_step) and self.seconds_per_step >= 0,
            f"seconds_per_step must be 0 or more, got {self.seconds_per_step}",
        )
        require(min(self.up_bits_per_second, self.down_bits_per_second) > 0, "rates must be above 0 bits per second")
        require(
            isfinite(self.round_trip_seconds) and self.round_trip_seconds >= 0,
            f"round_trip_seconds must be 0 or more, got {self.round_trip_seconds}",
        )
        require(0 <= self.failure < 1, f"failure must be a probability in [0, 1), got {self.failure}")
        require(
            0 <= self.present_from < DAY_SECONDS and 0 < self.present_seconds <= DAY_SECONDS,
            "present_from must be within a day, and present_seconds at most one: write present_from=8 * 3600",
        )

    @property
    def is_always_present(self) -> bool:
        return self.present_seconds >= DAY_SECONDS

    def training_seconds(self, steps: int) -> float:
        return steps * self.seconds_per_step

    def up_seconds(self, nbytes: int) -> float:
        """Seconds from sending the first byte until the server has all bytes."""
        return self.round_trip_seconds / 2 + 8 * nbytes / self.up_bits_per_second

    def down_seconds(self, nbytes: int) -> float:
        return self.round_trip_seconds / 2 + 8 * nbytes / self.down_bits_per_second


def presence(profile: DeviceProfile, moment: float) -> tuple[float, float]:
    """Start (at least `moment`) and end of the device's current or next availability. Time starts at midnight."""
    if profile.is_always_present:
        return moment, inf
    day = floor((moment - profile.present_from + ROUNDING_SECONDS) / DAY_SECONDS)
    begins = profile.present_from + day * DAY_SECONDS
    if moment + ROUNDING_SECONDS < begins + profile.present_seconds:
        return max(moment, begins), begins + profile.present_seconds
    begins = profile.present_from + (day + 1) * DAY_SECONDS
    return begins, begins + profile.present_seconds


class TaskTimes(NamedTuple):
    """Start of a task on its device and arrival of its result, in seconds of the virtual clock."""

    began: float
    arrived: float


@dataclass
class VirtualDevice:
    """A device that handles one task after another, and the time until which it is busy."""

    number: int
    profile: DeviceProfile
    seed: int = 0
    free_from: float = 0.0
    tasks: int = 0

    def fails_next(self) -> bool:
        """Whether the device fails its next task; drawn from the seed, its number and the task's number."""
        self.tasks += 1
        draw = rng.address(self.seed, "failure", self.number, self.tasks) / 2**63
        return draw < self.profile.failure

    def take(self, moment: float, down_bytes: int, steps: int, up_bytes: int) -> TaskTimes:
        """Times of a task sent at `moment`. The device is busy until it has sent the result."""
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
    """Draw heterogeneous devices. Device k is the same for any `count`.

    Compute:       seconds_per_sample e^(compute_sigma z) samples_per_step, z ~ N(0, 1). The defaults 5 ms and 0.6 are
                   those of FedScale (Lai et al. 2022, ICML).
    Links:         both rates share one factor e^(link_sigma z), so a slow device is slow in both directions.
    Availability:  a daily window of `present_seconds`, longer or shorter by up to a half, centered around `night_hour`
                   with a normal deviation: phones train while they charge (Bonawitz et al. 2019, MLSys).

    Args:
        count: number of devices.
        seed: of the draws.
        seconds_per_sample: median seconds per sample.
        compute_sigma: standard deviation of the log compute time.
        samples_per_step: batch size.
        up_bits_per_second: median upload rate.
        down_bits_per_second: median download rate.
        link_sigma: standard deviation of the log rates.
        round_trip_seconds: network latency of all devices.
        present_seconds: mean daily availability; a day (86400): always available.
        night_hour: mean center of the availability, in hours after midnight.
        night_sigma_hours: standard deviation of that center, in hours.
        failure: probability of a failed task, for all devices.

    Returns:
        The profiles.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> devices = gossamer.federated.population.drawn_profiles(100, seed=1)
        >>> len(devices)
        100
    """
    require(type(count) is int and count >= 1, f"count must be 1 or more devices, got {count!r}")
    require(type(samples_per_step) is int and samples_per_step >= 1, "samples_per_step must be 1 or more")
    require(
        isfinite(seconds_per_sample) and seconds_per_sample >= 0, "seconds_per_sample must be 0 or more, such as 0.005"
    )
    require(min(up_bits_per_second, down_bits_per_second) > 0, "rates must be above 0 bits per second: write 1e6")
    spreads = {"compute_sigma": compute_sigma, "link_sigma": link_sigma, "night_sigma_hours": night_sigma_hours}
    for name, spread in spreads.items():
        require(isfinite(spread) and spread >= 0, f"{name} must be 0 or more and finite, got {spread}")
    require(0 < present_seconds <= DAY_SECONDS, f"present_seconds must be above 0 and at most {DAY_SECONDS:.0f}")
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


MOST_BYTES, MOST_DOTS = 2**20, 50  # per file, and per line
MOST_DEVICES = 10_000_000  # with one description


class DeviceProfileError(GossamerError, ValueError):
    """A file of device profiles is invalid, or has too few devices."""


def read_profiles(path: str | Path, count: int) -> list[DeviceProfile]:
    """Read device profiles from a TOML file with one [[devices]] table per kind of devices.

        [default]               # for all kinds
        round_trip = "60ms"

        [[devices]]             # phones, at night
        share = 0.8             # of all devices; or count = 80 in every kind
        step = "160ms"          # of the optimizer
        up = "1mbit"
        down = "10mbit"         # or rate, for both
        present_from = "22:00"
        present = "8h"          # per day; default: always available
        failure = "2%"          # of started tasks

    Args:
        path: the file.
        count: number of devices.

    Returns:
        `count` profiles, kind after kind in the file's order.

    Raises:
        DeviceProfileError: with the file, the kind and the invalid value.

    Example:
        >>> path = directory / "devices.toml"
        >>> _ = path.write_text('[[devices]]\\nshare = 1.0\\nup = "1mbit"')
        >>> gossamer.federated.population.read_profiles(path, 10)[0].up_bits_per_second
        1000000.0
    """
    file = Path(path)
    table = _table_of(file)
    if unknown := table.keys() - {"default", "devices"}:
        raise DeviceProfileError(f"{file} has {_named(unknown)}; device profiles have [default] and [[devices]].")
    default, sorts = table.get("default", {}), table.get("devices", [])
    if not isinstance(default, dict) or not isinstance(sorts, list) or not all(isinstance(s, dict) for s in sorts):
        raise DeviceProfileError(
            f"{file}: [default] and [[devices]] must be headings, the latter in two brackets, with lines such as "
            'up = "1mbit" below them'
        )
    if not sorts:
        raise DeviceProfileError(
            f'{file} has no [[devices]], so there are no devices. Write [[devices]] and up = "1mbit" below it'
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
            raise ValueError(f"it has more than {MOST_BYTES} bytes. Describe each kind once: share = 0.5")
        text = file.read_text(encoding="utf-8")
        # The memory of a TOML parser grows with the square of the dots in a key.
        if any(line.count(".") > MOST_DOTS for line in text.splitlines()) or nesting(text) > DEEPEST_LEVELS:
            raise ValueError("a line of it has too many dots or brackets")
        return tomllib.loads(text)
    except (OSError, ValueError, MemoryError) as error:  # ValueError: of text, TOML and numbers
        what = str(error)[:SHOWN_CHARACTERS] or type(error).__name__
        raise DeviceProfileError(f"{str(file)[:SHOWN_CHARACTERS]} cannot be read as device profiles: {what}") from error


def _counts(sorts: Sequence[Mapping[str, Any]], count: int, file: Path) -> list[int]:
    """Number of devices of each kind."""
    by_count, by_share = ["count" in sort for sort in sorts], ["share" in sort for sort in sorts]
    if any(by_count) and any(by_share):
        raise DeviceProfileError(f"{file} has count of some devices and share of others: write one of both in all")
    if any(by_count):
        return _first(sorts, count, file)
    shares = [sort.get("share", 1 / len(sorts)) for sort in sorts]
    if any(by_share) != all(by_share):
        raise DeviceProfileError(f"{file} has share of some devices and not of others: write share in all")
    for number, share in enumerate(shares, 1):
        if not _is_number(share) or not 0 < share <= 1:
            raise DeviceProfileError(
                f"{_place(file, number)}: share must be above 0 and at most 1, got {shown(share)}: write share = 0.5"
            )
    if abs(sum(shares) - 1) > 1e-6:
        raise DeviceProfileError(f"{file}: the shares add up to {sum(shares):g}, and must add up to 1")
    exact = [share * count for share in shares]
    found = [int(each) for each in exact]
    by_rest = sorted(range(len(found)), key=lambda place: found[place] - exact[place])  # largest remainders first
    for place in by_rest[: count - sum(found)]:
        found[place] += 1
    return found


def _first(sorts: Sequence[Mapping[str, Any]], count: int, file: Path) -> list[int]:
    """Counts of each kind, for the first `count` devices."""
    found, left = [], count
    for number, sort in enumerate(sorts, 1):
        alike = sort.get("count", 1)
        if type(alike) is not int or not 1 <= alike <= MOST_DEVICES:
            raise DeviceProfileError(
                f"{_place(file, number)}: count must be 1 to {MOST_DEVICES} devices, got {shown(alike)}"
            )
        found.append(min(alike, left))
        left -= found[-1]
    if left:
        raise DeviceProfileError(
            f"{file} has {count - left} devices, but {count} are needed: raise a count, or write share = 0.5 in place "
            f"of counts, or --clients {count - left}"
        )
    return found


def _profile(base: DeviceProfile, lines: Mapping[str, Any], where: str) -> DeviceProfile:
    fields: dict[str, float] = {}
    for key, value in sorted(lines.items(), key=lambda line: line[0] != "rate"):  # `up` and `down` replace its ways
        if key not in LINES:
            raise DeviceProfileError(f"{where} has {shown(key)}; devices have {', '.join(LINES)}, and count or share")
        names, read = LINES[key]
        try:
            quantity = read(value)
        except ValueError as error:
            raise DeviceProfileError(f"{where}, {key}: {error}") from error
        fields |= dict.fromkeys(names, quantity)
    try:
        return replace(base, **fields)
    except ValueError as error:
        raise DeviceProfileError(f"{where}: {error}") from error


def _hour(value: Any) -> float:
    found = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", value.strip()) if _is_text(value) else None
    if found is None:
        raise ValueError(f'{shown(value)} is not an hour of the day. Write one such as "22:00".')
    return 3600.0 * int(found[1]) + 60.0 * int(found[2])


def _probability(value: Any) -> float:
    if _is_number(value):
        return float(value)
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,15})?)\s*%", value.strip()) if _is_text(value) else None
    if found is None:
        raise ValueError(f'{shown(value)} is not a share of tasks. Write one such as "2%".')
    return float(found[1]) / 100


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _named(names: Any) -> str:
    return ", ".join(sorted(names))[:SHOWN_CHARACTERS]


LINES: dict[str, tuple[tuple[str, ...], Callable[[Any], float]]] = {  # a file's keys: the fields, and how to read them
    "step": (("seconds_per_step",), parse_seconds),
    "rate": (("up_bits_per_second", "down_bits_per_second"), parse_rate),
    "up": (("up_bits_per_second",), parse_rate),
    "down": (("down_bits_per_second",), parse_rate),
    "round_trip": (("round_trip_seconds",), parse_seconds),
    "present_from": (("present_from",), _hour),
    "present": (("present_seconds",), parse_seconds),
    "failure": (("failure",), _probability),
}
