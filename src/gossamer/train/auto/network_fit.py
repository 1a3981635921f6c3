"""Network fit: rate and latency from all ranks' steps. A slow worker must not look like a slow network.

Who waits for others spends that time on the wire, too; the last to come waits for nobody, so what it spends there is
the network's. Of every round, therefore, the rank that waited least is believed, and of all rounds the middle one.

    wire = bytes_sent * seconds_per_byte + trips * trip_seconds

One rung gives one such equation in two unknowns. The latency comes from the looks themselves, which are short messages;
where it is not known from there, from the looks before and after a change of rungs: two rungs, two equations. Else
those two looks teach how far the model errs. The line is the same before and after, so of the two rungs the one that
sends more bytes tells the line, and what the other takes beside its price is that rung's own, from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from gossamer.train.auto.measurement import Measurement, StepSeconds, common_steps

LOOK_TRIPS = 2  # of a look's exchange: lengths, then texts
LATENCY_SHARE = 0.9  # of the wire's seconds, at most: bytes take some time, too
LEAST_SECONDS_PER_BYTE = 1e-12  # a terabyte per second, where nothing could be measured
MOST_FACTOR = 3.0  # by which the model may err; what differs by more is another line

Factors = Mapping[str, float]
NO_FACTORS: Factors = {}


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """A step as all ranks together saw it, since the last look. In seconds."""

    step: float  # of the slowest rank
    computing: float  # of the training thread of the slowest rank
    waiting: float  # of the rank that waited least, as are the next two
    wire: float
    codec: float
    bytes_sent: float  # of the rank that sent most
    steps: int  # that it stands for


Chooser = Callable[[Sequence[StepSeconds]], StepSeconds]


def waited_least(ranks: Sequence[StepSeconds]) -> StepSeconds:
    """The rank that came last, so that others waited for it."""
    return min(ranks, key=lambda rank: rank.waiting)


def observe(measurements: Sequence[Measurement], period: int, believed: Chooser = waited_least) -> StepWindow | None:
    """Make one window of all ranks' measurements, in order of rank; None where no rank made a whole period."""
    ranks = [_rounds(steps, period) for steps in common_steps(measurements)]
    rounds = list(zip(*ranks, strict=True))
    if not rounds:
        return None
    least = [believed(each) for each in rounds]
    return StepWindow(
        step=median_low(max(rank.seconds for rank in each) for each in rounds),
        computing=median_low(max(rank.computing for rank in each) for each in rounds),
        waiting=median_low(rank.waiting for rank in least),
        wire=median_low(rank.wire for rank in least),
        codec=median_low(rank.codec for rank in least),
        bytes_sent=max(each.bytes_sent for each in measurements if each.steps),
        steps=min(each.stands_for for each in measurements if each.steps),
    )


def _rounds(steps: Sequence[StepSeconds], period: int) -> list[StepSeconds]:
    """A step on average over each whole period; one round is in each, wherever it begins."""
    latest = steps[len(steps) % period :]
    periods = [latest[first : first + period] for first in range(0, len(latest), period)]
    return [StepSeconds(*(sum(numbers) / period for numbers in zip(*each, strict=True))) for each in periods]


@dataclass(frozen=True, kw_only=True)
class FittedLine:
    """The network as a worker sees it."""

    seconds_per_byte: float  # of payload that it sends, while all do
    trip_seconds: float  # of a short message, one way

    def wire_seconds(self, bytes_sent: float, trips: float) -> float:
        return bytes_sent * self.seconds_per_byte + trips * self.trip_seconds

    @property
    def bits_per_second(self) -> float:
        return 8 / self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class Equation:
    """One rung's step on a line: what was sent, and how long it took."""

    rung: str
    bytes_sent: float
    trips: float
    wire: float
    waited_for: bool  # most of it, by the training thread: what is hidden is not seen in full


def fit(
    now: Equation,
    measurements: Sequence[Measurement],
    before: Equation | None,
    known: FittedLine | None,
    factors: Factors = NO_FACTORS,
) -> tuple[FittedLine, Factors]:
    """The line by one equation, and by what is known of its latency; and what the model errs by.

    before: of the last look, which teaches something if it was another rung's. known: the line at the last look.
    factors: how many times its price's wire a rung takes, by name.
    """
    heard = [each.exchange_seconds for each in measurements if each.exchange_seconds is not None]
    by_look = min(heard, default=0.0) / LOOK_TRIPS  # the last to come waits for nobody
    learned = known.trip_seconds if known is not None else 0.0
    other = before if before is not None and before.rung != now.rung else None
    if other is not None and not heard and other.waited_for and now.waited_for:
        learned = _latency(other, now)
    trip_seconds = max(by_look, learned)
    if other is not None and heard:
        factors = _calibrated(now, other, trip_seconds, factors)
    return line_of(_priced(now, factors), trip_seconds), factors


def _calibrated(now: Equation, other: Equation, trip_seconds: float, factors: Factors) -> Factors:
    """Of two rungs on one line the one that sends more bytes tells the line; the other's factor makes it agree.
    Where they disagree by too much the line has changed in between, and nothing is learned."""
    more, fewer = (now, other) if now.bytes_sent >= other.bytes_sent else (other, now)
    factors = {more.rung: 1.0, **factors} if more is other else {**factors, more.rung: 1.0}
    foretold = line_of(_priced(more, factors), trip_seconds).wire_seconds(fewer.bytes_sent, fewer.trips)
    if foretold <= MOST_FACTOR * fewer.wire and fewer.wire <= MOST_FACTOR * foretold:
        return {**factors, fewer.rung: fewer.wire / foretold}
    return factors


def _priced(equation: Equation, factors: Factors) -> Equation:
    return replace(equation, wire=equation.wire / factors.get(equation.rung, 1.0))


def line_of(now: Equation, trip_seconds: float) -> FittedLine:
    """The line of so long a trip, or of a shorter one where the wire took less time than such trips would."""
    if now.trips:
        trip_seconds = min(trip_seconds, LATENCY_SHARE * now.wire / now.trips)
    left = max(0.0, now.wire - now.trips * trip_seconds)
    per_byte = left / now.bytes_sent if now.bytes_sent else 0.0
    return FittedLine(seconds_per_byte=max(per_byte, LEAST_SECONDS_PER_BYTE), trip_seconds=trip_seconds)


def _latency(a: Equation, b: Equation) -> float:
    """Where two lines of (bytes, trips) cross; 0 where they are parallel."""
    across = b.trips * a.bytes_sent - a.trips * b.bytes_sent
    return max(0.0, (b.wire * a.bytes_sent - a.wire * b.bytes_sent) / across) if across else 0.0
