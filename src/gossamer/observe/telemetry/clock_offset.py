"""Clock offset: what another machine's clock shows beyond this one's, from round trips, with a bound of the error."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

WINDOW_SECONDS = 600.0  # round trips that are remembered
APART_SECONDS = 20.0  # between two of them, at least, to tell how fast the clocks drift apart
MOST_DRIFT = 500e-6  # seconds a second; quartz has a tenth of that
LOOSE_DRIFT = 20e-6  # by which a drift that was followed may be wrong


class Offset(NamedTuple):
    """Add `seconds` to this machine's clock to have the other's; it is right within `error`, if ways take equally long
    or not: a reply cannot leave before the request nor come after it was heard."""

    seconds: float
    error: float


@dataclass(frozen=True)
class _RoundTrip:
    moment: float  # by this machine's clock, in its middle
    offset: float
    seconds: float


class ClockOffset:
    """Follows the offset of another machine's clock from round trips between the two.

    The offset is that of the trip whose bound is least: half its round trip, and what the clocks may have drifted
    since beyond the drift that was followed, which is the slope between the shortest trips of the older and the newer
    half. Equal ways make it exact; unequal ones wrong by half their difference, which the bound includes.
    source: Cristian 1989, Distributed Computing 3.
    """

    def __init__(self) -> None:
        self._trips: deque[_RoundTrip] = deque()

    def add(self, sent: float, told: float, received: float) -> None:
        """A request left at `sent` and its answer came at `received`, by this clock; in between the other showed
        `told`."""
        middle = (sent + received) / 2
        trip = _RoundTrip(middle, told - middle, received - sent)
        if received < sent or self._jumped(trip):
            self._trips.clear()  # one of the clocks was set
        self._trips.append(trip)
        while self._trips[0].moment < middle - WINDOW_SECONDS:
            self._trips.popleft()

    def at(self, moment: float) -> Offset | None:
        """The offset when this clock showed `moment`; None before the first round trip."""
        if not self._trips:
            return None
        drift = self._drift()
        loose = LOOSE_DRIFT if drift is not None else MOST_DRIFT

        def bound(trip: _RoundTrip) -> float:
            return trip.seconds / 2 + loose * abs(moment - trip.moment)

        best = min(self._trips, key=bound)
        return Offset(best.offset + (drift or 0.0) * (moment - best.moment), bound(best))

    def _jumped(self, trip: _RoundTrip) -> bool:
        """Two offsets that are further apart than both bounds, and any drift, allow are not of the same clocks."""
        if not self._trips:
            return False
        before = self._trips[-1]
        passed = trip.moment - before.moment
        allowed = (trip.seconds + before.seconds) / 2 + MOST_DRIFT * abs(passed)
        return passed < 0 or abs(trip.offset - before.offset) > allowed

    def _drift(self) -> float | None:
        """Seconds a second by which the other clock gains; None while too little time has passed to tell."""
        half = (self._trips[0].moment + self._trips[-1].moment) / 2
        older = [trip for trip in self._trips if trip.moment <= half]
        newer = [trip for trip in self._trips if trip.moment > half]
        if not newer:
            return None
        first, last = (min(trips, key=lambda trip: trip.seconds) for trips in (older, newer))
        if last.moment - first.moment < APART_SECONDS:
            return None
        slope = (last.offset - first.offset) / (last.moment - first.moment)
        return max(-MOST_DRIFT, min(MOST_DRIFT, slope))
