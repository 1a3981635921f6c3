"""Clock alignment: offset and drift of each machine's clock, from the collective operations of every step.

Law. A rank has an answer only after every rank that contributes to it has begun: for ranks i and j of an operation,

    T_i(begin_i) <= T_j(end_j)          T_i(x) = x + offset_i + drift_i x    time on the first clock

so with the first clock as 0 each operation bounds another clock's offset from both sides,

    begin_0 - end_i  <=  offset_i(x) + drift_i x  <=  end_0 - begin_i

the lower bound at x = end_i, the upper one at x = begin_i. The width of a bound is a message delay, or more if a rank
waited for another; over many steps each side is tight when one or the other rank came last. Of all lines between the
lower and the upper points, bounded by their convex hulls, the one with the most room on both sides is chosen: with
symmetric message delays it is the true one. The range of all lines between the points is the error bound, which holds
for asymmetric delays, too: at best half the smallest round trip.

Processes of one machine read the same clock, and share the bounds of their operations. Clocks drift by at most
MOST_DRIFT; steeper lines are excluded. No additional messages are sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from gossamer.base.spans.record_format import EVERYONE, MOST_PEERS
from gossamer.observe.trace.span_files import Key, ProcessSpans

MOST_DRIFT = 500e-6  # maximum slew of NTP; crystals are within 100e-6
TURNS = 60  # of a search that divides its interval by 1.6 each time
Points = tuple[NDArray[np.float64], NDArray[np.float64]]  # (x, offset)


@dataclass(frozen=True)
class AlignedClock:
    """T(x) = x + offset + drift (x - origin), within `error` seconds over the recorded time.

    error: infinite if no operation bounds the clock on both sides; then wall clocks were compared instead. contradicts:
    seconds by which the bounds exclude every line, because a clock was set or slewed meanwhile.
    """

    offset: float = 0.0
    drift: float = 0.0
    origin: float = 0.0
    error: float = 0.0
    contradicts: float = 0.0
    bounds: int = 0  # number of operations that bound it

    def __call__(self, moment: float) -> float:
        return moment + self.offset + self.drift * (moment - self.origin)


def align(processes: Sequence[ProcessSpans]) -> dict[str, AlignedClock]:
    """Every clock relative to that of the first process, by identity."""
    first = processes[0]
    lower: dict[str, list[tuple[float, float]]] = defaultdict(list)
    upper: dict[str, list[tuple[float, float]]] = defaultdict(list)
    made: dict[Key, list[ProcessSpans]] = defaultdict(list)
    for each in processes:
        for key in each.operations:
            made[key].append(each)
    for key, makers in made.items():
        for sender, receiver in _pairs(key, makers):
            began, ended = sender.operations[key][0], receiver.operations[key][1]
            if receiver.clock == first.clock != sender.clock:
                upper[sender.clock].append((began, ended - began))
            elif sender.clock == first.clock != receiver.clock:
                lower[receiver.clock].append((ended, began - ended))
    clocks = {first.clock: AlignedClock()}
    for each in processes:
        if each.clock not in clocks:
            clocks[each.clock] = _aligned(lower[each.clock], upper[each.clock], each, first)
    return clocks


def _pairs(key: Key, makers: Sequence[ProcessSpans]) -> Iterator[tuple[ProcessSpans, ProcessSpans]]:
    """(sender, receiver) of each contribution to an operation."""
    first = key[-3] if key[0] >= 0 else None
    for receiver in makers:
        peers = receiver.operations[key][2]
        for sender in makers:
            if sender is not receiver and received_from(peers, sender.rank, first):
                yield sender, receiver


def received_from(peers: int, rank: int, first: int | None) -> bool:
    """Whether an answer contains the contribution of a rank. first: rank of its group; None if ranks change."""
    if peers == EVERYONE:
        return True
    place = -1 if first is None else rank - first
    return 0 <= place < MOST_PEERS and bool(peers >> place & 1)


def _aligned(
    lower: Sequence[tuple[float, float]], upper: Sequence[tuple[float, float]], each: ProcessSpans, first: ProcessSpans
) -> AlignedClock:
    if not lower or not upper:
        return AlignedClock(offset=(each.wall - each.moment) - (first.wall - first.moment), error=inf)
    return fit(np.array(lower), np.array(upper))


def fit(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> AlignedClock:
    """The line with the most room between the points below and above it. lower, upper: (points, 2) of x, y."""
    xs = np.concatenate([lower[:, 0], upper[:, 0]])
    origin = float(xs.mean())
    below, above = _centered(lower, origin), _centered(upper, origin)

    def floor(drift: float) -> float:
        return float((below[1] - drift * below[0]).max())

    def ceiling(drift: float) -> float:
        return float((above[1] - drift * above[0]).min())

    def room(drift: float) -> float:
        return ceiling(drift) - floor(drift)

    drift = _highest(room, -MOST_DRIFT, MOST_DRIFT)
    contradicts = max(0.0, -room(drift))
    offset = (floor(drift) + ceiling(drift)) / 2
    error = contradicts
    if not contradicts:
        least, most = _edge(room, drift, -MOST_DRIFT), _edge(room, drift, MOST_DRIFT)
        for x in (float(xs.min()) - origin, 0.0, float(xs.max()) - origin):

            def highest(slope: float, x: float = x) -> float:
                return ceiling(slope) + slope * x

            def lowest(slope: float, x: float = x) -> float:
                return -(floor(slope) + slope * x)

            here = offset + drift * x
            error = max(error, highest(_highest(highest, least, most)) - here)
            error = max(error, lowest(_highest(lowest, least, most)) + here)
    return AlignedClock(offset, drift, origin, error, contradicts, len(lower) + len(upper))


def _centered(points: NDArray[np.float64], origin: float) -> Points:
    return points[:, 0] - origin, points[:, 1]


def _highest(f, low: float, high: float) -> float:  # type: ignore[no-untyped-def]
    """Maximum of a concave function on an interval, by golden-section search."""
    share = (5**0.5 - 1) / 2
    a, b = high - share * (high - low), low + share * (high - low)
    at_a, at_b = f(a), f(b)
    for _ in range(TURNS):
        if at_a >= at_b:
            high, b, at_b = b, a, at_a
            a = high - share * (high - low)
            at_a = f(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + share * (high - low)
            at_b = f(b)
    return (low + high) / 2


def _edge(room, inside: float, outside: float) -> float:  # type: ignore[no-untyped-def]
    """The drift closest to `outside` that leaves room."""
    if room(outside) >= 0:
        return outside
    for _ in range(TURNS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if room(middle) >= 0 else (inside, middle)
    return inside


def describe(clocks: Mapping[str, AlignedClock], processes: Sequence[ProcessSpans]) -> list[str]:
    """A sentence for each clock except the first."""
    lines = []
    for identity, clock in clocks.items():
        ranks = ", ".join(str(rank) for rank in sorted({each.rank for each in processes if each.clock == identity}))
        if identity == processes[0].clock:
            continue
        if clock.error == inf:
            lines.append(
                f"ranks {ranks} have no common operation with rank {processes[0].rank} that bounds their clock: they "
                "are placed by their machines' wall clocks, which may be wrong by any amount. Trace more steps"
            )
        else:
            description = (
                f"ranks {ranks}: within {1000 * clock.error:.3g} ms (drift {1e6 * clock.drift:.3g} parts per million)"
            )
            if clock.contradicts:
                description += f"; their clock was set or slewed meanwhile, by about {1000 * clock.contradicts:.3g} ms"
            lines.append(description)
    return lines
