"""Device profile: one device's speed, link and hours of presence, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gossamer.errors import require


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device. The defaults are a device that is always there, on an instant network."""

    seconds_per_step: float = 0.0  # of its optimizer
    up_bits_per_second: float = inf
    down_bits_per_second: float = inf
    round_trip_seconds: float = 0.0
    present_from: float = 0.0  # of each day, in seconds
    present_seconds: float = 86_400.0  # of each day; a day: always
    failure: float = 0.0  # probability that it does not finish a task that it began

    def __post_init__(self) -> None:
        require(self.seconds_per_step >= 0, f"seconds_per_step is 0 or more, not {self.seconds_per_step}")
        require(min(self.up_bits_per_second, self.down_bits_per_second) > 0, "rates are above 0 bits per second")
        require(self.round_trip_seconds >= 0, f"round_trip_seconds is 0 or more, not {self.round_trip_seconds}")
        require(0 <= self.failure < 1, f"failure is a probability in [0, 1), not {self.failure}")
        require(
            0 <= self.present_from < 86_400 and 0 < self.present_seconds <= 86_400,
            "present_from lies within a day, and present_seconds is at most one: write present_from=8 * 3600",
        )
