"""Moment rounds: in every how many of them what an optimizer remembers is averaged along with the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from gossamer.errors import require

ALIGN, AVERAGE, KEEP, RESET = "align", "average", "keep", "reset"
OPTIMIZER_STATES = (KEEP, ALIGN, AVERAGE, RESET)
OWN, AGREED_MEAN, LARGEST_MEAN = "own", "agreed", "amsgrad"
SECOND_MOMENTS = (OWN, AGREED_MEAN, LARGEST_MEAN)


@dataclass(frozen=True)
class MomentRounds:
    """In every how many rounds of a fragment the optimizer's state about it is averaged, by kind; 0: never.

    MomentRounds(first=3, second=6).cycle == 6
    """

    first: int = 0  # momentum
    second: int = 0  # Adam's mean of squares
    others: int = 0  # everything else that an optimizer keeps about each entry
    named: tuple[str, ...] = ()  # of the first two, those that have a period of their own
    divisor: str = OWN  # the second moment by which steps divide: a worker's own, the last mean, or the largest mean

    @property
    def shared_divisor(self) -> bool:
        """Whether steps divide by a second moment that all workers hold alike between two rounds."""
        return self.divisor != OWN

    @property
    def keeps_largest(self) -> bool:
        """Whether that second moment never falls in any entry."""
        return self.divisor == LARGEST_MEAN

    @property
    def any(self) -> bool:
        return bool(self.first or self.second or self.others)

    @property
    def cycle(self) -> int:
        """Rounds of a fragment after which all repeats itself."""
        return lcm(*(each for each in (self.first, self.second, self.others) if each))


NEVER, ALWAYS = MomentRounds(), MomentRounds(1, 1, 1)


def moment_rounds(
    period: int,
    optimizer_state: str,
    first_moment_period: int | None,
    second_moment_period: int | None,
    second_moment: str = OWN,
) -> MomentRounds:
    """From periods in steps; optimizer_state: the fate of moments that have none."""
    if second_moment != OWN and second_moment_period is None:
        second_moment_period = period
    own = {"first": first_moment_period, "second": second_moment_period}
    rest = ALWAYS if optimizer_state == AVERAGE else NEVER
    given = {name: steps // period for name, steps in own.items() if steps is not None}
    first, second = given.get("first", rest.first), given.get("second", rest.second)
    return MomentRounds(first, second, rest.others, tuple(given), second_moment)


def check_moments(
    period: int,
    optimizer_state: str,
    first_moment_period: int | None,
    second_moment_period: int | None,
    second_moment: str = OWN,
) -> None:
    require(
        optimizer_state in OPTIMIZER_STATES,
        f'optimizer_state must be "keep", "align", "average" or "reset", got {optimizer_state!r}: it is the fate of '
        'momenta at a merge. Write optimizer_state="align".',
    )
    require(
        second_moment in SECOND_MOMENTS,
        f'second_moment must be "own", "agreed" or "amsgrad", got {second_moment!r}: local steps divide by this '
        'second moment of Adam. Write second_moment="agreed".',
    )
    require(
        second_moment == OWN or optimizer_state != RESET,
        f'second_moment="{second_moment}" needs the second moment that optimizer_state="reset" drops. Leave out one of '
        "them.",
    )
    require(
        optimizer_state != ALIGN or (first_moment_period is None and second_moment == OWN),
        'optimizer_state="align" corrects each worker\'s own first moment, and first_moment_period or second_moment '
        "replaces the moments that this follows from. Leave out one of them.",
    )
    for name, steps in {"first": first_moment_period, "second": second_moment_period}.items():
        if steps is None:
            continue
        require(
            optimizer_state != RESET,
            f'{name}_moment_period averages what optimizer_state="reset" throws away: leave out one of them',
        )
        require(
            steps >= period and steps % period == 0,
            f"moments are averaged along with parameters, so {name}_moment_period is a multiple of period={period}, "
            f"not {steps}: write {name}_moment_period={max(1, round(steps / period)) * period}",
        )
