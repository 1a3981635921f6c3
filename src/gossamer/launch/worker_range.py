"""Worker range: says between how many workers an elastic run trains, and how many it begins with."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.errors import require

MOST_WORKERS = 2**16


@dataclass(frozen=True, kw_only=True)
class WorkerRange:
    """least: below, those that are left wait for others; most: beyond, whoever comes waits; initial: started at first.

    Raises ValueError unless 1 <= least <= initial <= most.
    """

    least: int
    most: int
    initial: int

    def __post_init__(self) -> None:
        require(self.least >= 1, f"an elastic run needs at least 1 worker to go on, not {self.least}")
        require(self.most <= MOST_WORKERS, f"{self.most} workers are more than any run's: at most {MOST_WORKERS}")
        require(
            self.least <= self.most,
            f"at least {self.least} and at most {self.most} workers leave no number between: write "
            f"{self.most}:{self.least}",
        )
        require(
            self.least <= self.initial <= self.most,
            f"a run of {self.least} to {self.most} workers cannot begin with {self.initial}: write "
            f"{self.least}:{self.most}:{min(max(self.initial, self.least), self.most)}",
        )

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def read_worker_range(text: str) -> WorkerRange:
    """What MIN:MAX or MIN:MAX:FIRST means; a run begins with MAX where FIRST is left out. Raises ValueError."""
    numbers = text.split(":")
    if not 2 <= len(numbers) <= 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{text!r} is no range of workers. Write MIN:MAX, such as 2:8, or MIN:MAX:FIRST")
    least, most, *first = (int(number[:9]) for number in numbers)
    return WorkerRange(least=least, most=most, initial=first[0] if first else most)
