"""Limits: upload and download rates of a machine by hour of the day, and a cap on the bytes of a day."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.base.units import BYTE_UNITS, bytes_text, parse_quantity, parse_rate, rate_text
from gossamer.errors import GossamerError

NONE = "none"
LEAST_BITS_PER_SECOND = 64e3
LEAST_CAP_BYTES = 1_000_000
HOURS = re.compile(r"^(?P<rate>.*?)\s+at\s+(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)$", re.IGNORECASE)
DAY_MINUTES = 24 * 60


class LimitError(GossamerError, ValueError):
    """A bandwidth limit is invalid."""


@dataclass(frozen=True)
class Hours:
    """Minutes of the day, from `begin` until before `end`, past midnight if `end` is not later."""

    begin: int
    end: int

    def __contains__(self, minute: int) -> bool:
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end


@dataclass(frozen=True)
class RateSchedule:
    """A rate in bits per second, and others at some hours of the local day. None: no limit."""

    usual: float | None = None
    exceptions: tuple[tuple[Hours, float | None], ...] = ()  # the last that contains the minute counts
    text: str = NONE

    @classmethod
    def read(cls, text: str) -> RateSchedule:
        """Parse RATE[; RATE at HH:MM-HH:MM]..., such as `5mbit; none at 22:00-06:00`. Raises LimitError."""
        first, *others = text.split(";")
        return cls(_rate(first), tuple(_exception(other.strip()) for other in others), text.strip())

    def at(self, minute: int) -> float | None:
        """The rate at a minute of the day."""
        return next((rate for hours, rate in reversed(self.exceptions) if minute in hours), self.usual)


@dataclass(frozen=True)
class MachineLimits:
    """All limits of one machine. daily_cap_bytes: of sent and received bytes together; None for no cap."""

    upload: RateSchedule = RateSchedule()
    download: RateSchedule = RateSchedule()
    daily_cap_bytes: int | None = None

    def texts(self) -> dict[str, str]:
        """The limits as they are written, by name of `read`'s arguments."""
        cap = NONE if self.daily_cap_bytes is None else f"{self.daily_cap_bytes} B"
        return {"upload": self.upload.text, "download": self.download.text, "daily_cap": cap}

    def changed(self, texts: Mapping[str, str | None]) -> MachineLimits:
        """These limits, except for the given ones. Raises LimitError."""
        new = {**self.texts(), **{name: text for name, text in texts.items() if text is not None}}
        return MachineLimits(
            RateSchedule.read(new["upload"]), RateSchedule.read(new["download"]), read_cap(new["daily_cap"])
        )

    def __str__(self) -> str:
        cap = "" if self.daily_cap_bytes is None else f", {bytes_text(self.daily_cap_bytes)} per day"
        return f"upload {self.upload.text}, download {self.download.text}{cap}"


def read_cap(text: str) -> int | None:
    """Parse a number of bytes such as 10GB, or `none`. Raises LimitError."""
    if text.strip().lower() == NONE:
        return None
    units = {unit: 1000.0**power for power, unit in enumerate(BYTE_UNITS)}
    try:
        nbytes = int(parse_quantity(text, units, "a number of bytes", "10GB"))
    except ValueError as error:
        raise LimitError(f"{error} For no cap, write `none`.") from None
    if nbytes < LEAST_CAP_BYTES:
        raise LimitError(
            f"a daily cap of {text.strip()} allows no training: the least cap is {bytes_text(LEAST_CAP_BYTES)}. Write "
            "10GB, or `none` for no cap."
        )
    return nbytes


def _rate(text: str) -> float | None:
    if text.strip().lower() == NONE:
        return None
    try:
        bits_per_second = parse_rate(text)
    except ValueError as error:
        raise LimitError(f"{error} For no limit, write `none`.") from None
    if bits_per_second < LEAST_BITS_PER_SECOND:
        raise LimitError(
            f"a limit of {text.strip()} would delay heartbeats until peers count this machine as lost: the least limit "
            f"is {rate_text(LEAST_BITS_PER_SECOND)}. Write 5mbit, or `none` for no limit."
        )
    return bits_per_second


def _exception(text: str) -> tuple[Hours, float | None]:
    found = HOURS.match(text)
    minutes = [] if found is None else [60 * int(found[each]) + int(found[each + 1]) for each in (2, 4)]
    if found is None or any(minute > DAY_MINUTES for minute in minutes) or int(found[3]) > 59 or int(found[5]) > 59:
        raise LimitError(
            f"{text!r} has no hours of the day. Write a rate and its hours: 5mbit; none at 22:00-06:00; 1mbit at "
            "12:00-13:00"
        )
    return Hours(minutes[0] % DAY_MINUTES, minutes[1] % DAY_MINUTES), _rate(found["rate"])
