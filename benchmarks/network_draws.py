"""Network draws: networks at random, from a home line to a data center's, half of which slow down in mid-run."""

import random
from dataclasses import dataclass

SLOWEST, FASTEST = 5e6, 10e9  # bits a second
SHORTEST, LONGEST = 0.1e-3, 150e-3  # seconds of a round trip
DROP = 10


@dataclass(frozen=True)
class Draw:
    """One network. drops: whether its rate falls to a tenth at a moment that the reader chooses."""

    bits_per_second: float
    round_trip_seconds: float
    drops: bool

    @property
    def before(self) -> str:
        return self._text(self.bits_per_second)

    @property
    def after(self) -> str:
        return self._text(self.bits_per_second / (DROP if self.drops else 1))

    def _text(self, bits_per_second: float) -> str:
        return f"{_rounded(bits_per_second / 1e6)}mbit,{_rounded(1000 * self.round_trip_seconds)}ms"


def _rounded(value: float) -> str:
    return f"{float(f'{value:.3g}'):g}"


def draw(count: int, seed: int) -> list[Draw]:
    """`count` networks, uniform on the logarithms of both scales; every second one drops."""
    chance = random.Random(seed)
    return [
        Draw(
            SLOWEST * (FASTEST / SLOWEST) ** chance.random(),
            SHORTEST * (LONGEST / SHORTEST) ** chance.random(),
            drops=bool(number % 2),
        )
        for number in range(count)
    ]
