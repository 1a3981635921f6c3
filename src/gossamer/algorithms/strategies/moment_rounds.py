"""Moment rounds: the rounds in which the optimizer's state is averaged with the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Protocol

from gossamer.errors import require

ALIGN, AVERAGE, KEEP, RESET = "align", "average", "keep", "reset"
OPTIMIZER_STATES = (KEEP, ALIGN, AVERAGE, RESET)
OWN, AGREED_MEAN, LARGEST_MEAN = "own", "agreed", "amsgrad"
SECOND_MOMENTS = (OWN, AGREED_MEAN, LARGEST_MEAN)


@dataclass(frozen=True)
class MomentRounds:
    """The number of rounds of a fragment between two averages of the optimizer's state, by kind; 0: never.

    MomentRounds(first=3, second=6).cycle == 6
    """

    first: int = 0  # momentum
    second: int = 0  # Adam's mean of squares
    others: int = 0  # all other per-entry state of an optimizer
    named: tuple[str, ...] = ()  # those of the first two with a separate period
    divisor: str = OWN  # second moment in the denominator of a step: the local one, the last mean, or the largest mean

    @property
    def shared_divisor(self) -> bool:
        """Whether steps divide by a second moment that is equal on all workers between two rounds."""
        return self.divisor != OWN

    @property
    def keeps_largest(self) -> bool:
        """Whether that second moment never decreases in any entry."""
        return self.divisor == LARGEST_MEAN

    @property
    def any(self) -> bool:
        return bool(self.first or self.second or self.others)

    @property
    def cycle(self) -> int:
        """Rounds of a fragment after which the pattern repeats."""
        return lcm(*(each for each in (self.first, self.second, self.others) if each))


NEVER, ALWAYS = MomentRounds(), MomentRounds(1, 1, 1)


class MomentPeriods(Protocol):
    """A strategy with periods of the optimizer's moments, in steps. optimizer_state applies to moments without one."""

    @property
    def period(self) -> int: ...
    @property
    def optimizer_state(self) -> str: ...
    @property
    def first_moment_period(self) -> int | None: ...
    @property
    def second_moment_period(self) -> int | None: ...
    @property
    def second_moment(self) -> str: ...


def moment_rounds(strategy: MomentPeriods) -> MomentRounds:
    """Convert periods in steps to rounds."""
    second_moment, second_period = strategy.second_moment, strategy.second_moment_period
    if second_moment != OWN and second_period is None:
        second_period = strategy.period
    own = {"first": strategy.first_moment_period, "second": second_period}
    rest = ALWAYS if strategy.optimizer_state == AVERAGE else NEVER
    given = {name: steps // strategy.period for name, steps in own.items() if steps is not None}
    first, second = given.get("first", rest.first), given.get("second", rest.second)
    return MomentRounds(first, second, rest.others, tuple(given), second_moment)


def check_moments(strategy: MomentPeriods) -> None:
    """Raise ValueError for periods that contradict each other."""
    period, optimizer_state, second_moment = strategy.period, strategy.optimizer_state, strategy.second_moment
    periods = {"first": strategy.first_moment_period, "second": strategy.second_moment_period}
    require(
        optimizer_state in OPTIMIZER_STATES,
        f'optimizer_state must be "keep", "align", "average" or "reset", got {optimizer_state!r}: it selects the '
        'handling of momenta at a merge. Write optimizer_state="align".',
    )
    require(
        second_moment in SECOND_MOMENTS,
        f'second_moment must be "own", "agreed" or "amsgrad", got {second_moment!r}: it selects the second moment of '
        'Adam in the denominator of local steps. Write second_moment="agreed".',
    )
    require(
        second_moment == OWN or optimizer_state != RESET,
        f'second_moment="{second_moment}" needs the second moment that optimizer_state="reset" drops. Omit one of '
        "them.",
    )
    require(
        optimizer_state != ALIGN or (periods["first"] is None and second_moment == OWN),
        'optimizer_state="align" corrects each worker\'s own first moment, and first_moment_period or second_moment '
        "replaces the moments that the correction is computed from. Omit one of them.",
    )
    for name, steps in periods.items():
        if steps is None:
            continue
        require(
            optimizer_state != RESET,
            f'{name}_moment_period averages a moment that optimizer_state="reset" drops. Omit one of them.',
        )
        require(
            steps >= period and steps % period == 0,
            f"{name}_moment_period must be a multiple of period={period}, since moments are averaged with parameters, "
            f"got {steps}. Write {name}_moment_period={max(1, round(steps / period)) * period}.",
        )
