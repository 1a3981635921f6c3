"""Device profile: one device's speed, link and hours of presence, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite

from gossamer.errors import require

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

    def is_present(self, moment: float) -> bool:
        """Whether it is there, so many seconds after a midnight."""
        since = (moment - self.present_from + ROUNDING_SECONDS) % DAY_SECONDS
        return self.is_always_present or since < self.present_seconds

    def next_presence(self, moment: float) -> float:
        """The first moment, from this one on, at which it is there."""
        return moment if self.is_present(moment) else moment + (self.present_from - moment) % DAY_SECONDS

    def training_seconds(self, steps: int) -> float:
        return steps * self.seconds_per_step

    def up_seconds(self, nbytes: int) -> float:
        """From its first byte leaving to the server having all."""
        return self.round_trip_seconds / 2 + 8 * nbytes / self.up_bits_per_second

    def down_seconds(self, nbytes: int) -> float:
        return self.round_trip_seconds / 2 + 8 * nbytes / self.down_bits_per_second
