"""Network fit: rate and latency from all ranks' steps, so that a slow worker does not look like a slow network.

Waiting for other ranks also counts as time on the wire, but the last rank of a round waits for no other, so its wire
time is that of the network. Therefore the rank with the least waiting in each round is used, and the median over
rounds.

    wire = bytes_sent * seconds_per_byte + trips * trip_seconds

One rung gives one equation for two unknowns. The latency is measured by the looks, which are short messages; if it is
not known from them, the looks before and after a change of rungs give two equations. Otherwise these two looks
calibrate the model: the network is the same before and after, so the rung that sends more bytes determines the line,
and the ratio of the other rung's wire time to its estimate becomes that rung's factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from gossamer.train.auto.measurement import Measurement, StepSeconds, common_steps

LOOK_TRIPS = 2  # of a look's exchange: lengths, then texts
LATENCY_SHARE = 0.9  # maximum share of latency in the wire time, since bytes take some time as well
LEAST_SECONDS_PER_BYTE = 1e-12  # a terabyte per second, if nothing could be measured
MOST_FACTOR = 3.0  # maximum error of the model; a larger one means that the network has changed

Factors = Mapping[str, float]
NO_FACTORS: Factors = {}


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """Medians of a step over all ranks since the last look, in seconds."""

    step: float  # of the slowest rank
    computing: float  # of the training thread of the slowest rank
    waiting: float  # of the rank with the least waiting, as the next two
    wire: float
    codec: float
    bytes_sent: float  # of the rank that sent most
    steps: int  # number of steps that it represents


Chooser = Callable[[Sequence[StepSeconds]], StepSeconds]


def waited_least(ranks: Sequence[StepSeconds]) -> StepSeconds:
    """The rank that arrived last, so that others waited for it."""
    return min(ranks, key=lambda rank: rank.waiting)


def observe(measurements: Sequence[Measurement], period: int, believed: Chooser = waited_least) -> StepWindow | None:
    """Combine all ranks' measurements, in rank order; None unless all ranks have made a whole period."""
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
        steps=min(each.covers_steps for each in measurements if each.steps),
    )


def _rounds(steps: Sequence[StepSeconds], period: int) -> list[StepSeconds]:
    """Averages over each whole period; each contains exactly one round, wherever it begins."""
    latest = steps[len(steps) % period :]
    periods = [latest[first : first + period] for first in range(0, len(latest), period)]
    return [StepSeconds(*(sum(numbers) / period for numbers in zip(*each, strict=True))) for each in periods]


@dataclass(frozen=True, kw_only=True)
class FittedLine:
    """The network as measured by a worker."""

    seconds_per_byte: float  # of sent payload, while all workers send
    trip_seconds: float  # of a short message, one way

    def wire_seconds(self, bytes_sent: float, trips: float) -> float:
        return bytes_sent * self.seconds_per_byte + trips * self.trip_seconds

    @property
    def bits_per_second(self) -> float:
        return 8 / self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class Equation:
    """One rung's step on a line: bytes sent and time taken."""

    rung: str
    bytes_sent: float
    trips: float
    wire: float
    waited_for: bool  # the training thread waited for most of it, so it was measured in full


def fit(
    now: Equation,
    measurements: Sequence[Measurement],
    before: Equation | None,
    known: FittedLine | None,
    factors: Factors = NO_FACTORS,
) -> tuple[FittedLine, Factors]:
    """Fit the line to one equation and the known latency. Returns it and the updated factors.

    Args:
        now: of this look.
        before: of the last look, used if it was on another rung.
        known: the line at the last look.
        factors: ratio of a rung's wire time to its estimate, by name.
    """
    received = [each.exchange_seconds for each in measurements if each.exchange_seconds is not None]
    by_look = min(received, default=0.0) / LOOK_TRIPS  # the last rank to arrive waits for no other
    learned = known.trip_seconds if known is not None else 0.0
    other = before if before is not None and before.rung != now.rung else None
    if other is not None and not received and other.waited_for and now.waited_for:
        learned = _latency(other, now)
    trip_seconds = max(by_look, learned)
    if other is not None and received:
        factors = _calibrated(now, other, trip_seconds, factors)
    return line_of(_priced(now, factors), trip_seconds), factors


def _calibrated(now: Equation, other: Equation, trip_seconds: float, factors: Factors) -> Factors:
    """Update the factors from two rungs on one line: the one that sends more bytes determines the line, and the other's
    factor is set to match. If they differ by too much, the line has changed in between, and factors are kept."""
    more, fewer = (now, other) if now.bytes_sent >= other.bytes_sent else (other, now)
    factors = {more.rung: 1.0, **factors} if more is other else {**factors, more.rung: 1.0}
    predicted = line_of(_priced(more, factors), trip_seconds).wire_seconds(fewer.bytes_sent, fewer.trips)
    if predicted <= MOST_FACTOR * fewer.wire and fewer.wire <= MOST_FACTOR * predicted:
        return {**factors, fewer.rung: fewer.wire / predicted}
    return factors


def _priced(equation: Equation, factors: Factors) -> Equation:
    return replace(equation, wire=equation.wire / factors.get(equation.rung, 1.0))


def line_of(now: Equation, trip_seconds: float) -> FittedLine:
    """The line with this latency, or with a smaller one if the wire time was less than the trips would take."""
    if now.trips:
        trip_seconds = min(trip_seconds, LATENCY_SHARE * now.wire / now.trips)
    left = max(0.0, now.wire - now.trips * trip_seconds)
    per_byte = left / now.bytes_sent if now.bytes_sent else 0.0
    return FittedLine(seconds_per_byte=max(per_byte, LEAST_SECONDS_PER_BYTE), trip_seconds=trip_seconds)


def _latency(a: Equation, b: Equation) -> float:
    """The latency at which two equations give the same rate; 0 if they are parallel."""
    across = b.trips * a.bytes_sent - a.trips * b.bytes_sent
    return max(0.0, (b.wire * a.bytes_sent - a.wire * b.bytes_sent) / across) if across else 0.0
